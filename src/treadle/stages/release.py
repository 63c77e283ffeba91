"""release: candidate → deployable, or a refusal with its reason.

The gate is non-inferiority on held-out tasks: the candidate passes a criterion when the 95 % interval of its difference
to the incumbent, over the same episodes, excludes a loss larger than the margin. A candidate that gets nothing right is
refused whatever the incumbent does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from treadle.metrics import Difference, paired_difference, paired_rates
from treadle.types import Checkpoint, Task, TaskKind, Trajectory, is_solved
from treadle.workspace import Workspace


class Criterion(msgspec.Struct, frozen=True):
    """One line of the verdict: candidate - incumbent, its interval, and the bound it must stay within.

    All None: no pair was graded. That passes only where no such task was asked.
    """

    name: str
    difference: float | None
    low: float | None
    high: float | None
    bound: float  # worst value that is still accepted
    passed: bool
    pairs: int = 0
    left_out: int = 0  # pairs with an ungraded side

    def __str__(self) -> str:
        if self.difference is None or self.low is None or self.high is None:
            return f"{self.name}: none of {self.left_out} pairs was graded on both sides"
        interval = f"95 % interval {self.low:+.3f} to {self.high:+.3f}"
        return f"{self.name}: {self.difference:+.3f} ({interval}), bound {self.bound:+.3f}"


class Verdict(msgspec.Struct, frozen=True):
    candidate: str
    incumbent: str
    released: bool
    criteria: tuple[Criterion, ...]

    def reasons(self) -> str:
        return "; ".join(str(criterion) for criterion in self.criteria if not criterion.passed)


async def release(ws: Workspace, candidate: Checkpoint, incumbent: Checkpoint) -> Verdict:
    """Play both on the held-out tasks (what was played before is reused) and judge."""
    new = await ws.play_held_out(candidate)
    old = await ws.play_held_out(incumbent)
    verdict = judge(new, old, candidate.id, incumbent.id, ws.config.release.margin, ws.config.release.cost_margin)
    folder = ws.path / "releases"
    folder.mkdir(exist_ok=True)
    path = folder / f"{candidate.id}-against-{incumbent.id}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(verdict)))
    return verdict


Played = list[tuple[Task, Trajectory]]
Pair = tuple[Trajectory, Trajectory]


def judge(new: Played, old: Played, candidate: str, incumbent: str, margin: float, cost_margin: float) -> Verdict:
    """Success on what is to be solved, right acts on what is not, tokens where both solved.

    A pair with an ungraded side leaves all. A policy that gives up at once is cheap, so only what both solved says
    which is dearer. Boundary tasks are few: their bootstrap interval shows a collapse, not a small loss.
    """
    played = [(task, a, b) for (task, a), (_, b) in zip(new, old, strict=True)]
    solvable = [(a, b) for task, a, b in played if task.kind is TaskKind.SOLVABLE]
    boundary = [(a, b) for task, a, b in played if task.kind is not TaskKind.SOLVABLE]
    both = [(a, b) for a, b in solvable if _solved(a) and _solved(b)]
    costs = [float(b.sampled_tokens()) for _, b in both]
    dearest = cost_margin * sum(costs) / max(1, len(costs))
    criteria: tuple[Criterion, ...] = (
        _criterion("success", solvable, _solved, -margin, paired_rates),
        _criterion("boundary acts", boundary, _solved, -2 * margin),
        _criterion("tokens where both solved", both, lambda t: -float(t.sampled_tokens()), -dearest),
    )
    if not any(_solved(trajectory) for _, trajectory in new):
        criteria += (Criterion("anything right", 0.0, 0.0, 0.0, 1.0, passed=False),)
    return Verdict(candidate, incumbent, all(c.passed for c in criteria), criteria)


def _graded(pairs: list[Pair]) -> list[Pair]:
    return [(a, b) for a, b in pairs if a.outcome.reward is not None and b.outcome.reward is not None]


def _solved(trajectory: Trajectory) -> bool:
    return is_solved(trajectory.outcome.reward)


def _criterion(
    name: str,
    pairs: list[Pair],
    value: Callable[[Trajectory], float],
    bound: float,
    compare: Callable[[Sequence[float], Sequence[float]], Difference] = paired_difference,
) -> Criterion:
    graded = _graded(pairs)
    left_out = len(pairs) - len(graded)
    if not graded:
        return Criterion(name, None, None, None, bound, passed=not pairs, left_out=left_out)
    found = compare([value(a) for a, _ in graded], [value(b) for _, b in graded])
    passed = found.low >= bound
    return Criterion(name, found.mean, found.low, found.high, bound, passed, pairs=len(graded), left_out=left_out)
