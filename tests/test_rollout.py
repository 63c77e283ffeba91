"""The rollout loop, with a real environment small enough to read here."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from toykit import END, ID, LOOK, ids, toy_renderer
from treadle.engine.base import Sample
from treadle.engine.scripted import FixedEngine, Script, ScriptedEngine
from treadle.env.base import ToolResult
from treadle.errors import SandboxDead
from treadle.models import tiny_tokenizer
from treadle.render.chatml import ChatML
from treadle.rollout import Job, Loop, rollout_seed
from treadle.types import (
    Act,
    Budget,
    Contract,
    Effect,
    End,
    FailureKind,
    Message,
    Outcome,
    SamplingParams,
    StopReason,
    Task,
    TaskKind,
    Tool,
    ToolCall,
    Trajectory,
)

CALL = '<tool_call>{"name":"look","arguments":{}}</tool_call>'
SAYS = Tool(
    name="say",
    description="say a number",
    parameters={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    effect=Effect.END,
    end=End.SUBMITTED,
)


class Counter:
    """Counts looks; solved when the policy stops after `want` of them. `dead_after` looks the session dies."""

    name = "counter"

    def __init__(self, budget: Budget | None = None, dead_after: int = 99, grade_raises: bool = False) -> None:
        self.budget = budget or Budget(turns=6, tokens=400, reply_tokens=20)
        self.dead_after = dead_after
        self.grade_raises = grade_raises
        self.closed = 0

    def contract(self) -> Contract:
        acts = (Act(end=End.ASKED, marker="wait"), Act(end=End.ANSWERED, marker=""))
        return Contract(environment="counter", version="1", tools=(LOOK, SAYS), acts=acts, budget=self.budget)

    async def start(self, task: Task) -> CounterSession:
        return CounterSession(self, int(task.private["want"]))

    async def close(self) -> None:
        pass


class CounterSession:
    def __init__(self, environment: Counter, want: int) -> None:
        self.environment, self.want, self.looks = environment, want, 0

    async def call(self, call: ToolCall) -> ToolResult:
        await asyncio.sleep(0)
        if self.looks >= self.environment.dead_after:
            raise SandboxDead("the box is gone")
        self.looks += 1
        return ToolResult(content="one two", ends=call.name == "say")

    async def state(self) -> str:
        return str(self.looks)

    async def grade(self, trajectory: Trajectory) -> Outcome:
        if self.environment.grade_raises:
            raise TimeoutError
        return Outcome(end=trajectory.outcome.end, reward=float(self.looks == self.want))

    async def close(self) -> None:
        self.environment.closed += 1


def task(want: int = 1, name: str = "t") -> Task:
    messages = (Message(role="system", content="hi"), Message(role="user", content="look"))
    return Task(id=name, environment="counter", kind=TaskKind.SOLVABLE, messages=messages, private={"want": want})


def play(environment: Counter, engine: FixedEngine | ScriptedEngine, jobs: list[Job]) -> list[Trajectory]:
    loop = Loop(engine, toy_renderer(), environment, SamplingParams(), policy="p")
    return asyncio.run(loop.collect(jobs, concurrency=8))


def one(environment: Counter, *replies: str | Sample) -> Trajectory:
    renderer = toy_renderer()
    fixed = [r if isinstance(r, Sample) else [*renderer.encode(r), END] for r in replies]
    return play(environment, FixedEngine({"j": fixed}), [Job(id="j", task=task(), seed=1)])[0]


def test_sampled_ids_are_the_trained_ids_and_the_next_prompt() -> None:
    """F1 F12: ids that no encoder would give are kept; the mask is 1 on them alone."""
    renderer = toy_renderer()
    first = [*renderer.encode(CALL), END]
    second = [*ids("he llo"), END]  # text "hello", whose encoding is another id
    engine = FixedEngine({"j": [first, second]})
    trajectory = play(Counter(), engine, [Job(id="j", task=task(), seed=1)])[0]
    assert ID["hello"] not in trajectory.nodes[-1].tokens
    assert engine.seen["j"][1] == trajectory.tokens()[: -len(second)]
    trained = [t for node in trajectory.nodes for t, m in zip(node.tokens, node.mask, strict=True) if m]
    assert trained == first + second
    assert [node.message.role for node in trajectory.nodes] == ["system", "user", "assistant", "tool", "assistant"]
    assert trajectory.outcome == Outcome(end=End.ANSWERED, reward=1.0)
    lengths = {(len(n.tokens), len(n.mask), len(n.log_probs), len(n.versions)) for n in trajectory.nodes}
    assert all(len(set(row)) == 1 for row in lengths)
    assert all(
        (logp is None) == (m == 0) for n in trajectory.nodes for logp, m in zip(n.log_probs, n.mask, strict=True)
    )


def test_a_reply_sampled_in_strides_is_one_reply() -> None:
    """Each stride goes on from the ids of the one before; the last is cut by the reply's own limit."""
    renderer = toy_renderer()
    whole = [*renderer.encode(CALL), END]
    rests = [whole[at:] for at in range(0, len(whole), 3)]
    engine = FixedEngine({"j": [*rests, *[ids("one two one two")] * 7]}, stride=3)
    trajectory = play(Counter(), engine, [Job(id="j", task=task(), seed=1)])[0]
    call, endless = (node for node in trajectory.nodes if node.message.role == "assistant")
    assert call.tokens[-len(whole) :] == whole and sum(call.mask) == len(whole)
    assert [call.message.tool_calls[0].name, call.stop] == ["look", StopReason.STOP]
    assert engine.seen["j"][1] == [*engine.seen["j"][0], *whole[:3]]
    assert (sum(endless.mask), endless.stop) == (20, StopReason.LENGTH)
    assert trajectory.outcome.end is End.LENGTH


def test_strides_end_where_the_room_does() -> None:
    begun = len(one(Counter(), "hello").tokens()) - len(ids("hello")) - 1
    budget = Budget(turns=2, tokens=begun + 7, reply_tokens=20)
    engine = FixedEngine({"j": [ids("one two one two")] * 7}, stride=3)
    trajectory = play(Counter(budget), engine, [Job(id="j", task=task(), seed=1)])[0]
    assert sum(trajectory.nodes[-1].mask) == 7
    assert trajectory.nodes[-1].stop is StopReason.CONTEXT_FULL and trajectory.outcome.end is End.CONTEXT_FULL


def test_time_is_the_session_s_own() -> None:
    trajectory = play(
        Counter(Budget(turns=6, tokens=400, reply_tokens=20, seconds=1e-9)),
        FixedEngine({"j": [[*toy_renderer().encode(CALL), END]] * 6}),
        [Job(id="j", task=task(), seed=1)],
    )[0]
    assert trajectory.outcome.end is End.TIME_LIMIT and trajectory.outcome.reward == 1.0
    assert [node.message.role for node in trajectory.nodes].count("assistant") == 1


def test_what_the_environment_says_first_is_in_the_prompt_untrained() -> None:
    """F10: the task's messages and the tools are seen, and never trained."""
    trajectory = one(Counter(), "done")
    text = toy_renderer().decode(trajectory.nodes[0].tokens)
    assert "look" in text
    assert not any(m for node in trajectory.nodes[:2] for m in node.mask)


@pytest.mark.parametrize(
    ("written", "code"),
    [
        ('<tool_call>{"name":"look", "arguments"</tool_call>', "broken_call"),
        ('<tool_call>{"name": "peek", "arguments": {}}</tool_call>', "unknown_tool"),
        ('<tool_call>{"name": "say", "arguments": {}}</tool_call>', "bad_arguments"),
        ('<tool_call>{"name": "say", "arguments": {"n": "one"}}</tool_call>', "bad_arguments"),
    ],
)
def test_a_bad_call_is_an_error_to_the_model_and_the_episode_goes_on(written: str, code: str) -> None:
    """F22: nothing is executed, one error message, and the next turn is asked for."""
    environment = Counter(Budget(turns=6, tokens=4000, reply_tokens=200))
    renderer = ChatML(tiny_tokenizer(512))
    engine = ScriptedEngine(renderer, lambda _: scripted([written, "done"]))
    loop = Loop(engine, renderer, environment, SamplingParams(), "p")
    trajectory = asyncio.run(loop.collect([Job(id="j", task=task(want=0), seed=1)], 1))[0]
    assert trajectory.nodes[3].failure == code
    assert trajectory.nodes[3].message.content.startswith("error:")
    assert trajectory.outcome == Outcome(end=End.ANSWERED, reward=1.0)  # no look was counted


def test_ends_are_told_apart() -> None:
    assert one(Counter(), "wait").outcome.end is End.ASKED
    assert one(Counter(Budget(turns=2, tokens=400, reply_tokens=20)), CALL, CALL).outcome.end is End.TURN_LIMIT
    cut = Sample(ids=ids("he"), log_probs=[-1.0], versions=[0], stop=StopReason.LENGTH)
    long = one(Counter(), cut)  # F8: neither success nor parse failure, and its text is kept
    assert (long.outcome.end, long.nodes[-1].message.content) == (End.LENGTH, "he")
    full = one(Counter(Budget(turns=6, tokens=8, reply_tokens=20)))
    assert full.outcome.end is End.CONTEXT_FULL


def test_infrastructure_failures_are_ungraded() -> None:
    """F29 F59: a dead sandbox, or a grader that gives no answer, is no zero."""
    dead = one(Counter(dead_after=1), CALL, CALL, "done")
    assert dead.outcome.end is End.SANDBOX_DEAD
    assert dead.outcome.reward is None
    assert dead.outcome.failure is not None and dead.outcome.failure.kind is FailureKind.INFRASTRUCTURE
    ungraded = one(Counter(grade_raises=True), "done")
    assert ungraded.outcome.reward is None
    assert ungraded.outcome.failure is not None and ungraded.outcome.failure.kind is FailureKind.GRADER


def test_sessions_share_nothing() -> None:
    """F56 F57: each of 30 concurrent sessions counts its own looks; the process is left as it was."""
    before = dict(os.environ), Path.cwd()
    environment = Counter()
    jobs = [Job(id=f"j{i}", task=task(want=i % 4, name=f"t{i}"), seed=i) for i in range(30)]
    engine = ScriptedEngine(toy_renderer(), lambda name: scripted([CALL] * (int(name[1:]) % 4) + ["done"]))
    played = play(environment, engine, jobs)
    assert [t.id for t in played] == [job.id for job in jobs]
    assert [t.outcome.reward for t in played] == [1.0] * 30
    assert environment.closed == 30
    assert (dict(os.environ), Path.cwd()) == before


def test_every_member_has_its_own_reproducible_seed() -> None:
    """F62."""
    seeds = [rollout_seed(7, 3, "task", member) for member in range(8)]
    assert len(set(seeds)) == 8
    assert seeds == [rollout_seed(7, 3, "task", member) for member in range(8)]


def test_a_changed_contract_has_another_fingerprint() -> None:
    contract = Counter().contract()
    same = msgspec.structs.replace(contract)
    other = msgspec.structs.replace(contract, tools=contract.tools[:1])
    assert contract.fingerprint("x") == same.fingerprint("x") != other.fingerprint("x")
    assert contract.fingerprint("x") != contract.fingerprint("y")


def scripted(replies: list[str]) -> Script:
    left = iter(replies)
    return lambda _: next(left)
