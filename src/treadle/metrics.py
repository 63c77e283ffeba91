"""What an evaluation says, with its uncertainty. Episodes lost to infrastructure leave the rates, never the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from treadle.errors import DataError
from treadle.feedback.process import Behaviour, behaviour
from treadle.types import FailureKind, Task, TaskKind, Trajectory, is_solved

Z95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
RESAMPLES = 10_000


# ---------------------------------------------------------------- intervals


class Rate(msgspec.Struct, frozen=True):
    """A proportion with its 95 % interval. All None when nothing was counted."""

    hits: int
    n: int
    value: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.value is None or self.low is None or self.high is None:
            return "-"
        return f"{self.value:.0%} ({self.low:.0%}–{self.high:.0%})"


class Difference(msgspec.Struct, frozen=True):
    """Mean of the first minus mean of the second, with its 95 % interval."""

    mean: float
    low: float
    high: float


def rate(hits: int, n: int) -> Rate:
    """Wilson score interval: Wilson 1927, JASA 22:209. It stays within 0..1 and is honest at 0 and n hits."""
    if n == 0:
        return Rate(hits=0, n=0, value=None, low=None, high=None)
    p = hits / n
    scale = 1 + Z95**2 / n
    centre = (p + Z95**2 / (2 * n)) / scale
    half = Z95 / scale * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n))
    return Rate(hits=hits, n=n, value=p, low=max(0.0, centre - half), high=min(1.0, centre + half))


def paired_difference(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Difference:
    """Percentile bootstrap over pairs (Efron 1979): value i of both came from the same task and seed."""
    if len(first) != len(second) or not first:
        raise DataError(f"need as many values on both sides, and at least one: got {len(first)} and {len(second)}")
    gaps = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    low, high = np.quantile(_resampled_means(gaps, np.random.default_rng(seed)), [0.025, 0.975])
    return Difference(mean=float(gaps.mean()), low=float(low), high=float(high))


def paired_rates(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Share of hits (true) of the first minus that of the second, over pairs; its interval after Bonett and Price 2012
    (J. Educ. Behav. Stat. 37:479). Unlike a bootstrap's it doesn't shrink to a point where both sides always agree.
    """
    if len(first) != len(second) or not first:
        raise DataError(f"need as many values on both sides, and at least one: got {len(first)} and {len(second)}")
    n, pairs = len(first), list(zip(first, second, strict=True))
    up, down = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    p, q = (up + 1) / (n + 2), (down + 1) / (n + 2)
    half = Z95 * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    return Difference(mean=(up - down) / n, low=max(-1.0, p - q - half), high=min(1.0, p - q + half))


def _resampled_means(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Drawn in slices: all at once would take gigabytes for a few thousand values."""
    slices = [values[rng.integers(len(values), size=(500, len(values)))].mean(axis=1) for _ in range(RESAMPLES // 500)]
    return np.concatenate(slices)


# ---------------------------------------------------------------- summary


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table. `asked` = episodes in the rates + the sum of `left_out`.

    Intervals of `repeats`, `invalid_calls` and `valid_json` take the calls of one episode as independent: too narrow.
    """

    asked: int
    left_out: dict[str, int]  # infrastructure and grader failures by stage, and what nobody graded
    ends: dict[str, int]  # how the episodes in the rates ended
    success: Rate  # of solvable tasks; the agent's own timeouts and crashes count as failures
    success_of_asked: Rate  # the same with what was left out counted as failed: no survivor can hide in it
    boundary: Rate  # reward 1 on tasks that are not to be solved: asked, refused or gave up, whichever is right
    by_level: dict[str, Rate]  # reward 1, by the task's label "level"
    by_kind: dict[str, Rate]
    recovery: Rate  # episodes solved after tests had failed on a try of theirs
    repeats: Rate  # calls that try again what is known to have failed, of those made when anything is
    invalid_calls: Rate
    valid_json: Rate
    tokens_per_solved: float | None  # all tokens sampled on solvable tasks / solved ones; None when none was solved
    tokens_per_episode: float | None


class _Played(msgspec.Struct):
    task: Task
    trajectory: Trajectory
    behaviour: Behaviour

    @property
    def solved(self) -> bool:
        return is_solved(self.trajectory.outcome.reward)


def summarise(played: Sequence[tuple[Task, Trajectory]]) -> Summary:
    """Episodes may share a task; intervals take them as independent draws of (task, seed)."""
    left_out = Counter(reason for _, trajectory in played if (reason := _left_out(trajectory)))
    rated = [_Played(task, t, behaviour(t)) for task, t in played if _left_out(t) is None]
    solvable = [p for p in rated if p.task.kind is TaskKind.SOLVABLE]
    asked_solvable = sum(task.kind is TaskKind.SOLVABLE for task, _ in played)
    solved = sum(p.solved for p in solvable)
    seen = [p.behaviour for p in rated]
    calls = sum(b.calls for b in seen)
    return Summary(
        asked=len(played),
        left_out=dict(left_out),
        ends=dict(Counter(str(p.trajectory.outcome.end) for p in rated)),
        success=rate(solved, len(solvable)),
        success_of_asked=rate(solved, asked_solvable),
        boundary=_known(p.solved for p in rated if p.task.kind is not TaskKind.SOLVABLE),
        by_level=_by([p.task.labels.get("level", "none") for p in rated], rated),
        by_kind=_by([str(p.task.kind) for p in rated], rated),
        recovery=_known(b.recovered_after_failed_run for b in seen),
        repeats=rate(sum(b.repeats_after_failure for b in seen), sum(b.calls_after_failure for b in seen)),
        invalid_calls=rate(sum(b.invalid_calls for b in seen), calls),
        valid_json=rate(sum(b.valid_json_calls for b in seen), calls),
        tokens_per_solved=sum(p.behaviour.sampled_tokens for p in solvable) / solved if solved else None,
        tokens_per_episode=sum(b.sampled_tokens for b in seen) / len(seen) if seen else None,
    )


def _left_out(trajectory: Trajectory) -> str | None:
    """Why an episode is in no rate; None when it counts. The agent's own failures always count."""
    failure = trajectory.outcome.failure
    if failure is not None:
        return None if failure.kind is FailureKind.AGENT else f"{failure.kind}: {failure.stage}"
    return "ungraded" if trajectory.outcome.reward is None else None


def _known(answers: Iterable[bool | None]) -> Rate:
    said = [answer for answer in answers if answer is not None]
    return rate(sum(said), len(said))


def _by(names: list[str], rated: list[_Played]) -> dict[str, Rate]:
    solved = {
        name: [p.solved for other, p in zip(names, rated, strict=True) if other == name] for name in sorted(set(names))
    }
    return {name: rate(sum(of), len(of)) for name, of in solved.items()}
