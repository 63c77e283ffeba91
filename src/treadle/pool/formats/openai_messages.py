"""OpenAI chat messages to nodes: roles, contents, calls, and which result answers which call.

Every order of roles is accepted. A result is paired with its call by id; without one, by order (`extra["inferred"]`).
A call that nothing answers is reported as unanswered; a result that answers nothing is dropped and counted.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import msgspec

from treadle.pool.formats.base import BadRecord
from treadle.render.hermes import finite
from treadle.types import Message, Node, ToolCall, unstorable

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ROLES |= {"tool": "tool", "function": "tool"}
_READ = {"role", "content", "tool_calls", "function_call", "tool_call_id", "name", "reasoning_content", "reasoning"}
_READ |= {"weight"}


class _Open(msgspec.Struct):
    """A call that waits for its result."""

    call: ToolCall
    given_id: str | None  # None: the log gave it no id
    message: int


class Reader:
    """Reads the messages of one row into one path of nodes."""

    def __init__(self, untrained: set[int], failures: dict[int, str]) -> None:
        """`untrained` and `failures` are by message index; node ids differ from it when results were dropped."""
        self.nodes: list[Node] = []
        self.empty_replies = 0
        self.counts: Counter[str] = Counter()  # what had to be mended or left out
        self._untrained = untrained
        self._failures = failures
        self._open: list[_Open] = []
        self._ids: set[str] = set()

    def read(self, messages: list[dict[str, Any]]) -> None:
        """Raises BadRecord."""
        for index, given in enumerate(messages):
            role = _role(given, index)
            if role == "tool":
                self._result(given, index)
            elif role == "assistant":
                self._reply(given, index)
            else:
                name = given.get("name")
                self._add(given, index, Message(role=role, name=name if isinstance(name, str) else None))
        if not any(node.message.role == "assistant" for node in self.nodes):
            raise BadRecord("no_reply", "no assistant message: there is nothing to learn from")

    def unanswered(self, ended: bool) -> list[str]:
        """Ids of calls without a result. Where the log says how the episode `ended`, its last calls need none."""
        last = {call.id for call in self.nodes[-1].message.tool_calls} if ended else set()
        return [waiting.call.id for waiting in self._open if waiting.call.id not in last]

    def _add(self, given: dict[str, Any], index: int, message: Message) -> Node:
        content, other = _content(given.get("content"), index)
        node = Node(
            id=len(self.nodes),
            parent=self.nodes[-1].id if self.nodes else None,
            message=msgspec.structs.replace(message, content=content),
        )
        fields = {name: value for name, value in given.items() if name not in _READ and value is not None}
        if fields:
            node.extra["fields"] = fields
        if other:
            node.extra["parts"] = other
            self.counts["parts_without_text"] += len(other)
        self.nodes.append(node)
        return node

    def _reply(self, given: dict[str, Any], index: int) -> None:
        calls = tuple(self._call(call, index, n) for n, call in enumerate(_given_calls(given, index)))
        reasoning = given.get("reasoning_content") or given.get("reasoning")
        message = Message(
            role="assistant", tool_calls=calls, reasoning=reasoning if isinstance(reasoning, str) else None
        )
        node = self._add(given, index, message)
        if index in self._untrained or given.get("weight") == 0:
            node.extra["untrained"] = True
        self.empty_replies += not (calls or node.message.content.strip())

    def _call(self, given: Any, index: int, position: int) -> ToolCall:
        where = f"messages[{index}].tool_calls[{position}]"
        function = given.get("function", given) if isinstance(given, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name", ""), str):
            raise BadRecord("bad_call", f"{where}: expected an object with function.name and function.arguments")
        given_id = given.get("id") if isinstance(given.get("id"), str) and given["id"] else None
        arguments = function.get("arguments")
        call = read_call(self._fresh_id(given_id or f"call_{index}_{position}"), function.get("name", ""), arguments)
        self.counts["broken_calls"] += call.arguments is None
        self._open.append(_Open(call, given_id, index))
        return call

    def _fresh_id(self, wanted: str) -> str:
        """Ids must tell calls apart; logs reuse them (`call_0` in every turn)."""
        name, again = wanted, 1
        while name in self._ids:
            again += 1
            name = f"{wanted}~{again}"
        self.counts["renamed_ids"] += name != wanted
        self._ids.add(name)
        return name

    def _result(self, given: dict[str, Any], index: int) -> None:
        answered, inferred = self._match(given)
        if answered is None:
            self.counts["dropped_results"] += 1
            return
        self._open.remove(answered)
        call = answered.call
        node = self._add(given, index, Message(role="tool", tool_call_id=call.id, name=call.name or None))
        node.failure = self._failures.get(index)
        if inferred:
            node.extra["inferred"] = True
            self.counts["inferred_pairs"] += 1

    def _match(self, given: dict[str, Any]) -> tuple[_Open | None, bool]:
        """The call this result answers, and whether that is a guess from the order.

        Of calls with the same id the latest message's come first: an id is reused only after its first use is over.
        """
        given_id = given.get("tool_call_id")
        same = [waiting for waiting in self._open if given_id and waiting.given_id == given_id]
        if same:
            latest = max(waiting.message for waiting in same)
            return next(waiting for waiting in same if waiting.message == latest), False
        guesses = [waiting for waiting in self._open if not given_id or waiting.given_id is None]
        latest = max((waiting.message for waiting in guesses), default=-1)
        guesses = [waiting for waiting in guesses if waiting.message == latest]
        named = [waiting for waiting in guesses if waiting.call.name == given.get("name")]
        return next(iter(named or guesses), None), True


def _role(given: dict[str, Any], index: int) -> str:
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRecord("unknown_role", f"messages[{index}]: unknown role {role!r} (known: {', '.join(_ROLES)})")
    return _ROLES[role]


def _content(content: Any, index: int) -> tuple[str, list[str]]:
    """The text, and the types of parts that hold none (images, files)."""
    if content is None:
        return "", []
    if isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        kind = type(content).__name__
        raise BadRecord("bad_content", f"messages[{index}].content: expected text or a list of parts, found {kind}")
    texts: list[str] = []
    other: list[str] = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str):
            texts.append(text)
        else:
            other.append(str(part.get("type")) if isinstance(part, dict) else type(part).__name__)
    return "".join(texts), other


def _given_calls(given: dict[str, Any], index: int) -> list[Any]:
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list):
        raise BadRecord("bad_call", f"messages[{index}].tool_calls: expected a list, found {type(calls).__name__}")
    older = given.get("function_call")
    return [*calls, older] if older else calls


# ---------------------------------------------------------------- arguments


def read_call(call_id: str, name: str, given: Any) -> ToolCall:
    """Arguments as an object, as a JSON string, as a string of a string, absent, or broken (kept as `raw`)."""
    value = given
    problem = "" if name.strip() else "the call names no tool"
    for _ in range(2):
        if isinstance(value, str) and value.strip():
            try:
                value = json.loads(value, parse_constant=finite, parse_float=finite)
            except (ValueError, RecursionError) as error:
                problem = problem or f"arguments are not valid JSON: {error}"
                break
    if value is None or value == "":
        value = {}
    if isinstance(value, dict):
        problem = problem or unstorable(value)
        if not problem:
            return ToolCall(id=call_id, name=name, arguments=value)
    text = given if isinstance(given, str) else json.dumps(value)
    problem = problem or f"arguments must be an object, found {type(value).__name__}"
    return ToolCall(id=call_id, name=name, arguments=None, raw=_raw(name, text), error=problem)


def written_arguments(call: ToolCall) -> str:
    """The arguments text of a call: for a broken one, what the policy wrote."""
    if call.arguments is not None:
        return json.dumps(call.arguments, ensure_ascii=False)
    before, after = _raw(call.name, "\0").split("\0")
    inside = call.raw.startswith(before) and call.raw.endswith(after)
    return call.raw[len(before) : len(call.raw) - len(after)] if inside else call.raw


def write_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": written_arguments(call)}}


def _raw(name: str, arguments: str) -> str:
    """The text between a broken call's markers, as the policy would have written it."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}' if name else arguments
