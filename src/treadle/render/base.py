"""The seam between messages and token ids: what a renderer does, and when two messages stand for the same tokens.

A renderer never touches ids that were sampled: a conversation's ids are the concatenation of one delta a message, and a
sampled reply is kept as it was sampled. Work is linear in the new text: a delta depends on its own message alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from treadle.types import Act, Contract, Message, Tool, ToolCall


class Renderer(Protocol):
    """Messages to ids and back. All ids are plain ints; masks hold 1 where the policy is the author."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a reply; the first one is what a finished reply ends with."""

    def tool_block(self, tools: Sequence[Tool], acts: Sequence[Act] = ()) -> str:
        """The text that tells the policy its tools and how to call them; "" without tools and acts."""

    def delta(self, message: Message, first: bool, tools: Sequence[Tool] = (), acts: Sequence[Act] = ()) -> list[int]:
        """Ids that `message` adds. Tools and acts belong to the first message and are ignored on later ones."""

    def reply_header(self) -> list[int]:
        """Ids between the last message and a reply: given to the model, never trained."""

    def reply(self, message: Message, first: bool = False) -> tuple[list[int], list[int]]:
        """(ids, mask) of an assistant message known as text: header 0, content 1, end of turn 1."""

    def text(self, message: Message) -> str:
        """What the policy would have written: reasoning, content and calls, without header and end of turn."""

    def encode(self, text: str) -> list[int]:
        """Ids of a reply's text, call markers as the vocabulary has them; nothing else becomes a special id."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens visible."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), acts: Sequence[Act] = ()) -> list[int]:
        """Ids of a whole conversation, without a header for the next reply."""

    def extends(
        self,
        previous: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        acts: Sequence[Act] = (),
    ) -> list[int] | None:
        """The ids that follow `previous` in the full render, or None when it does not begin with them (a branch)."""

    def parse(self, ids: Sequence[int]) -> Message:
        """A sampled reply as a message. Never raises on what a policy wrote: a broken call is kept, with its error."""


def continuation(known: Sequence[Message], messages: Sequence[Message]) -> Sequence[Message] | None:
    """What `messages` adds to `known`, or None when it tells another history.

    A client sends back text, never ids, and text need not encode to the ids that were sampled. So history is matched
    message by message; where it matches, the stored ids stand, and only the rest is rendered.
    """
    if len(messages) < len(known) or not all(map(same_message, known, messages)):
        return None
    return messages[len(known) :]


def same_message(known: Message, echoed: Message) -> bool:
    """Whether `echoed` is what a client would send back for `known`.

    Call ids add no tokens and are not compared; neither is reasoning that the client left out.
    """
    return (
        known.role == echoed.role
        and known.content == echoed.content
        and (echoed.reasoning is None or echoed.reasoning == known.reasoning)
        and [_call_key(call) for call in known.tool_calls] == [_call_key(call) for call in echoed.tool_calls]
    )


def _call_key(call: ToolCall) -> str:
    if call.arguments is None:
        return call.raw.strip()
    return json.dumps([call.name, call.arguments], sort_keys=True)


def contract_fingerprint(contract: Contract, renderer: Renderer) -> str:
    """What trajectories are marked with: the contract as this renderer tells it to the policy."""
    return contract.fingerprint(renderer.tool_block(contract.tools, contract.acts))


def undeclared_calls(messages: Sequence[Message], tools: Sequence[Tool]) -> list[str]:
    """Names that are called but not among `tools`: trained on, such a row would teach invented tools."""
    declared = {tool.name for tool in tools}
    called = {call.name for message in messages for call in message.tool_calls if call.arguments is not None}
    return sorted(called - declared)
