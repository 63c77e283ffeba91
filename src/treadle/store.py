"""The SQL store: tasks, trajectories, signals, dispositions, the journal of stages, checkpoint manifests.

SQLite (WAL) by path, PostgreSQL by URL, the same code. Every call is one short transaction, committed when it returns:
a process killed with -9 keeps all that had returned. (WAL with `synchronous=NORMAL` can lose the last commits on power
loss, never on the death of the process.)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from treadle import tables
from treadle.errors import DataError, HeldOut, UserError, unknown
from treadle.tables import (
    CHECKPOINTS,
    DISPOSITIONS,
    JOURNAL,
    META,
    PRIVATE,
    TASKS,
    TRAJECTORIES,
    Disposition,
    prompt_key,
    prompt_of,
    task_of,
)
from treadle.types import (
    SCHEMA_VERSION,
    Checkpoint,
    End,
    Signal,
    Source,
    Split,
    Task,
    TaskKind,
    Trajectory,
    from_json,
    from_msgpack,
    to_json,
    to_msgpack,
)

__all__ = ["Disposition", "Store", "prompt_key", "prompt_of", "task_of"]

PAGE = 256  # trajectories read per query while iterating
PURPOSES = {"sft": ("train", "boundary"), "preference": ("train", "boundary", "preference")}
_TRAJECTORY_FILTERS = ("task_id", "environment", "contract", "source", "policy", "group", "end")
T = TypeVar("T")


class Store:
    """Everything a workspace knows, in one database. Thread-safe; the calls are short enough for asyncio code."""

    def __init__(self, location: str | Path, *, create: bool = True) -> None:
        """`location` is a file path or a database URL. Raises UserError when it can't be opened as a store."""
        self.location = str(location)
        self._engine = tables.open_engine(self.location, create=create)
        self._writer = self._engine.execution_options(write=True)
        try:
            self._prepare()
        except sa.exc.DBAPIError as error:
            raise UserError(
                f"{self.location} can't be opened as a store ({error.orig}): give another path, or restore a backup"
            ) from error

    def _prepare(self) -> None:
        with self._writer.begin() as connection:
            tables.SCHEMA.create_all(connection)
            found = connection.scalar(sa.select(META.c.value).where(META.c.key == "schema"))
            if found is None:
                connection.execute(sa.insert(META).values(key="schema", value=str(SCHEMA_VERSION)))
            elif found != str(SCHEMA_VERSION):
                raise UserError(f"{self.location} has schema {found}, this version reads {SCHEMA_VERSION}: re-ingest")

    def close(self) -> None:
        self._engine.dispose()

    # ------------------------------------------------------------ tasks

    def add_tasks(self, tasks: Iterable[Task]) -> int:
        """Store tasks, all or none; returns how many were new. The split alone may differ from what is stored.

        Raises DataError when an id is known with other content; HeldOut when a training task is a held-out one.
        """
        new = 0
        with self._writer.begin() as connection:
            for task in tasks:
                known = tables.read_task(connection, task.id)
                if known is None:
                    tables.guard_split(connection, task.id, task.content_key(), task.split)
                    tables.write_task(connection, task)
                    new += 1
                elif not tables.same_task(task, known):
                    raise DataError(f"task {task.id!r} is already stored with other content: give it another id")
        return new

    def add_task(self, task: Task) -> int:
        return self.add_tasks([task])

    def task(self, task_id: str) -> Task | None:
        """One task with its private half."""
        with self._engine.connect() as connection:
            return tables.read_task(connection, task_id)

    def tasks(
        self,
        split: Split | None = None,
        environment: str | None = None,
        kind: TaskKind | None = None,
        with_private: bool = False,
    ) -> list[Task]:
        """Tasks in the order they were added; without their private halves unless asked."""
        query = sa.select(TASKS.c.public, TASKS.c.split).order_by(TASKS.c.seq)
        if with_private:
            query = query.add_columns(PRIVATE.c.private).join(PRIVATE, PRIVATE.c.id == TASKS.c.id)
        for column, value in (
            (TASKS.c.split, split),
            (TASKS.c.environment, environment),
            (TASKS.c.kind, kind),
        ):
            if value is not None:
                query = query.where(column == str(value))
        with self._engine.connect() as connection:
            return [tables.task_from(*row) for row in connection.execute(query)]

    def set_split(self, task_id: str, split: Split | None) -> None:
        """Assign a task to a split. A held-out task stays held out: anything else raises HeldOut."""
        with self._writer.begin() as connection:
            row = connection.execute(
                sa.select(TASKS.c.content_key, TASKS.c.split).where(TASKS.c.id == task_id)
            ).one_or_none()
            if row is None:
                raise DataError(f"no task {task_id!r} in {self.location}")
            if row.split == Split.HELD_OUT and split != Split.HELD_OUT:
                raise HeldOut(f"task {task_id!r} is held out: it can't become {split}")
            tables.guard_split(connection, task_id, row.content_key, split)
            connection.execute(sa.update(TASKS).where(TASKS.c.id == task_id).values(split=split and str(split)))

    # ------------------------------------------------------------ trajectories

    def add_trajectory(self, trajectory: Trajectory) -> bool:
        """Commit one finished trajectory; False when the same one is there already.

        Raises DataError when its id is stored with other content: trajectories are append-only.
        """
        body = tables.body(trajectory)
        try:
            with self._writer.begin() as connection:
                connection.execute(sa.insert(TRAJECTORIES), {**tables.trajectory_row(trajectory), "body": body})
                tables.append_signals(connection, trajectory.id, trajectory.signals)
            return True
        except sa.exc.IntegrityError as error:
            if self._stored_body(trajectory.id) != body:
                raise DataError(
                    f"trajectory {trajectory.id!r} is already stored with other content: trajectories are append-only"
                ) from error
        self.add_signals(trajectory.id, trajectory.signals)
        return False

    def has_trajectory(self, trajectory_id: str) -> bool:
        query = sa.select(TRAJECTORIES.c.seq).where(TRAJECTORIES.c.id == trajectory_id)
        with self._engine.connect() as connection:
            return connection.execute(query).first() is not None

    def trajectory(self, trajectory_id: str) -> Trajectory | None:
        """One trajectory with every signal given to it."""
        found = self._load(TRAJECTORIES.c.id == trajectory_id, 1)
        return found[0][1] if found else None

    def trajectories(
        self,
        *,
        task_id: str | None = None,
        environment: str | None = None,
        contract: str | None = None,
        source: Source | None = None,
        policy: str | None = None,
        group: str | None = None,
        end: End | None = None,
        graded: bool | None = None,
    ) -> Iterator[Trajectory]:
        """Trajectories in the order they were stored, read page by page."""
        asked = (task_id, environment, contract, source, policy, group, end)
        where = [
            TRAJECTORIES.c[name] == str(value)
            for name, value in zip(_TRAJECTORY_FILTERS, asked, strict=True)
            if value is not None
        ]
        if graded is not None:
            where.append(TRAJECTORIES.c.reward.is_not(None) if graded else TRAJECTORIES.c.reward.is_(None))
        return self._pages(sa.and_(sa.true(), *where))

    def group_outcomes(self, prefix: str) -> list[tuple[str, str, float | None]]:
        """(group, task id, reward) of every rollout whose group begins with `prefix`, without reading bodies."""
        columns = (TRAJECTORIES.c.group, TRAJECTORIES.c.task_id, TRAJECTORIES.c.reward)
        query = sa.select(*columns).where(
            TRAJECTORIES.c.group.startswith(prefix, autoescape=True), TRAJECTORIES.c.task_id.is_not(None)
        )
        with self._engine.connect() as connection:
            return [
                (group, task, reward) for group, task, reward in connection.execute(query.order_by(TRAJECTORIES.c.seq))
            ]

    def add_signals(self, trajectory_id: str, signals: Iterable[Signal]) -> int:
        """Append signals to a stored trajectory; those already there are left alone. Returns how many were new."""
        with self._writer.begin() as connection:
            known = sa.select(TRAJECTORIES.c.seq).where(TRAJECTORIES.c.id == trajectory_id)
            if connection.execute(known).first() is None:
                raise DataError(f"no trajectory {trajectory_id!r} in {self.location}")
            return tables.append_signals(connection, trajectory_id, signals)

    def _stored_body(self, trajectory_id: str) -> bytes | None:
        with self._engine.connect() as connection:
            query = sa.select(TRAJECTORIES.c.body).where(TRAJECTORIES.c.id == trajectory_id)
            body: bytes | None = connection.scalar(query)
            return body

    def _decoded(self, data: bytes, kind: type[T], name: str) -> T:
        try:
            return from_msgpack(data, kind)
        except msgspec.DecodeError as error:
            raise DataError(f"{self.location} is damaged at {name!r} ({error}): restore a backup") from error

    def _pages(self, where: sa.ColumnElement[bool]) -> Iterator[Trajectory]:
        after = -1
        while page := self._load(sa.and_(where, TRAJECTORIES.c.seq > after), PAGE):
            yield from (trajectory for _, trajectory in page)
            after = page[-1][0]

    def _load(self, where: sa.ColumnElement[bool], limit: int) -> list[tuple[int, Trajectory]]:
        columns = (TRAJECTORIES.c.seq, TRAJECTORIES.c.id, TRAJECTORIES.c.body)
        query = sa.select(*columns).where(where).order_by(TRAJECTORIES.c.seq).limit(limit)
        with self._engine.connect() as connection:
            rows = connection.execute(query).all()
            signals = tables.read_signals(connection, [row.id for row in rows])
        loaded = [(row.seq, self._decoded(row.body, Trajectory, row.id)) for row in rows]
        for _, trajectory in loaded:
            trajectory.signals = signals.get(trajectory.id, [])
        return loaded

    # ------------------------------------------------------------ the training gate (invariant 6)

    def admit_training(self, trajectories: Iterable[Trajectory]) -> list[Trajectory]:
        """Give the trajectories back, or raise HeldOut if one belongs to a held-out task by id or by content.

        A trajectory whose task is unknown is compared by the words of its prompt.
        """
        admitted = list(trajectories)
        with self._engine.connect() as connection:
            held = tables.held_out(connection)
        for trajectory in admitted:
            if held.holds(tables.task_of(trajectory), tables.prompt_of(trajectory)):
                raise HeldOut(f"trajectory {trajectory.id!r} belongs to held-out task {tables.task_of(trajectory)!r}")
        return admitted

    def training_trajectories(self, purpose: str = "sft") -> Iterator[Trajectory]:
        """What curate admitted for a purpose ("sft" or "preference"); never a trajectory of a held-out task."""
        if purpose not in PURPOSES:
            raise UserError(unknown("purpose", purpose, PURPOSES))
        chosen = sa.select(DISPOSITIONS.c.record_id).where(
            DISPOSITIONS.c.stage == "curate", DISPOSITIONS.c.disposition.in_(PURPOSES[purpose])
        )
        with self._engine.connect() as connection:
            held = tables.held_out(connection)
        for trajectory in self._pages(TRAJECTORIES.c.id.in_(chosen)):
            if not held.holds(tables.task_of(trajectory), tables.prompt_of(trajectory)):
                yield trajectory

    # ------------------------------------------------------------ dispositions

    def dispose(self, record_id: str, stage: str, disposition: str, reason: str) -> None:
        self.dispose_all([Disposition(record_id, stage, disposition, reason)])

    def dispose_all(self, decisions: Iterable[Disposition]) -> None:
        """Record what became of each record and why; a stage's later word on a record replaces its earlier one.

        Raises HeldOut, storing nothing, when a held-out task or its trajectory is marked for training.
        """
        with self._writer.begin() as connection:
            held = tables.held_out(connection)
            for decision in decisions:
                if decision.disposition in PURPOSES["preference"]:
                    tables.guard_disposition(connection, held, decision)
                at = sa.and_(DISPOSITIONS.c.record_id == decision.record_id, DISPOSITIONS.c.stage == decision.stage)
                connection.execute(sa.delete(DISPOSITIONS).where(at))
                connection.execute(sa.insert(DISPOSITIONS).values(msgspec.structs.asdict(decision)))

    def dispositions(self, stage: str | None = None) -> list[Disposition]:
        query = sa.select(DISPOSITIONS).order_by(DISPOSITIONS.c.stage, DISPOSITIONS.c.record_id)
        if stage is not None:
            query = query.where(DISPOSITIONS.c.stage == stage)
        with self._engine.connect() as connection:
            return [Disposition(**row) for row in connection.execute(query).mappings()]

    # ------------------------------------------------------------ journal

    def begin(self, stage: str, key: str) -> None:
        """Note that a piece of work was started; starting it again after a crash moves the time."""
        at = sa.and_(JOURNAL.c.stage == stage, JOURNAL.c.key == key)
        with self._writer.begin() as connection:
            connection.execute(sa.delete(JOURNAL).where(at, JOURNAL.c.finished.is_(None)))
            if connection.execute(sa.select(JOURNAL.c.key).where(at)).first() is None:
                connection.execute(sa.insert(JOURNAL).values(stage=stage, key=key, started=time.time()))

    def finish(self, stage: str, key: str, result: dict[str, Any]) -> None:
        """Note its result (JSON): `done` gives it back from now on."""
        now = time.time()
        at = sa.and_(JOURNAL.c.stage == stage, JOURNAL.c.key == key)
        values = {"finished": now, "result": to_json(result).decode()}
        with self._writer.begin() as connection:
            if connection.execute(sa.update(JOURNAL).where(at).values(values)).rowcount == 0:
                connection.execute(sa.insert(JOURNAL).values(stage=stage, key=key, started=now, **values))

    def done(self, stage: str, key: str) -> dict[str, Any] | None:
        """The result of finished work; None when it never finished."""
        at = sa.and_(JOURNAL.c.stage == stage, JOURNAL.c.key == key, JOURNAL.c.finished.is_not(None))
        with self._engine.connect() as connection:
            text = connection.scalar(sa.select(JOURNAL.c.result).where(at))
        return None if text is None else from_json(text, dict)

    # ------------------------------------------------------------ checkpoints

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Store a manifest; the same id with another manifest replaces it."""
        values = {"id": checkpoint.id, "stage": checkpoint.stage, "manifest": to_msgpack(checkpoint)}
        with self._writer.begin() as connection:
            at = CHECKPOINTS.c.id == checkpoint.id
            if connection.execute(sa.update(CHECKPOINTS).where(at).values(values)).rowcount == 0:
                connection.execute(sa.insert(CHECKPOINTS).values(values))

    def checkpoint(self, checkpoint_id: str) -> Checkpoint | None:
        query = sa.select(CHECKPOINTS.c.manifest).where(CHECKPOINTS.c.id == checkpoint_id)
        with self._engine.connect() as connection:
            body: bytes | None = connection.scalar(query)
        return None if body is None else from_msgpack(body, Checkpoint)

    def checkpoints(self, stage: str | None = None) -> list[Checkpoint]:
        """Manifests, oldest first."""
        query = sa.select(CHECKPOINTS.c.manifest).order_by(CHECKPOINTS.c.seq)
        if stage is not None:
            query = query.where(CHECKPOINTS.c.stage == stage)
        with self._engine.connect() as connection:
            return [from_msgpack(body, Checkpoint) for (body,) in connection.execute(query)]
