"""Which tasks to practise: those at the edge of ability, by a posterior over each task's pass rate.

A group whose rollouts all pass or all fail teaches nothing by its outcome; the share of such groups is
p^n + (1-p)^n for pass rate p and n rollouts, least at p = 1/2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil

import numpy as np

from treadle.types import Task, TaskKind

PRIOR_STRENGTH = 2.0  # how many rollouts the family's mean counts for
FORGET = 0.9  # older outcomes count less, because the policy moves


class Curriculum:
    """Beta posterior per task; tasks of the same family (environment, kind, level) share their mean as a prior."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = {task.id: task for task in tasks}
        self._passed: dict[str, float] = dict.fromkeys(self.tasks, 0.0)
        self._failed: dict[str, float] = dict.fromkeys(self.tasks, 0.0)

    def observe(self, task_id: str, rewards: Iterable[float | None]) -> None:
        """Record one group's outcomes; ungraded ones are left out, other tasks' are ignored."""
        if task_id not in self.tasks:
            return
        graded = [reward for reward in rewards if reward is not None]
        self._passed[task_id] = FORGET * self._passed[task_id] + sum(graded)
        self._failed[task_id] = FORGET * self._failed[task_id] + len(graded) - sum(graded)

    def choose(
        self, count: int, rng: np.random.Generator, exclude: frozenset[str] = frozenset(), *, boundary: float = 0.0
    ) -> list[Task]:
        """`count` different tasks, by Thompson sampling of p(1-p): uncertain tasks get their turn too.

        The share `boundary` of them are not to be solved, and of as many kinds as there can be: to ask, to refuse and
        to give up are unlearnt where only solving is practised. Where one sort runs short, the other fills in.
        """
        names = sorted(self.tasks.keys() - exclude)
        prior = self._family_means()
        scores = {}
        for name in names:
            mean = prior[_family(self.tasks[name])]
            p = rng.beta(
                self._passed[name] + PRIOR_STRENGTH * mean + 1e-3,
                self._failed[name] + PRIOR_STRENGTH * (1 - mean) + 1e-3,
            )
            scores[name] = p * (1 - p)
        ranked = sorted(names, key=lambda name: (-scores[name], name))
        place: dict[str, int] = {}  # of a task that is not to be solved, among those of its kind
        seen: Counter[TaskKind] = Counter()
        for name in ranked:
            if (kind := self.tasks[name].kind) is not TaskKind.SOLVABLE:
                place[name] = seen[kind]
                seen[kind] += 1
        others = sorted(place, key=place.__getitem__)
        kept = ceil(boundary * count - 1e-9)
        best = [*others[:kept], *(name for name in ranked if name not in place), *others[kept:]]
        return [self.tasks[name] for name in best[:count]]

    def pass_rate(self, task_id: str) -> float:
        """Posterior mean."""
        mean = self._family_means()[_family(self.tasks[task_id])]
        passed, failed = self._passed[task_id], self._failed[task_id]
        return (passed + PRIOR_STRENGTH * mean) / (passed + failed + PRIOR_STRENGTH)

    def _family_means(self) -> dict[tuple[str, ...], float]:
        passed: dict[tuple[str, ...], float] = {}
        total: dict[tuple[str, ...], float] = {}
        for name, task in self.tasks.items():
            family = _family(task)
            passed[family] = passed.get(family, 0.5) + self._passed[name]
            total[family] = total.get(family, 1.0) + self._passed[name] + self._failed[name]
        return {family: passed[family] / total[family] for family in total}


def _family(task: Task) -> tuple[str, ...]:
    return (task.environment, task.kind.value, task.labels.get("level", ""))
