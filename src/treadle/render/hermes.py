"""Hermes-style calls, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, after `<think>reasoning</think>`.

`write_reply` and `read_reply` are each other's inverse for every good message whose prose holds no marker of its own.
Prose round-trips to the character; call text is kept as it was written (`raw`).
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec

from treadle.errors import DataError
from treadle.types import Message, ToolCall

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
MARKERS = (THINK, THINK_END, CALL, CALL_END)

_BLOCK = re.compile(f"{THINK}|{CALL}")
_CALL_MARKER = re.compile(f"{CALL}|{CALL_END}")


class _BrokenCall(ValueError):
    """Why a call can't be run, in words the policy can act on."""


# ---------------------------------------------------------------- writing


def write_reply(message: Message) -> str:
    """The text of an assistant message: reasoning, content, then each call on its own lines."""
    reasoning = "" if message.reasoning is None else f"{THINK}{message.reasoning}{THINK_END}"
    calls = "\n".join(_write_call(call) for call in message.tool_calls)
    between = "\n" if message.content and calls else ""
    return f"{reasoning}{message.content}{between}{calls}"


def _write_call(call: ToolCall) -> str:
    if call.raw or call.error:  # a call may be empty: `<tool_call></tool_call>`
        return f"{CALL}{call.raw}{CALL_END}"
    if call.arguments is None:
        raise DataError(f"call {call.id!r} has neither arguments nor raw text: keep what was written in `raw`")
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"{CALL}\n{body}\n{CALL_END}"


# ---------------------------------------------------------------- reading


def read_reply(text: str) -> Message:
    """Split a reply into reasoning, content and calls, in one pass from left to right.

    Calls drafted inside reasoning are reasoning. Reasoning that never closes runs to the end, so nothing in it is
    executed. Prose between or after calls joins the content, on lines of its own.
    """
    before: list[str] = []  # prose up to the first call
    after: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    at = 0
    while block := _BLOCK.search(text, at):
        (after if calls else before).append(text[at : block.start()])
        if block.group() == THINK:
            thought, _, rest = text[block.end() :].partition(THINK_END)
            thoughts.append(thought)
            at = len(text) - len(rest)
        else:
            call, at = _read_call(text, block.end(), f"call_{len(calls)}")
            calls.append(call)
    (after if calls else before).append(text[at:])
    prose = "".join(before)
    if calls:
        prose = "\n".join(filter(None, [prose.removesuffix("\n"), *(piece.strip() for piece in after)]))
    reasoning = "\n".join(thoughts) if thoughts else None
    return Message(role="assistant", content=prose, tool_calls=tuple(calls), reasoning=reasoning)


def _read_call(text: str, start: int, call_id: str) -> tuple[ToolCall, int]:
    """The call whose opening marker ends at `start`, and where reading goes on.

    Its end is found by reading the JSON, not by looking for the marker: arguments may hold marker text.
    """
    name = ""
    try:
        value, json_end = _read_json(text, start)
        name = _name(value)
        end = _past_space(text, json_end)
        if not text.startswith(CALL_END, end):
            raise _BrokenCall(f"expected {CALL_END} after the JSON object")
        call = ToolCall(id=call_id, name=name, arguments=_arguments(value), raw=text[start:end])
        return call, end + len(CALL_END)
    except _BrokenCall as problem:
        end, after = _broken_end(text, start)
        return ToolCall(id=call_id, name=name, arguments=None, raw=text[start:end], error=str(problem)), after


def _broken_end(text: str, start: int) -> tuple[int, int]:
    """Where a broken call's text ends (at the next marker or the end of the reply), and where reading goes on."""
    marker = _CALL_MARKER.search(text, start)
    if marker is None:
        return len(text), len(text)
    return marker.start(), marker.end() if marker.group() == CALL_END else marker.start()


def _past_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _read_json(text: str, start: int) -> tuple[dict[str, Any], int]:
    try:
        value, end = _JSON.raw_decode(text, _past_space(text, start))
        msgspec.msgpack.encode(value)  # what can't be stored can't be a call: huge integers, lone surrogates
    except json.JSONDecodeError as error:
        raise _BrokenCall(f"not valid JSON: {error.msg} at character {error.pos - start}") from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise _BrokenCall(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise _BrokenCall(f"expected a JSON object, found {type(value).__name__}")
    return value, end


def _name(value: dict[str, Any]) -> str:
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise _BrokenCall('"name" must be the name of a tool')
    return name


def _arguments(value: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments: an object, or a string that holds one; none at all mean {}."""
    arguments = value.get("arguments")
    if "arguments" not in value and (other := value.keys() - {"name", "id", "type"}):
        raise _BrokenCall(f'"arguments" is missing (found {sorted(other)[0]!r})')
    if isinstance(arguments, str):
        inner, end = _read_json(arguments, 0)
        if arguments[end:].strip():
            raise _BrokenCall('"arguments" must be an object, found text')
        arguments = inner
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise _BrokenCall(f'"arguments" must be an object, found {type(arguments).__name__}')
    return arguments


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("the same key twice")
    return found


def finite(text: str) -> float:
    """A number of a JSON text; ValueError for Infinity, NaN, and what a float can't hold."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


_JSON = json.JSONDecoder(object_pairs_hook=_object, parse_float=finite, parse_constant=finite)
