"""Overlap between what is trained on and what is held out: exact, normalised, and by runs of words.

Runs that stand in many held-out tasks are the environment's own phrases and prove nothing, so they are left aside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from treadle.pool.dedup import shingles, task_words
from treadle.tables import prompt_words
from treadle.types import Task, fingerprint

RUN = 8  # words
CONTAINED = 0.8  # share of the shorter text's runs found in the other
COMMON = 0.05  # share of held-out tasks from which a run is a phrase of the environment, but never fewer than
COMMON_AT_LEAST = 3


class Overlap(msgspec.Struct, frozen=True):
    task: str  # the held-out one
    how: str


class _Texts:
    """The held-out tasks' texts, searchable by hash and by runs of words."""

    def __init__(self, texts: dict[str, list[str]]) -> None:
        self.whole = {fingerprint(words): task for task, words in texts.items() if words}
        found = {task: shingles(words, RUN) for task, words in texts.items()}
        counts = Counter(run for runs in found.values() for run in runs)
        limit = max(COMMON_AT_LEAST, COMMON * len(texts))
        self.common = {run for run, n in counts.items() if n > limit}
        self.sizes = {task: len(runs - self.common) for task, runs in found.items()}
        self.holders: dict[str, list[str]] = {}
        for task, runs in found.items():
            for run in runs - self.common:
                self.holders.setdefault(run, []).append(task)

    def overlap(self, words: list[str]) -> Overlap | None:
        if not words:
            return None
        if (same := self.whole.get(fingerprint(words))) is not None:
            return Overlap(same, "the same words")
        runs = shingles(words, RUN) - self.common
        shared = Counter(task for run in runs for task in self.holders.get(run, ()))
        shares = {task: n / min(len(runs), self.sizes[task]) for task, n in shared.items()}
        task = max(shares, key=lambda name: shares[name], default="")
        if not task or shares[task] < CONTAINED:
            return None
        return Overlap(task, f"{shares[task]:.0%} of runs of {RUN} words")


class HeldOutTexts:
    """Asks of a task or of a prompt whether it is a held-out one in other clothes."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        held = list(tasks)
        self._contents = {task.content_key(): task.id for task in held}
        self._tasks = _Texts({task.id: task_words(task) for task in held})
        self._prompts = _Texts({task.id: prompt_words(task.messages) for task in held})

    def of_task(self, task: Task) -> Overlap | None:
        same = self._contents.get(task.content_key())
        return Overlap(same, "the same content") if same is not None else self._tasks.overlap(task_words(task))

    def of_prompt(self, words: list[str]) -> Overlap | None:
        """For a trajectory whose task nobody knows."""
        return self._prompts.overlap(words)
