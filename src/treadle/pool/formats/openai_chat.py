"""OpenAI chat rows, one JSON object a line: `{"messages": [...], "tools": [...], "metadata": {...}}`.

Understood in `metadata` (or beside `messages`): `task_id`, `environment`, `contract`, `policy` (or `model`), `reward`
(or `resolved`), `end`, `group`, `created`, `source` ("served"), `untrained` (indexes into `messages` of replies that
must not be imitated) and `failures` ({message index: code} of tool results). All else is kept in `extra`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from treadle.errors import DataError
from treadle.feedback.process import is_marked
from treadle.pool.formats.base import BadRecord, Quarantine
from treadle.pool.formats.openai_messages import Reader, write_call
from treadle.store import task_of
from treadle.types import (
    End,
    Message,
    Outcome,
    Source,
    Tool,
    Trajectory,
    fingerprint,
    to_builtins,
    unstorable,
)

_UNDERSTOOD = {
    *("task_id", "environment", "contract", "policy", "model", "reward", "resolved", "end", "group", "created"),
    *("source", "untrained", "failures"),
}


# ---------------------------------------------------------------- reading


def detect(lines: list[str]) -> bool:
    return any(_is_row(line) for line in lines)


def _is_row(line: str) -> bool:
    try:
        row = _load(line)
        return bool(_messages(row))
    except BadRecord:
        return False


def read(path: Path) -> Iterator[Trajectory | Quarantine]:
    """One trajectory a line; a line that can't be read is set aside with its reason, and reading goes on.

    Raises DataError when the file itself can't be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _record(path, number, line)
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}") from error


def _record(path: Path, number: int, line: bytes) -> Trajectory | Quarantine:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        return read_row(_load(text))
    except UnicodeDecodeError as error:
        return Quarantine(str(path), number, "bad_encoding", f"not UTF-8 at byte {error.start}")
    except BadRecord as error:
        return Quarantine(str(path), number, error.code, str(error))


def read_row(row: dict[str, Any]) -> Trajectory:
    """One row as a trajectory without tokens; its id follows from its content. Raises BadRecord."""
    given = _metadata(row)
    messages = _messages(row)
    reader = Reader(_untrained(given, messages), _failures(given, messages))
    reader.read(messages)
    end = _end(given)
    interrupted = reader.unanswered(ended=end not in (End.UNKNOWN, End.INTERRUPTED))
    lacks = {"interrupted": len(interrupted), "empty_replies": reader.empty_replies}
    counts = {name: n for name, n in reader.counts.items() if n} | _unread(row, given)
    served = given.get("source") == Source.SERVED
    trajectory = Trajectory(
        id=_identity(row),
        task_id=_text(given, "task_id"),
        environment=_text(given, "environment"),
        contract=_text(given, "contract"),
        source=Source.SERVED if served else Source.LOG,
        policy=_text(given, "policy") or _text(given, "model") or "unknown",
        nodes=reader.nodes,
        outcome=Outcome(end=End.INTERRUPTED if interrupted else end, reward=_reward(given)),
        group=_text(given, "group"),
        created=_number(given, "created"),
        extra=_extra(row, given, counts) | {name: n for name, n in lacks.items() if n},
    )
    _check_storable(trajectory)
    return trajectory


def _load(text: str) -> dict[str, Any]:
    try:
        row = json.loads(text, parse_constant=lambda _: None)  # NaN and Infinity: not known
    except json.JSONDecodeError as error:
        raise BadRecord("broken_json", f"not valid JSON: {error.msg} at column {error.colno}") from error
    except (RecursionError, ValueError) as error:
        raise BadRecord("broken_json", f"not readable as JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadRecord("not_an_object", f"expected an object, found {type(row).__name__}")
    return row


def _unpacked(value: Any) -> Any:
    """Logs also hold JSON as text. Raises ValueError or RecursionError where the text is none."""
    return json.loads(value, parse_constant=lambda _: None) if isinstance(value, str) else value


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        messages = _unpacked(row.get("messages"))
    except (ValueError, RecursionError) as error:
        raise BadRecord("bad_messages", f"'messages' is text that is not JSON: {error}") from error
    if not isinstance(messages, list) or not messages:
        raise BadRecord("no_messages", "expected a non-empty list under 'messages'")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRecord("bad_message", f"messages[{index}]: expected an object, found {type(message).__name__}")
    return messages


def _metadata(row: dict[str, Any]) -> dict[str, Any]:
    """What is known of the row: `metadata`, and the same names found beside it."""
    beside = {name: row[name] for name in _UNDERSTOOD if name in row}
    return {**beside, **(_own_metadata(row) or {})}


def _own_metadata(row: dict[str, Any]) -> dict[str, Any] | None:
    try:
        metadata = _unpacked(row.get("metadata"))
    except (ValueError, RecursionError):
        return None
    return metadata if isinstance(metadata, dict) else None


def _unread(row: dict[str, Any], given: dict[str, Any]) -> dict[str, int]:
    """Fields that are there and can't be read: what they say is not known, and that is counted."""
    found = [name for name in ("reward", "created") if given.get(name) is not None and _number(given, name) is None]
    if given.get("end") not in (None, "", str(End.UNKNOWN)) and _end(given) is End.UNKNOWN:
        found.append("end")
    if row.get("metadata") is not None and _own_metadata(row) is None:
        found.append("metadata")
    return {f"unread_{name}": 1 for name in found}


def _untrained(given: dict[str, Any], messages: list[dict[str, Any]]) -> set[int]:
    indexes = given.get("untrained") or []
    if not isinstance(indexes, list):
        raise BadRecord("bad_untrained", f"'untrained' must be a list of message indexes, found {indexes!r}")
    for index in indexes:
        known = isinstance(index, int) and 0 <= index < len(messages)
        if not known or messages[index].get("role") != "assistant":
            raise BadRecord("bad_untrained", f"untrained: {index!r} is not the index of an assistant message")
    return set(indexes)


def _failures(given: dict[str, Any], messages: list[dict[str, Any]]) -> dict[int, str]:
    failures = given.get("failures") or {}
    if not isinstance(failures, dict) or not all(re.fullmatch("[0-9]{1,9}", str(key)) for key in failures):
        raise BadRecord("bad_failures", f"'failures' must map message indexes to codes, found {failures!r}")
    if wrong := [key for key in failures if int(key) >= len(messages)]:
        raise BadRecord("bad_failures", f"failures: {wrong[0]!r} is not the index of a message")
    return {int(key): str(code) for key, code in failures.items()}


def _end(given: dict[str, Any]) -> End:
    known = {str(end): end for end in End}
    return known.get(str(given.get("end")), End.UNKNOWN)


def _reward(given: dict[str, Any]) -> float | None:
    """None when the log does not say, or says what is no number; never zero for want of a reward."""
    reward = _number(given, "reward")
    if reward is None and isinstance(given.get("resolved"), bool):
        return float(given["resolved"])
    return reward


def _number(given: dict[str, Any], name: str) -> float | None:
    value = given.get(name)
    if not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _text(given: dict[str, Any], name: str) -> str | None:
    value = given.get(name)
    return None if value in (None, "") else str(value)


def _identity(row: dict[str, Any]) -> str:
    canonical = json.dumps(
        row, sort_keys=True, ensure_ascii=True
    )  # lone surrogates and huge numbers have no other form
    return f"log-{fingerprint(canonical)}"


def _tools(row: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        tools = _unpacked(row.get("tools"))
    except (ValueError, RecursionError):
        return []
    return tools if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools) else []


def _extra(row: dict[str, Any], given: dict[str, Any], counts: dict[str, int]) -> dict[str, Any]:
    tools = _tools(row)
    elsewhere = {"messages", "metadata", *_UNDERSTOOD} | ({"tools"} if tools else set())
    fields = {name: value for name, value in row.items() if name not in elsewhere}
    kept = {
        "tools": tools,
        "metadata": {name: value for name, value in given.items() if name not in _UNDERSTOOD},
        "fields": fields,
        "counts": counts,
    }
    return {name: value for name, value in kept.items() if value}


def _check_storable(trajectory: Trajectory) -> None:
    try:
        fault = unstorable(to_builtins(trajectory))
    except RecursionError as error:
        fault = str(error)
    if fault:
        raise BadRecord("not_storable", f"holds what no store can keep: {fault}")


# ---------------------------------------------------------------- writing


def to_row(trajectory: Trajectory, tools: Sequence[Tool] = ()) -> dict[str, Any]:
    """The last path of a trajectory as a row that `read` gives back; tokens are not part of it."""
    path = trajectory.path()
    outcome = trajectory.outcome
    metadata = {
        "task_id": task_of(trajectory),
        "environment": trajectory.environment,
        "contract": trajectory.contract,
        "policy": trajectory.policy,
        "reward": outcome.reward,
        "end": None if outcome.end is End.UNKNOWN else str(outcome.end),
        "group": trajectory.group,
        "created": trajectory.created,
        "source": str(trajectory.source),
        "untrained": [i for i, node in enumerate(path) if node.message.role == "assistant" and is_marked(node)],
        "failures": {str(i): node.failure for i, node in enumerate(path) if node.failure},
    }
    return {
        "messages": [_write_message(node.message) for node in path],
        "tools": [write_tool(tool) for tool in tools] or [*map(_wire_tool, trajectory.extra.get("tools", []))],
        "metadata": {name: value for name, value in metadata.items() if value not in (None, [], {})},
    }


def _write_message(message: Message) -> dict[str, Any]:
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["content"] = message.content or None
        written["tool_calls"] = [write_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        written["name"] = message.name
    return written


def _wire_tool(kept: dict[str, Any]) -> dict[str, Any]:
    """Tools come from a log as they go out; a served session keeps them as `Tool`s."""
    if "function" in kept:
        return kept
    return {"type": "function", "function": {name: kept.get(name) for name in ("name", "description", "parameters")}}


def write_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": to_builtins(tool.parameters)}
    return {"type": "function", "function": function}
