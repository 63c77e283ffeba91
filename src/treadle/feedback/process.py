"""Process feedback: was this step a sound one, whatever became of the episode. Pure functions over a trajectory.

A reply gets at most one signal, so that no step is punished twice: `repeated_call` when it tries again what has already
failed, else `invalid_call` when its call could not be run or was turned down.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from treadle.types import Layer, Node, Signal, ToolCall, Trajectory, is_solved, to_json

# ---------------------------------------------------------------- all that is known here of particular environments

TEST_TOOLS = frozenset({"run_tests"})
EDIT_TOOLS = frozenset({"replace", "edit"})
UNDO_TOOL = "undo"
_ALL_PASSED = re.compile(r"(\d+ )?passed\b")


def is_test_run(node: Node) -> bool:
    """Whether a node is the result of tests that did run."""
    return node.message.role == "tool" and node.message.name in TEST_TOOLS and node.failure is None


def test_run_failed(node: Node) -> bool:
    return is_test_run(node) and _ALL_PASSED.match(node.message.content) is None


# ---------------------------------------------------------------- steps


Paired = tuple[ToolCall, Node | None]


def steps(path: list[Node]) -> Iterator[tuple[Node, list[Paired]]]:
    """Each reply of a path with its calls, each beside its result (None: it has none)."""
    starts = [i for i, node in enumerate(path) if node.message.role == "assistant"]
    for start, stop in pairwise([*starts, len(path)]):
        results = [node for node in path[start + 1 : stop] if node.message.role == "tool"]
        yield path[start], [(call, _take(call, results)) for call in path[start].message.tool_calls]


def _take(call: ToolCall, results: list[Node]) -> Node | None:
    """Ids are looked for within the step alone: policies number their calls anew in every reply."""
    found = next((node for node in results if node.message.tool_call_id == call.id), None)
    if found is not None:
        results.remove(found)
    return found


def why_invalid(call: ToolCall, result: Node | None) -> str | None:
    """The failure code of a call that could not be run or was turned down; None for a sound one."""
    if call.arguments is None:
        return "broken_call"
    return result.failure if result is not None else None


class _History:
    """What was tried along one path, and what is known to have failed."""

    def __init__(self) -> None:
        self.edits: list[tuple[bytes, int]] = []  # those in place, in order, each with the node that made it
        self.failed: dict[bytes, str] = {}  # edits with which tests failed -> where
        self.refused: dict[bytes, str] = {}  # calls turned down, and failed test runs, since the last change -> how
        self.failed_try = False  # tests have failed after an edit

    @property
    def knows_failures(self) -> bool:
        return bool(self.failed or self.refused)

    def repeats(self, call: ToolCall) -> str | None:
        return self.failed.get(_key(call)) or self.refused.get(_key(call))

    def add(self, reply: Node, call: ToolCall, result: Node | None) -> None:
        key, code = _key(call), why_invalid(call, result)
        if code:
            self.refused.setdefault(key, f"{code} at node {reply.id}")
        elif call.name in EDIT_TOOLS:
            self.edits.append((key, reply.id))
            self.refused.clear()  # what could not be done in one state may well be right in another
        elif call.name == UNDO_TOOL:
            self.refused.clear()
            if self.edits:
                self.edits.pop()
        if result is not None and test_run_failed(result):
            self.refused.setdefault(key, f"failed at node {result.id}, and nothing was changed since")
            self.failed_try |= bool(self.edits)
            for edit, node in self.edits:
                self.failed.setdefault(edit, f"tried at node {node}, tests failed at node {result.id}")


def _key(call: ToolCall) -> bytes:
    return to_json([call.name, sorted((call.arguments or {"raw": call.raw}).items())])


# ---------------------------------------------------------------- signals


def step_signals(trajectory: Trajectory) -> list[Signal]:
    """-1 on each reply with an invalid or repeated call, in order of nodes; sound replies get no signal."""
    found: dict[int, Signal] = {}
    for leaf in trajectory.leaves():
        history = _History()
        for reply, calls in steps(trajectory.path(leaf)):
            signal = _judge(reply, calls, history)
            if signal is not None:
                found.setdefault(reply.id, signal)
            for call, result in calls:
                history.add(reply, call, result)
    return [found[node] for node in sorted(found)]


def is_marked(node: Node) -> bool:
    """Not to be imitated: a mistake by its log, or a reply copied from an earlier episode, where it is trained."""
    return bool(node.extra.get("untrained") or node.extra.get("copied_from"))


def faulty(trajectory: Trajectory) -> set[int]:
    """Replies that a step signal finds fault with: now, or when the trajectory was stored, with what was known then."""
    stored = (signal for signal in trajectory.signals if signal.layer is Layer.PROCESS)
    found = [*stored, *step_signals(trajectory)]
    return {signal.node for signal in found if signal.node is not None and (signal.value or 0.0) < 0}


def _judge(reply: Node, calls: list[Paired], history: _History) -> Signal | None:
    again = [f"{call.name}: {why}" for call, _ in calls if (why := history.repeats(call))]
    if again:
        return _bad("repeated_call", reply, again[0])
    invalid = [f"{call.name}: {code}" for call, result in calls if (code := why_invalid(call, result))]
    return _bad("invalid_call", reply, invalid[0]) if invalid else None


def _bad(name: str, reply: Node, evidence: str) -> Signal:
    return Signal(name=name, layer=Layer.PROCESS, value=-1.0, node=reply.id, evidence=evidence)


# ---------------------------------------------------------------- behaviour


class Behaviour(msgspec.Struct, kw_only=True):
    """What one episode did, along its last path. A failed try is a failed test run after at least one edit."""

    calls: int = 0
    valid_json_calls: int = 0  # arguments could be read
    invalid_calls: int = 0  # broken, or turned down with a failure code
    test_runs: int = 0
    failed_test_runs: int = 0
    edits: int = 0
    calls_after_failure: int = 0  # made when something is known to have failed: a call, or tests
    repeats_after_failure: int = 0  # of these, those that try it again
    recovered_after_failed_run: bool | None = None  # None: there was no failed try
    sampled_tokens: int = 0


def behaviour(trajectory: Trajectory) -> Behaviour:
    """Counts for the evaluation table. Recovery is by reward where there is one, else by a later run that passed."""
    found = Behaviour(sampled_tokens=trajectory.sampled_tokens())
    history = _History()
    passed = False  # the last test run
    for reply, calls in steps(trajectory.path()):
        for call, result in calls:
            found.calls += 1
            found.valid_json_calls += call.arguments is not None
            found.invalid_calls += why_invalid(call, result) is not None
            found.edits += call.name in EDIT_TOOLS
            found.calls_after_failure += history.knows_failures
            found.repeats_after_failure += history.repeats(call) is not None
            if result is not None and is_test_run(result):
                passed = not test_run_failed(result)
                found.test_runs += 1
                found.failed_test_runs += not passed
            history.add(reply, call, result)
    reward = trajectory.outcome.reward
    if history.failed_try:
        found.recovered_after_failed_run = passed if reward is None else is_solved(reward)
    return found
