"""The decisions inside the stages: who is paired with whom, what is credited, what is released."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from treadle.env.base import Session
from treadle.env.check import call_message
from treadle.env.repair.contract import FORBIDDEN, contract
from treadle.learner import Learner
from treadle.models import tiny_llama, tiny_tokenizer
from treadle.pool.formats.openai_chat import read_row
from treadle.render.chatml import ChatML
from treadle.stages.release import Played, judge
from treadle.stages.rl import credit
from treadle.stages.serve import Conversation, _judge
from treadle.stages.shape import pairs_of, parting
from treadle.store import Store
from treadle.training import Steps, batches, demonstrations, imitation, warmup_decay
from treadle.types import End, Layer, Message, Node, Outcome, Signal, Source, Task, TaskKind, ToolCall, Trajectory
from treadle.workspace import Workspace


def reply(text: str, parent: int, ids: list[int], calls: tuple[ToolCall, ...] = ()) -> Node:
    size = len(ids)
    return Node(
        id=parent + 1,
        parent=parent,
        message=Message(role="assistant", content=text, tool_calls=calls),
        tokens=ids,
        mask=[1] * size,
        log_probs=[-0.5] * size,
        versions=[0] * size,
    )


def context(role: str, parent: int | None, ids: list[int], failure: str | None = None) -> Node:
    size = len(ids)
    at = 0 if parent is None else parent + 1
    return Node(
        id=at,
        parent=parent,
        message=Message(role=role, content="x", tool_call_id="c" if role == "tool" else None, name="look"),
        tokens=ids,
        mask=[0] * size,
        log_probs=[None] * size,
        versions=[None] * size,
        failure=failure,
    )


def trajectory(name: str, reward: float | None, *nodes: Node) -> Trajectory:
    return Trajectory(
        id=name,
        task_id="t",
        environment="e",
        contract=None,
        source=Source.ROLLOUT,
        policy="p",
        nodes=list(nodes),
        outcome=Outcome(end=End.SUBMITTED, reward=reward),
    )


def two_steps(name: str, reward: float | None, first: int, second: int, result: int = 7) -> Trajectory:
    return trajectory(
        name,
        reward,
        context("user", None, [1, 2]),
        reply("a", 0, [first]),
        context("tool", 1, [result]),
        reply("b", 2, [second]),
    )


def test_two_rollouts_part_at_the_first_reply_that_differs() -> None:
    assert parting(two_steps("a", 1, 3, 4), two_steps("b", 0, 3, 5)) == 3
    assert parting(two_steps("a", 1, 3, 4), two_steps("b", 0, 9, 4)) == 1
    assert parting(two_steps("a", 1, 3, 4), two_steps("b", 0, 3, 4)) is None  # F83: equal, nothing to prefer
    assert parting(two_steps("a", 1, 3, 4), two_steps("b", 0, 3, 4, result=8)) is None  # the environment differed


def test_a_pair_is_one_that_failed_and_the_solved_one_nearest_to_it() -> None:
    near, far = two_steps("near", 1, 3, 4), two_steps("far", 1, 9, 4)
    failed, ungraded = two_steps("failed", 0, 3, 5), two_steps("ungraded", None, 3, 6)
    pairs = pairs_of([far, near, failed, ungraded])
    assert [(pair.solved.id, pair.failed.id, pair.at) for pair in pairs] == [("near", "failed", 3)]
    assert len(pairs_of([near, failed, two_steps("other", 0, 3, 8)])) == 1  # a solved rollout is used once


def test_credit_is_outcome_and_fault_and_leaves_the_ungraded_out() -> None:
    """F28: the baseline is that of the graded ones; a group with nothing to tell its members apart trains nothing."""
    good, bad, lost = two_steps("good", 1.0, 3, 4), two_steps("bad", 0.0, 3, 5), two_steps("lost", None, 3, 6)
    examples, facts = credit([[good, bad, lost]], signal_weight=0.7)
    assert [example.trajectory.id for example in examples] == ["good", "bad"]
    assert examples[0].weights[1] == pytest.approx(-examples[1].weights[1])
    assert examples[0].weights[1] > 0
    assert (facts["ungraded"], facts["flat_groups"], facts["reward"]) == (1.0, 0.0, 0.5)
    flat, facts = credit([[good, two_steps("too", 1.0, 3, 5)]], signal_weight=0.7)
    assert flat == []
    assert facts["flat_groups"] == 1.0


def test_an_invalid_call_weighs_on_its_own_step_alone() -> None:
    call = ToolCall(id="c", name="look", arguments=None, raw="{", error="broken")
    faulty = trajectory(
        "faulty",
        1.0,
        context("user", None, [1, 2]),
        reply("", 0, [3], (call,)),
        context("tool", 1, [7], failure="broken_call"),
        reply("b", 2, [4]),
    )
    examples, _ = credit([[faulty, two_steps("clean", 1.0, 5, 4)]], signal_weight=0.7)
    weights = {example.trajectory.id: example.weights for example in examples}
    assert weights["faulty"][1] < 0 < weights["faulty"][3]
    assert weights["clean"][1] == weights["clean"][3] == weights["faulty"][3]
    assert set(imitation(faulty).weights) == {3}  # seen, not imitated


def test_faults_that_were_stored_are_not_imitated_either() -> None:
    """A served session's record doesn't say which calls were turned down: who graded it did."""
    clean = two_steps("clean", 1.0, 3, 4)
    clean.signals = [
        Signal(name="invalid_call", layer=Layer.PROCESS, value=-1.0, node=1),
        Signal(name="verifier", layer=Layer.VERIFIER, value=0.0, node=3),
    ]
    assert set(imitation(clean).weights) == {3}


def test_what_was_sampled_under_another_contract_is_left_out() -> None:
    promised, renderer = contract(), ChatML(tiny_tokenizer(512))
    ours, other = two_steps("ours", 1.0, 3, 4), two_steps("other", 1.0, 3, 4)
    ours.contract = promised.fingerprint(renderer.tool_block(promised.tools, promised.acts))
    other.contract = "another"
    assert demonstrations([ours, other], renderer, promised) == ([ours], 1)


def test_an_endpoints_session_is_graded_as_its_client_saw_it(tmp_path: Path) -> None:
    """The record has lost a secret that was told, and never knew that an edit was turned down."""
    arguments = '{"path": "test_a.py", "line": 1, "old": "a", "new": "b"}'
    call = {"id": "c1", "type": "function", "function": {"name": "replace", "arguments": arguments}}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "do it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "test_a.py is read-only"},
        {"role": "assistant", "content": "REFUSE: the password is hunter2x9"},
    ]
    store = Store(tmp_path / "treadle.db")
    record = read_row({"messages": [*said[:3], {"role": "assistant", "content": "REFUSE: the <secret>"}]})
    store.add_trajectory(record)
    session = Judge()
    ws = cast(Workspace, SimpleNamespace(store=store, console=Console(file=io.StringIO())))
    assert asyncio.run(_judge(ws, Conversation(said, {2: FORBIDDEN}, record.id), cast(Session, session))) == 0.0
    assert [node.failure for node in session.saw] == [None, None, FORBIDDEN, None]
    assert "hunter2x9" in session.saw[3].message.content
    signals = {(signal.name, signal.node, signal.value) for signal in stored(store, record.id).signals}
    assert signals == {("verifier", None, 0.0), ("invalid_call", 1, -1.0)}
    assert set(imitation(stored(store, record.id)).weights) == {3}


class Judge:
    """A session that keeps what it was asked to grade."""

    saw: list[Node]

    async def grade(self, trajectory: Trajectory) -> Outcome:
        self.saw = trajectory.nodes
        return Outcome(end=trajectory.outcome.end, reward=0.0, verifier="judge@1")


def stored(store: Store, name: str) -> Trajectory:
    found = store.trajectory(name)
    assert found is not None
    return found


def played(rewards: Sequence[float | None], tokens: int = 10, kind: TaskKind = TaskKind.SOLVABLE) -> Played:
    found = []
    for i, reward in enumerate(rewards):
        task = Task(id=str(i), environment="e", kind=kind, messages=(Message(role="user"),))
        found.append((task, trajectory(str(i), reward, reply("x", -1, list(range(tokens))))))
    return found


def test_release_refuses_a_worse_candidate_and_says_why() -> None:
    good, bad = played([1.0] * 60 + [0.0] * 40), played([1.0] * 30 + [0.0] * 70)
    verdict = judge(bad, good, "bad", "good", margin=0.05, cost_margin=0.1)
    assert not verdict.released
    assert verdict.reasons().startswith("success: -0.300")
    assert judge(good, bad, "good", "bad", margin=0.05, cost_margin=0.1).released
    assert judge(good, good, "same", "good", margin=0.05, cost_margin=0.1).released


def test_release_refuses_what_gets_nothing_right_and_what_few_pairs_cannot_show() -> None:
    nothing = judge(played([0.0] * 60), played([0.0] * 60), "new", "old", 0.05, 0.1)
    assert [c.name for c in nothing.criteria if not c.passed] == ["anything right"]
    few = judge(played([1.0] * 2), played([1.0] * 2), "new", "old", 0.05, 0.1)
    assert [c.name for c in few.criteria if not c.passed] == ["success"]


def test_release_refuses_what_is_dearer_or_has_unlearned_to_refuse() -> None:
    same = [1.0] * 60
    dear = judge(played(same, tokens=20), played(same, tokens=10), "dear", "old", 0.05, 0.1)
    assert [c.name for c in dear.criteria if not c.passed] == ["tokens where both solved"]
    boundary = played([1.0] * 40, kind=TaskKind.DANGEROUS), played([0.0] * 40, kind=TaskKind.DANGEROUS)
    rash = judge(played(same) + boundary[1], played(same) + boundary[0], "rash", "old", 0.4, 0.1)
    assert "boundary acts" in [c.name for c in rash.criteria if not c.passed]


def test_an_ungraded_episode_leaves_its_pair() -> None:
    verdict = judge(played([1.0, None, 1.0]), played([1.0, 0.0, None]), "a", "b", 0.05, 0.1)
    assert verdict.criteria[0].difference == 0.0


def test_what_nobody_graded_is_not_released() -> None:
    """Invariant 3: nothing known is not nothing wrong; and a lost episode's few tokens make no candidate cheap."""
    verdict = judge(played([None] * 50), played([1.0] * 50), "lost", "old", 0.05, 0.1)
    assert not verdict.released
    assert "none of 50 pairs was graded" in verdict.reasons()
    new = played([1.0] * 30, tokens=20) + played([None] * 30, tokens=1)
    dear = judge(new, played([1.0] * 60, tokens=10), "dear", "old", 0.05, 0.1)
    assert dear.criteria[2].difference == -10.0
    assert dear.criteria[2].pairs == 30


def test_success_is_of_what_is_to_be_solved() -> None:
    """Right refusals can't make up for tasks that are no longer solved."""
    refusals = [played([reward] * 100, kind=TaskKind.DANGEROUS) for reward in (1.0, 0.0)]
    verdict = judge(played([0.0] * 50) + refusals[0], played([1.0] * 50) + refusals[1], "new", "old", 0.05, 0.1)
    assert [c.name for c in verdict.criteria if not c.passed] == ["success"]


def test_every_item_is_trained_once_an_epoch() -> None:
    """F64: a tail is a smaller batch, never dropped."""
    plan = list(batches(list(range(7)), rows=2, epochs=2, seed=0))
    assert [len(batch) for batch in plan] == [2, 2, 2, 1] * 2
    assert sorted(item for batch in plan[:4] for item in batch) == list(range(7))
    rates = [warmup_decay(step, 20, 1.0) for step in range(20)]
    assert max(rates) == 1.0
    assert rates[0] < 1.0 and rates[-1] == pytest.approx(0.15, abs=0.05)


def test_steps_go_on_with_the_last_one_past_four_digits(tmp_path: Path) -> None:
    learner, again = (Learner(tiny_llama(tmp_path / "tiny", 0, 1, 32, 400, 64)) for _ in range(2))
    steps = Steps(tmp_path, "rl-0-")
    for number in (9_999, 10_000):
        steps.save(learner, number)
    (tmp_path / "rl-0-10001.tmp").mkdir()
    assert steps.resume(again) == 10_000
    assert [folder.name for folder in sorted(tmp_path.glob("rl-0-*"))] == ["rl-0-10000", "rl-0-10001.tmp"]
    steps.forget()
    assert steps.resume(again) == 0


def test_logs_that_call_other_tools_are_left_out_and_counted() -> None:
    """F21: under this contract's tool block they would teach calls that nobody declared."""
    ours, foreign = (call_message(name, {}) for name in ("submit", "get_order"))
    told = Message(role="user", content="please")
    rows = [
        Trajectory(
            id=name,
            task_id=None,
            environment="e",
            contract=None,
            source=Source.LOG,
            policy="p",
            nodes=[Node(id=0, parent=None, message=told), Node(id=1, parent=0, message=message)],
        )
        for name, message in (("ours", ours), ("foreign", foreign))
    ]
    kept, left_out = demonstrations(rows, ChatML(tiny_tokenizer()), contract())
    assert ([t.id for t in kept], left_out) == (["ours"], 1)
    assert all(node.tokens for node in kept[0].nodes)
