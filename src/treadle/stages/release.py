"""release: candidate → deployable, or a refusal with its reason.

The gate is non-inferiority on held-out tasks: the candidate passes a criterion when the 95 % interval of its difference
to the incumbent, over the same episodes, excludes a loss larger than the margin.
"""

from __future__ import annotations

import msgspec

from treadle.metrics import paired_difference
from treadle.types import Checkpoint, Task, TaskKind, Trajectory
from treadle.workspace import Workspace


class Criterion(msgspec.Struct, frozen=True):
    """One line of the verdict: candidate - incumbent, its interval, and the bound it must stay within."""

    name: str
    difference: float
    low: float
    high: float
    bound: float  # worst value that is still accepted
    passed: bool


class Verdict(msgspec.Struct, frozen=True):
    candidate: str
    incumbent: str
    released: bool
    criteria: tuple[Criterion, ...]

    def reasons(self) -> str:
        failed = [c for c in self.criteria if not c.passed]
        return "; ".join(
            f"{c.name}: {c.difference:+.3f} (95 % interval {c.low:+.3f} to {c.high:+.3f}), bound {c.bound:+.3f}"
            for c in failed
        )


async def release(ws: Workspace, candidate: Checkpoint, incumbent: Checkpoint) -> Verdict:
    """Play both on the held-out tasks (what was played before is reused) and judge."""
    new = await ws.play_held_out(candidate)
    old = await ws.play_held_out(incumbent)
    verdict = judge(new, old, candidate.id, incumbent.id, ws.config.release.margin, ws.config.release.cost_margin)
    folder = ws.path / "releases"
    folder.mkdir(exist_ok=True)
    (folder / f"{candidate.id}.json").write_bytes(msgspec.json.format(msgspec.json.encode(verdict)))
    return verdict


Played = list[tuple[Task, Trajectory]]


def judge(new: Played, old: Played, candidate: str, incumbent: str, margin: float, cost_margin: float) -> Verdict:
    """Success, right refusals and tokens an episode. A pair with an ungraded side is left out."""
    criteria = [
        _criterion("success", _rewards(new, old, boundary=None), -margin),
        _criterion("boundary acts", _rewards(new, old, boundary=True), -2 * margin),
    ]
    costs = [(float(a.sampled_tokens()), float(b.sampled_tokens())) for (_, a), (_, b) in zip(new, old, strict=True)]
    mean = sum(b for _, b in costs) / max(1, len(costs))
    criteria.append(_criterion("tokens an episode", [(-a, -b) for a, b in costs], -cost_margin * mean))
    return Verdict(candidate, incumbent, all(c.passed for c in criteria), tuple(criteria))


def _rewards(new: Played, old: Played, boundary: bool | None) -> list[tuple[float, float]]:
    pairs = []
    for (task, a), (_, b) in zip(new, old, strict=True):
        if boundary is not None and boundary != (task.kind is not TaskKind.SOLVABLE):
            continue
        if a.outcome.reward is not None and b.outcome.reward is not None:
            pairs.append((a.outcome.reward, b.outcome.reward))
    return pairs


def _criterion(name: str, pairs: list[tuple[float, float]], bound: float) -> Criterion:
    if not pairs:  # nothing was measured, so nothing is known to be worse
        return Criterion(name, 0.0, 0.0, 0.0, bound, passed=True)
    difference = paired_difference([a for a, _ in pairs], [b for _, b in pairs])
    return Criterion(name, difference.mean, difference.low, difference.high, bound, passed=difference.low >= bound)
