"""Step signals and behaviour: what counts as invalid, as a repeat, as a recovery."""

from typing import Any

from treadle.feedback import process
from treadle.feedback.process import behaviour, step_signals
from treadle.types import End, Message, Node, Outcome, Source, ToolCall, Trajectory

Step = tuple[str, dict[str, Any] | None, str, str | None]  # tool, arguments, result, failure code

FIX_A = {"path": "a.py", "line": 3, "old": "lenn", "new": "len"}
FIX_B = {"path": "a.py", "line": 4, "old": "lenn", "new": "len"}
FAILS: Step = ("run_tests", {}, "File a.py, line 3\n    lenn(x)\nNameError: lenn", None)
PASSES: Step = ("run_tests", {}, "1 passed", None)
SUBMIT: Step = ("submit", {}, "submitted", None)


def edit(arguments: dict[str, Any], failure: str | None = None) -> Step:
    return ("replace", arguments, "not on that line" if failure else "line 3 is now: len(x)", failure)


def episode(*steps: Step, reward: float | None = 1.0, end: End = End.SUBMITTED) -> Trajectory:
    """One call a reply. Ids start anew in every reply, as the parser gives them."""
    nodes = [Node(id=0, parent=None, message=Message(role="user", content="fix"))]

    def add(message: Message, failure: str | None = None, tokens: int = 0) -> None:
        mask = [1] * tokens
        nodes.append(
            Node(id=len(nodes), parent=len(nodes) - 1, message=message, tokens=mask, mask=mask, failure=failure)
        )

    for name, arguments, content, failure in steps:
        call = ToolCall(id="call_0", name=name, arguments=arguments, raw="" if arguments is not None else "{broken")
        add(Message(role="assistant", tool_calls=(call,)), tokens=10)
        add(Message(role="tool", content=content, tool_call_id="call_0", name=name), failure)
    return Trajectory(
        id="t",
        task_id="a",
        environment="repair",
        contract=None,
        source=Source.ROLLOUT,
        policy="p",
        nodes=nodes,
        outcome=Outcome(end=end, reward=reward),
    )


def named(trajectory: Trajectory) -> list[tuple[str, int | None]]:
    assert all(signal.value == -1.0 and signal.evidence for signal in step_signals(trajectory))
    return [(signal.name, signal.node) for signal in step_signals(trajectory)]


def test_a_sound_episode_has_no_signal() -> None:
    assert named(episode(FAILS, edit(FIX_A), PASSES, SUBMIT)) == []
    assert named(episode(FAILS, ("read", {"path": "a.py"}, "1: x", None), edit(FIX_A), PASSES, SUBMIT)) == []


def test_invalid_calls() -> None:
    """Broken text, and every failure code a result can carry."""
    broken: Step = ("replace", None, "error: broken call", "broken_call")
    unanswered: Step = ("replace", None, "error", None)
    unknown: Step = ("raed", {}, "error: unknown tool", "unknown_tool")
    trajectory = episode(broken, unknown, edit(FIX_A, "text_not_found"), unanswered, SUBMIT)
    assert [name for name, _ in named(trajectory)] == ["invalid_call", "invalid_call", "invalid_call", "repeated_call"]
    assert [node for _, node in named(trajectory)] == [1, 3, 5, 7]


def test_an_edit_is_repeated_only_after_tests_failed_on_it() -> None:
    assert named(episode(FAILS, edit(FIX_A), FAILS, edit(FIX_A))) == [("repeated_call", 7)]
    assert named(episode(FAILS, edit(FIX_A), ("undo", {}, "undone", None), edit(FIX_A), PASSES)) == []
    assert named(episode(FAILS, edit(FIX_A), FAILS, edit(FIX_B), FAILS, edit(FIX_A))) == [("repeated_call", 11)]


def test_tests_that_failed_fail_again_while_nothing_changes() -> None:
    """Else a policy that is punished for trying an edit again runs the tests until its turns are up."""
    look: Step = ("read", {"path": "a.py"}, "1: x", None)
    assert named(episode(edit(FIX_A), FAILS, FAILS, look, FAILS)) == [("repeated_call", 5), ("repeated_call", 9)]
    found = behaviour(episode(edit(FIX_A), FAILS, FAILS, FAILS))
    assert (found.calls_after_failure, found.repeats_after_failure) == (2, 2)
    undo: Step = ("undo", {}, "undone", None)
    assert named(episode(FAILS, edit(FIX_A), FAILS, undo, FAILS, edit(FIX_B), PASSES)) == []


def test_what_the_state_has_changed_since_is_no_repeat() -> None:
    """What failed before an edit or its undoing may be right after it; a failed run blames the edits in place alone."""
    undo: Step = ("undo", {}, "undone", None)
    nothing: Step = ("undo", {}, "nothing to undo", "nothing_to_undo")
    assert named(episode(nothing, edit(FIX_A), FAILS, undo)) == [("invalid_call", 1)]
    assert named(episode(edit(FIX_A), undo, FAILS, edit(FIX_A), PASSES)) == []
    moved = episode(edit(FIX_A, "text_not_found"), edit(FIX_B), edit(FIX_A), PASSES)
    assert named(moved) == [("invalid_call", 1)]
    twice = episode(edit(FIX_A), edit(FIX_B), edit(FIX_A), undo, FAILS, edit(FIX_A), undo, edit(FIX_B))
    assert named(twice) == [("repeated_call", 11), ("repeated_call", 15)], "undone was the last edit, not the second"
    again = episode(edit(FIX_A), FAILS, undo, edit(FIX_A), FAILS)
    assert named(again) == [("repeated_call", 7)]
    assert behaviour(again).repeats_after_failure == 1


def test_other_calls_may_be_made_again() -> None:
    undo: Step = ("undo", {}, "undone", None)
    assert named(episode(FAILS, edit(FIX_A), FAILS, undo, FAILS, edit(FIX_B), FAILS, undo)) == []


def test_the_same_failed_call_again_is_one_signal() -> None:
    """A step that is both invalid and repeated is punished once."""
    twice = edit(FIX_A, "text_not_found")
    assert named(episode(twice, twice)) == [("invalid_call", 1), ("repeated_call", 3)]
    reordered = edit(dict(reversed(FIX_A.items())), "text_not_found")
    assert named(episode(twice, reordered))[1] == ("repeated_call", 3)


def test_several_calls_in_one_reply_are_judged_together() -> None:
    trajectory = episode(FAILS)
    calls = (ToolCall(id="call_0", name="read", arguments={}), ToolCall(id="call_1", name="raed", arguments={}))
    trajectory.nodes += [
        Node(id=3, parent=2, message=Message(role="assistant", tool_calls=calls)),
        Node(id=4, parent=3, message=Message(role="tool", tool_call_id="call_1"), failure="unknown_tool"),
        Node(id=5, parent=4, message=Message(role="tool", tool_call_id="call_0")),
    ]
    assert named(trajectory) == [("invalid_call", 3)]
    assert "raed: unknown_tool" in step_signals(trajectory)[0].evidence


def test_branches_have_histories_of_their_own() -> None:
    """What was tried on one branch is no repeat on another; a shared step is judged once."""
    trajectory = episode(edit(FIX_B, "no_such_line"), edit(FIX_A), FAILS)
    again = ToolCall(id="call_0", name="replace", arguments=FIX_A)
    trajectory.nodes += [
        Node(id=7, parent=2, message=Message(role="assistant", tool_calls=(again,))),  # beside the first try
        Node(id=8, parent=6, message=Message(role="assistant", tool_calls=(again,))),  # after it failed
    ]
    assert named(trajectory) == [("invalid_call", 1), ("repeated_call", 8)]


def test_what_a_failed_test_run_is() -> None:
    def ran(content: str, failure: str | None = None) -> bool:
        return process.test_run_failed(episode(("run_tests", {}, content, failure)).nodes[2])

    assert ran("NameError: lenn") and ran("test_a passed\nFile a.py, line 3") and ran("test_a: 3 == 4")
    assert not ran("1 passed") and not ran("12 passed") and not ran("passed")
    assert not ran("no test test_x", "no_such_test"), "tests that did not run have not failed"
    assert not process.test_run_failed(episode(("read", {}, "NameError", None)).nodes[2])


# ---------------------------------------------------------------- behaviour


def test_counts() -> None:
    broken: Step = ("replace", None, "error", "broken_call")
    found = behaviour(episode(FAILS, broken, edit(FIX_A), FAILS, edit(FIX_A), edit(FIX_B), PASSES, SUBMIT))
    assert (found.calls, found.valid_json_calls, found.invalid_calls) == (8, 7, 1)
    assert (found.test_runs, found.failed_test_runs) == (3, 2)
    assert (found.edits, found.calls_after_failure, found.repeats_after_failure) == (4, 6, 1)
    assert found.sampled_tokens == 80


def test_the_first_run_shows_the_bug_and_is_no_failed_try() -> None:
    """Every episode begins with failing tests; to recover there must have been a try."""
    assert behaviour(episode(FAILS, edit(FIX_A), PASSES, SUBMIT)).recovered_after_failed_run is None
    assert behaviour(episode(FAILS, edit(FIX_A), PASSES, SUBMIT)).calls_after_failure == 1, "the edit"
    tried = (FAILS, edit(FIX_A), FAILS, edit(FIX_B), PASSES, SUBMIT)
    assert behaviour(episode(*tried)).recovered_after_failed_run is True
    assert behaviour(episode(*tried, reward=0.0)).recovered_after_failed_run is False, "the hidden tests disagree"
    assert behaviour(episode(*tried, reward=None)).recovered_after_failed_run is True
    assert behaviour(episode(*tried[:3], reward=None)).recovered_after_failed_run is False
