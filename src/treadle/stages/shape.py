"""shape: groups → checkpoint. Rejection sampling and preference pairs, both proven by the verifier.

Each task is tried by a group of rollouts. Where a solved and a failed rollout of the same task part, the solved one's
step is preferred, and for each pair a solved rollout is imitated. What gives no pair, or isn't imitated, is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np

from treadle.batch import Example, Pack, divisor, pack, unfit
from treadle.errors import DataError
from treadle.losses import cross_entropy, dpo
from treadle.report import Run
from treadle.training import batches, cuts, imitation, joined, warmup_decay
from treadle.types import Checkpoint, Trajectory, is_solved
from treadle.workspace import Workspace


class Pair(NamedTuple):
    """A solved and a failed rollout of one task whose paths part at index `at`, by what the policy did."""

    solved: Trajectory
    failed: Trajectory
    at: int


async def shape(ws: Workspace, parent: Checkpoint, run: Run) -> Checkpoint:
    """The parent itself when everything was solved. Raises DataError when no group gives a pair otherwise."""
    settings = ws.config.shape
    groups = await _sample(ws, parent)
    found = [pair for group in groups for pair in pairs_of(group)]
    pairs = [pair for pair in found if unfit(*_rows(0, pair), limit=ws.config.pack_tokens) is None]
    played = ws.store.admit_training(t for group in groups for t in group)
    solved, failed = _told_apart(played)
    ungraded = len(played) - len(solved) - len(failed)
    if solved and not failed:
        ws.console.print("shape: no graded rollout failed its task: nothing to prefer, the policy stays as it is")
        return parent
    sound = [row for t in solved if unfit(row := imitation(t), limit=ws.config.pack_tokens) is None]
    if not pairs or not sound:
        raise DataError(
            f"shape: {len(pairs)} pairs and {len(sound)} rollouts to imitate in {len(groups)} groups ({len(solved)} "
            f"rollouts solved their task, {len(failed)} failed, {ungraded} were not graded): raise shape.tasks or "
            "shape.group, or train longer before shaping"
        )
    learner = ws.learner(parent, settings.trained_layers)
    half = max(1, settings.rows // 2)  # of an update's rows are pairs, as many again are imitated
    plan = list(_plan(ws, pairs, sound, half))
    facts = {
        "groups": len(groups),
        "solved": len(solved),
        "solved_unused": len(solved) - min(len(sound), len(plan) * half),
        "pairs": len(pairs),
        "pairs_unfit": len(found) - len(pairs),
        "failed_unpaired": len(failed) - len(found),
        "ungraded": ungraded,
    }
    for preferred, _, _ in plan:  # the reference is the policy before its first update
        for each, logp_N in zip(preferred, learner.log_probs(preferred), strict=True):
            each.reference_logp_N = logp_N
    with ws.progress("shape", len(plan)) as advance:
        for step, (preferred, imitated, cut) in enumerate(plan):
            told = [
                learner.forward_backward(preferred, dpo(settings.beta), divisor(preferred, "pairs")),
                learner.forward_backward(imitated, cross_entropy(), divisor(imitated)),
                learner.step(warmup_decay(step, len(plan), settings.learning_rate)),
            ]
            losses = {"loss": told[0]["loss"] + told[1]["loss"]}
            run.log("shape", step=step, **facts, **cut, **(joined(told) | losses))
            advance(1)
    return ws.save(learner, "shape", parent, [t.id for t in played])


async def _sample(ws: Workspace, parent: Checkpoint) -> list[list[Trajectory]]:
    settings = ws.config.shape
    tasks = ws.training_tasks()
    order = np.random.default_rng([ws.config.seed, 1]).permutation(len(tasks))
    chosen = [tasks[i] for i in order[: settings.tasks]]
    engine = await ws.engine(parent)
    prefix = ws.probes(parent.id)
    return await ws.play_groups(engine, parent.id, chosen, settings.group, prefix, "shape", "shape: sampling")


def _told_apart(rollouts: Sequence[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
    """Those that solved their task and those that failed; the ungraded are neither."""
    graded = [t for t in rollouts if t.outcome.reward is not None]
    solved = [t for t in graded if is_solved(t.outcome.reward)]
    return solved, [t for t in graded if not is_solved(t.outcome.reward)]


def pairs_of(group: Sequence[Trajectory]) -> list[Pair]:
    """Each failed rollout with the solved one it shares most with; each solved one is used once."""
    solved, lost = _told_apart(group)
    pairs = []
    for failed in lost:
        found = [Pair(good, failed, at) for good in solved if (at := parting(good, failed)) is not None]
        if found:
            pairs.append(max(found, key=lambda pair: pair.at))
            solved.remove(pairs[-1].solved)
    return pairs


def parting(first: Trajectory, second: Trajectory) -> int | None:
    """Index on both paths of the first reply that differs; None if something else differs first, or nothing does.

    A reply for which the context left no room says nothing that another could be preferred to.
    """
    for index, (one, other) in enumerate(zip(first.path(), second.path(), strict=False)):
        if one.tokens != other.tokens:
            replies = one.message.role == other.message.role == "assistant"
            return index if replies and any(one.mask) and any(other.mask) else None
    return None


def _plan(
    ws: Workspace, pairs: Sequence[Pair], sound: Sequence[Example], half: int
) -> Iterator[tuple[list[Pack], list[Pack], dict[str, float]]]:
    """Packs of each update, `half` pairs and `half` rows to imitate, and what they leave out."""
    imitated = cycle(list(batches(sound, half, 1, ws.config.seed)))
    for batch in batches(pairs, half, ws.config.shape.epochs, ws.config.seed):
        rows = [row for k, pair in enumerate(batch) for row in _rows(k, pair)]
        preferred, report = pack(rows, ws.config.pack_tokens)
        rest, other = pack(next(imitated), ws.config.pack_tokens)
        yield preferred, rest, joined([cuts(report), cuts(other)])


def _rows(number: int, pair: Pair) -> tuple[Example, Example]:
    """Only the step at which the two part is trained, and nothing after it is computed."""
    good, bad = pair.solved.path()[pair.at].id, pair.failed.path()[pair.at].id
    return (
        Example(pair.solved, {good: 1.0}, leaf=good, pair=number, chosen=True),
        Example(pair.failed, {bad: 1.0}, leaf=bad, pair=number, chosen=False),
    )
