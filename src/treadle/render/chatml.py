"""ChatML: every message is `<|im_start|>role`, a newline, its content and `<|im_end|>`.

The newline between two messages belongs to the later one. So a delta ends at end-of-turn, exactly where sampling stops,
and a sampled reply followed by the next delta is the full render with no token lost or doubled at the join.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

from treadle.errors import DataError, UserError, unknown
from treadle.render.hermes import CALL, CALL_END, MARKERS, read_reply, write_reply
from treadle.types import Act, Message, Tool

START, END = "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")
_TYPES = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "array": "list",
    "object": "dict",
    "null": "None",
}


class ChatML:
    """Renderer for ChatML models with Hermes-style calls. Text never becomes a special id, whatever it says.

    There is no default system prompt. Tools are told in the system message; a conversation that has none gets one that
    holds the tool block alone. Raises UserError for a tokenizer without the two turn markers.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True  # "<|im_end|>" in a tool's output stays text
        self._start, self._end = (self._special(marker) for marker in (START, END))
        self._markers = {marker: id_ for marker in MARKERS if (id_ := tokenizer.token_to_id(marker)) is not None}
        self._split = re.compile(f"({'|'.join(map(re.escape, self._markers))})" if self._markers else "(?!)")
        self._header = [self._start, *self._plain("assistant\n")]
        self._newline = self._plain("\n")

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (self._end,)

    # ---------------------------------------------------------------- text to ids

    def delta(self, message: Message, first: bool, tools: Sequence[Tool] = (), acts: Sequence[Act] = ()) -> list[int]:
        """Ids that `message` adds after the previous end-of-turn. Raises DataError for an unknown role."""
        block = self.tool_block(tools, acts) if first else ""
        if message.role == "system" and block:
            between = "\n\n" if message.content else ""
            told = self._plain(f"system\n{message.content}{between}")
            return [self._start, *told, *self.encode(block), self._end]
        if block:
            alone = [self._start, *self._plain("system\n"), *self.encode(block), self._end]
            return [*alone, *self.delta(message, first=False)]
        if message.role == "assistant":
            return self.reply(message, first)[0]
        if message.role not in ROLES:
            raise DataError(unknown("role", message.role, ROLES))
        content = self._plain(f"{message.role}\n{message.content}")
        return [*([] if first else self._newline), self._start, *content, self._end]

    def reply_header(self) -> list[int]:
        return [*self._newline, *self._header]

    def reply(self, message: Message, first: bool = False) -> tuple[list[int], list[int]]:
        """(ids, mask) of a reply known as text. Raises DataError for a broken call whose text was not kept."""
        header = self._header if first else self.reply_header()
        written = [*self.encode(self.text(message)), self._end]
        return [*header, *written], [0] * len(header) + [1] * len(written)

    def text(self, message: Message) -> str:
        return write_reply(message)

    def encode(self, text: str) -> list[int]:
        """Ids of the policy's own text. A call marker that the vocabulary holds as one token becomes that token."""
        pieces = [piece for piece in self._split.split(text) if piece]
        ids = ([self._markers[piece]] if piece in self._markers else self._plain(piece) for piece in pieces)
        return list(chain.from_iterable(ids))

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), acts: Sequence[Act] = ()) -> list[int]:
        deltas = (self.delta(message, i == 0, tools, acts) for i, message in enumerate(messages))
        return list(chain.from_iterable(deltas))

    def extends(
        self,
        previous: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        acts: Sequence[Act] = (),
    ) -> list[int] | None:
        full = self.prompt(messages, tools, acts)
        return full[len(previous) :] if full[: len(previous)] == list(previous) else None

    # ---------------------------------------------------------------- ids to text

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def parse(self, ids: Sequence[int]) -> Message:
        """A sampled reply as a message; call ids are `call_0`, `call_1`, ..., unique within the reply."""
        written = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return read_reply(self.decode(written))

    # ---------------------------------------------------------------- tools

    def tool_block(self, tools: Sequence[Tool], acts: Sequence[Act] = ()) -> str:
        """One line a tool, as a signature, then how to call. Short on purpose: each episode pays for every token."""
        lines = [f"{_signature(tool)}: {' '.join(tool.description.split())}" for tool in tools]
        if tools:
            how = f'{CALL}\n{{"name": ..., "arguments": {{...}}}}\n{CALL_END}'
            lines = ["Tools:", *lines, "Call one with:", how]
        if markers := [act.marker for act in acts if act.marker]:
            lines.append(f"{'Or reply' if tools else 'Reply'} without a call, beginning with {' or '.join(markers)}")
        return "\n".join(lines)

    # ---------------------------------------------------------------- tokenizer

    def _plain(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # text that is not valid Unicode
            raise DataError(
                f"text holds a lone surrogate, near {ascii(text)[:60]}: decode it with errors='replace'"
            ) from error
        return ids

    def _special(self, marker: str) -> int:
        id_: int | None = self._tokenizer.token_to_id(marker)
        if id_ is None:
            raise UserError(f"the tokenizer has no {marker!r} token: ChatML needs {START} and {END}")
        return id_


def _signature(tool: Tool) -> str:
    required = tool.parameters.get("required", ())
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    parameters = (f"{name}{'' if name in required else '?'}: {_type(schema)}" for name, schema in properties.items())
    return f"{tool.name}({', '.join(parameters)})"


def _type(schema: Any) -> str:
    """A JSON schema as a short Python-like type; "any" where it says nothing about the type."""
    if not isinstance(schema, Mapping):
        return "any"
    if isinstance(values := schema.get("enum"), list):
        return "|".join(json.dumps(value, ensure_ascii=False) for value in values)
    if isinstance(kinds := schema.get("anyOf") or schema.get("oneOf"), list):
        return "|".join(_type(kind) for kind in kinds)
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    return "|".join(_TYPES.get(name, name) for name in names if isinstance(name, str)) or "any"
