"""curate: candidates → pool. Every task and every logged or served trajectory ends with a disposition and a reason.

Deterministic, and done anew each time over all that is stored: later logs can give an earlier record another fate.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from treadle.feedback.process import behaviour, faulty, is_marked
from treadle.pool.dedup import NearDuplicates, task_words, trajectory_key, trajectory_words
from treadle.pool.leakage import HeldOutTexts
from treadle.store import Disposition, Store, prompt_key, prompt_of, task_of
from treadle.tables import prompt_words
from treadle.types import End, FailureKind, Layer, Source, Split, Task, TaskKind, Trajectory, fingerprint, is_solved

STAGE = "curate"
CANDIDATES = (Source.LOG, Source.SERVED)
VALIDATION, HELD_OUT = 0.1, 0.1  # shares of the tasks nobody has assigned
NOISE = 0.5  # share of unsound replies above which a solved run teaches more harm than good


class Fate(StrEnum):
    TRAIN = "train"
    BOUNDARY = "boundary"  # trained too: the right act on what is not to be solved
    PREFERENCE = "preference"  # failed where a sibling succeeded: of use in pairs only
    EVALUATE = "evaluate"
    HOLD_OUT = "hold_out"
    QUARANTINE = "quarantine"  # could be used once something is mended or known
    DROP = "drop"


Decision = tuple[Fate, str]  # with "code: detail"


class CurateReport(msgspec.Struct, kw_only=True):
    """Counts by disposition; `reasons` by "record disposition code"."""

    tasks: dict[str, int] = {}
    trajectories: dict[str, int] = {}
    reasons: dict[str, int] = {}

    def count(self, record: str, decision: Decision) -> None:
        fate, reason = decision
        counts = self.tasks if record == "task" else self.trajectories
        counts[fate] = counts.get(fate, 0) + 1
        key = f"{record} {fate} {reason.split(':')[0]}"
        self.reasons[key] = self.reasons.get(key, 0) + 1


def curate(store: Store) -> CurateReport:
    """Split what is not split, then dispose of every record; all dispositions are stored at once."""
    report = CurateReport()
    _assign_splits(store)
    tasks = {task.id: task for task in store.tasks()}
    held = HeldOutTexts(task for task in tasks.values() if task.split is Split.HELD_OUT)
    of_tasks = _judge_tasks(list(tasks.values()), held)
    for name, (fate, _) in of_tasks.items():
        if fate is Fate.DROP and tasks[name].split is Split.TRAIN:
            store.set_split(name, None)  # no later stage may choose it
    of_trajectories = _judge_trajectories(store, tasks, of_tasks, held)
    for record, decisions in (("task", of_tasks), ("trajectory", of_trajectories)):
        for decision in decisions.values():
            report.count(record, decision)
    store.dispose_all(
        Disposition(name, STAGE, str(fate), reason)
        for name, (fate, reason) in [*of_tasks.items(), *of_trajectories.items()]
    )
    return report


# ---------------------------------------------------------------- splits


def _assign_splits(store: Store) -> None:
    """Tasks of one origin (parent record, or function of a package) go to one split, chosen by hash.

    A copy of a task that has a split gets none: it will be dropped.
    """
    dropped = {d.record_id for d in store.dispositions(STAGE) if d.disposition == Fate.DROP}
    tasks = store.tasks()
    splits = {_origin(task): task.split for task in tasks if task.split is not None}
    contents = {task.content_key() for task in tasks if task.split is not None}
    for task in tasks:
        if task.split is None and task.id not in dropped and task.content_key() not in contents:
            contents.add(task.content_key())
            store.set_split(task.id, splits.get(_origin(task)) or _by_hash(_origin(task)))


def _origin(task: Task) -> str:
    if task.lineage:
        return task.lineage[0]
    return fingerprint([task.environment, task.labels.get("package"), task.labels.get("function") or task_words(task)])


def _by_hash(origin: str) -> Split:
    place = int(fingerprint(origin), 16) / 16**16
    if place < HELD_OUT:
        return Split.HELD_OUT
    return Split.VALIDATION if place < HELD_OUT + VALIDATION else Split.TRAIN


# ---------------------------------------------------------------- tasks


def _judge_tasks(tasks: list[Task], held: HeldOutTexts) -> dict[str, Decision]:
    near = NearDuplicates()
    seen: dict[str, str] = {}
    return {task.id: _judge_task(task, held, seen, near) for task in tasks}


def _judge_task(task: Task, held: HeldOutTexts, seen: dict[str, str], near: NearDuplicates) -> Decision:
    if task.split is Split.HELD_OUT:
        return Fate.HOLD_OUT, "held_out: never enters training"
    if (overlap := held.of_task(task)) is not None:
        return Fate.DROP, f"leak: {overlap.how} as held-out task {overlap.task}"
    first = seen.setdefault(task.content_key(), task.id)
    if first != task.id:
        return Fate.DROP, f"duplicate: the same content as task {first}"
    if (match := near.match(task.environment, task.id, task_words(task))) is not None:
        return Fate.DROP, f"near_duplicate: {match.similarity:.0%} like task {match.record}"
    if task.split is Split.VALIDATION:
        return Fate.EVALUATE, "validation: for choosing between checkpoints"
    if task.split is None:
        return Fate.DROP, "dropped_before: in no split"
    if task.kind is TaskKind.SOLVABLE:
        return Fate.TRAIN, "solvable: to be solved"
    return Fate.BOUNDARY, f"{task.kind}: teaches when not to solve"


# ---------------------------------------------------------------- trajectories


def _judge_trajectories(
    store: Store, tasks: dict[str, Task], of_tasks: dict[str, Decision], held: HeldOutTexts
) -> dict[str, Decision]:
    near = NearDuplicates()
    seen: dict[str, str] = {}
    decided: dict[str, Decision] = {}
    failed: dict[str, str | None] = {}  # unsolved runs wait until it is known whether a sibling solved the task
    solved: dict[str, str] = {}
    for trajectory in _candidates(store):
        name = task_of(trajectory)
        task = tasks.get(name) if name else None
        decision = (
            _barred(trajectory, task, of_tasks, held)
            or _unusable(trajectory)
            or _noise(trajectory)  # before copies: a loop looks like the same run without it
            or _copied(trajectory, name, seen, near)
            or _sound(trajectory, task)
        )
        if decision is None:
            failed[trajectory.id] = name
            continue
        decided[trajectory.id] = decision
        if decision[0] in (Fate.TRAIN, Fate.BOUNDARY) and name:
            solved.setdefault(name, trajectory.id)
    for trajectory_id, name in failed.items():
        decided[trajectory_id] = _failed(solved.get(name) if name else None)
    return decided


def _candidates(store: Store) -> Iterator[Trajectory]:
    for source in CANDIDATES:
        yield from store.trajectories(source=source)


def _barred(
    trajectory: Trajectory, task: Task | None, of_tasks: dict[str, Decision], held: HeldOutTexts
) -> Decision | None:
    """What belongs to evaluation, by its task, or by its words where these are not the task's."""
    if task is None or prompt_of(trajectory) != prompt_key(task.messages):
        asked = prompt_words(node.message for node in trajectory.path())
        if (overlap := held.of_prompt(asked)) is not None:
            return Fate.HOLD_OUT, f"leak: {overlap.how} as held-out task {overlap.task}"
    if task is None:
        return None
    fate, reason = of_tasks[task.id]
    if fate is Fate.HOLD_OUT or reason.startswith("leak"):
        return Fate.HOLD_OUT, f"held_out: of task {task.id} ({reason})"
    return (Fate.EVALUATE, f"validation: of task {task.id}") if task.split is Split.VALIDATION else None


def _unusable(trajectory: Trajectory) -> Decision | None:
    failure = trajectory.outcome.failure
    if failure is not None and failure.kind is not FailureKind.AGENT:
        return Fate.QUARANTINE, f"{failure.kind}: failed in {failure.stage}"
    if "interrupted" in trajectory.extra or trajectory.outcome.end is End.INTERRUPTED:
        return Fate.QUARANTINE, f"interrupted: {trajectory.extra.get('interrupted', 'some')} calls without a result"
    if "empty_replies" in trajectory.extra:
        return Fate.QUARANTINE, f"empty_replies: {trajectory.extra['empty_replies']}"
    if any(node.extra.get("parts") for node in trajectory.nodes):
        return Fate.QUARANTINE, "parts: images or files are not supported"
    if reward_of(trajectory) is None:
        return Fate.QUARANTINE, "ungraded: neither the log nor a verifier gave a reward"
    return None


def _copied(trajectory: Trajectory, task: str | None, seen: dict[str, str], near: NearDuplicates) -> Decision | None:
    reward = reward_of(trajectory)
    first = seen.setdefault(trajectory_key(trajectory, task, reward), trajectory.id)
    if first != trajectory.id:
        return Fate.DROP, f"duplicate: the same as {first}"
    # A success and a failure that look alike are no copies: where they part is what preference learning needs.
    group = fingerprint([task, reward])
    match = near.match(group, trajectory.id, trajectory_words(trajectory))
    return None if match is None else (Fate.DROP, f"near_duplicate: {match.similarity:.0%} like {match.record}")


def _noise(trajectory: Trajectory) -> Decision | None:
    """Solved, but not worth imitating. A failed run may be as noisy as it likes: it is only used in pairs."""
    if not is_solved(reward_of(trajectory)):
        return None
    replies, unsound = _imitated(trajectory)
    if replies == 0:
        return Fate.DROP, "nothing_to_imitate: every reply is a marked mistake or a copy"
    if unsound > NOISE * replies:
        return Fate.DROP, f"noise: {unsound} of {replies} replies are invalid or repeat what failed"
    return None


def _sound(trajectory: Trajectory, task: Task | None) -> Decision | None:
    """The fate of a solved run; None when it is not solved."""
    if not is_solved(reward_of(trajectory)):
        return None
    if task is not None and task.kind is not TaskKind.SOLVABLE:
        return Fate.BOUNDARY, f"{task.kind}: the right act ({trajectory.outcome.end})"
    runs = behaviour(trajectory)
    if runs.recovered_after_failed_run is not None:  # there was a failed try, and the task is solved
        return Fate.TRAIN, f"recovery: solved after {runs.failed_test_runs} failed test runs"
    return Fate.TRAIN, "solved: at the first try"


def _imitated(trajectory: Trajectory) -> tuple[int, int]:
    """Replies that training would imitate, and how many of them are invalid or repeat what failed."""
    replies = {n.id for n in trajectory.path() if n.message.role == "assistant" and not is_marked(n)}
    return len(replies), len(replies & faulty(trajectory))


def _failed(sibling: str | None) -> Decision:
    if sibling is None:
        return Fate.DROP, "unsolved: and no other run solved the task"
    return Fate.PREFERENCE, f"unsolved: but {sibling} solved the same task"


def reward_of(trajectory: Trajectory) -> float | None:
    """The reward of the outcome, else the last verdict a verifier gave since."""
    verdicts = [
        s.value for s in trajectory.signals if s.layer is Layer.VERIFIER and s.node is None and s.value is not None
    ]
    return trajectory.outcome.reward if trajectory.outcome.reward is not None or not verdicts else verdicts[-1]
