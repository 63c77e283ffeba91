"""What a reader is shown of a trajectory: every message, failure and signal, and which tokens were trained."""

from __future__ import annotations

import io

from rich.console import Console

from toykit import END as STOP
from toykit import ids, toy_renderer
from treadle.engine.base import Sample
from treadle.rollout import append, append_reply
from treadle.show import print_trajectory
from treadle.types import (
    End,
    Failure,
    FailureKind,
    Layer,
    Message,
    Outcome,
    Signal,
    Source,
    StopReason,
    ToolCall,
    Trajectory,
)

RENDERER = toy_renderer()


def episode() -> Trajectory:
    """One plus two, a broken call, a failure and an answer, with signals on nodes and on the whole."""
    trajectory = Trajectory(
        id="t1", task_id="sum-1", environment="sums", contract="c", source=Source.ROLLOUT, policy="wheel"
    )
    append(trajectory, Message("user", "one plus two"), RENDERER.delta(Message("user", "one plus two"), first=True))
    reply(trajectory, "hello", Message("assistant", "hello", tool_calls=(ToolCall("c1", "add", {"a": 1, "b": "x"}),)))
    result = Message("tool", "no", tool_call_id="c1")
    append(trajectory, result, RENDERER.delta(result, first=False)).failure = "bad_arguments"
    broken = ToolCall("c2", "", None, raw='{"name": "look"', error="no closing brace")
    reply(trajectory, "he llo", Message("assistant", tool_calls=(broken,)))
    trajectory.signals = [
        Signal(name="format", layer=Layer.PROCESS, value=-1.0, node=3, evidence="broken call"),
        Signal(name="rubric", layer=Layer.JUDGE, value=None),
    ]
    parts = {"tests": 1.0, "steps": -0.25}
    trajectory.outcome = Outcome(End.ANSWERED, 0.75, parts, verifier="sums@2", isolation="split", detail="1 of 1")
    return trajectory


def reply(trajectory: Trajectory, words: str, message: Message) -> None:
    sampled = [*ids(words), STOP]
    sample = Sample(sampled, [-0.5] * len(sampled), [7] * len(sampled), StopReason.STOP)
    append_reply(trajectory, message, RENDERER.reply_header(), sample)


def printed(trajectory: Trajectory, tokens: bool = False, color: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=color, color_system="standard" if color else None)
    print_trajectory(console, trajectory, RENDERER if tokens else None)
    return out.getvalue()


def test_what_is_piped_is_whole() -> None:
    trajectory = episode()
    trajectory.nodes[0].message = Message("user", "word " * 100)
    out = io.StringIO()
    print_trajectory(Console(file=out, width=80), trajectory)
    assert ("word " * 100).strip() in out.getvalue()


def test_messages_calls_failures_signals_and_end() -> None:
    text = printed(episode())
    for part in (
        "t1",
        "rollout · wheel · sums · sum-1",
        "one plus two",
        '→ add(a=1, b="x")',
        "answers c1",
        "✗ bad_arguments",
        '→ broken call (no closing brace) {"name": "look"',
        "◆ process format@1: -1  broken call",
        "◆ judge rubric@1: abstains",
        "version 7",
        "end answered · reward 0.75 = tests 1, steps -0.25 · by sums@2 (split)",
        "1 of 1",
    ):
        assert part in text, part


def test_trained_tokens_are_bracketed_where_there_is_no_colour() -> None:
    """Exactly what was sampled, the stop id with it; the header is not."""
    text = printed(episode(), tokens=True)
    assert "↵<|im_start|>assistant\n  ⟦hello<|im_end|>⟧" in text and text.count("⟦") == 2
    trajectory = episode()
    total = sum(len(node.tokens) for node in trajectory.nodes)
    assert f"{total} tokens, 5 sampled ({5 / total:.0%})" in text


def test_trained_tokens_are_coloured_on_a_terminal() -> None:
    text = printed(episode(), tokens=True, color=True)
    assert "\x1b[1;32mhello<|im_end|>" in text and "⟦" not in text


def test_branches_say_where_they_leave() -> None:
    trajectory = episode()
    trajectory.nodes[3].parent = 0
    text = printed(trajectory)
    assert "branches from #0" in text and "2 paths" in text


def test_ungraded_shows_no_number() -> None:
    """None is not zero: an episode lost to the machine says whose failure it was."""
    trajectory = episode()
    failure = Failure(kind=FailureKind.INFRASTRUCTURE, stage="tool", message="SandboxDead: gone")
    trajectory.outcome = Outcome(End.SANDBOX_DEAD, failure=failure)
    text = printed(trajectory)
    assert "end sandbox_dead · ungraded · infrastructure failure at tool: SandboxDead: gone" in text
    assert "reward" not in text


def test_output_can_not_drive_the_terminal() -> None:
    """Escape sequences and markup in what a tool printed are shown, not obeyed."""
    trajectory = episode()
    append(trajectory, Message("tool", "\x1b[2J\x07[red]gone[/red] [/nope]"), [])
    text = printed(trajectory, color=True)
    assert "\x1b[2J" not in text and "\\x1b[2J\\x07[red]gone[/red] [/nope]" in text


def test_text_only_logs_and_empty_episodes_are_shown() -> None:
    log = Trajectory(id="log", task_id=None, environment=None, contract=None, source=Source.LOG, policy="someone")
    assert "end unknown · ungraded" in printed(log, tokens=True)
    append(log, Message("user", "hi there"), [])
    assert "hi there" in printed(log, tokens=True) and "trained" not in printed(log, tokens=True)
