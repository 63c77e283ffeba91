"""The tables of the store, how a database is opened, and how structs become rows and back."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from treadle.errors import HeldOut, UserError
from treadle.types import Layer, Message, Signal, Split, Task, Trajectory, fingerprint, from_msgpack, to_msgpack

SCHEMA = sa.MetaData()
META = sa.Table("meta", SCHEMA, sa.Column("key", sa.Text, primary_key=True), sa.Column("value", sa.Text))
TASKS = sa.Table(
    "tasks",
    SCHEMA,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("id", sa.Text, unique=True, nullable=False),
    sa.Column("content_key", sa.Text, index=True, nullable=False),
    sa.Column("prompt_key", sa.Text, index=True),
    sa.Column("environment", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("split", sa.Text, index=True),
    sa.Column("public", sa.LargeBinary, nullable=False),
)
# A table of its own, so that listing tasks never reads answers.
PRIVATE = sa.Table(
    "task_private",
    SCHEMA,
    sa.Column("id", sa.Text, sa.ForeignKey("tasks.id"), primary_key=True),
    sa.Column("private", sa.LargeBinary, nullable=False),
)
TRAJECTORIES = sa.Table(
    "trajectories",
    SCHEMA,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("id", sa.Text, unique=True, nullable=False),
    sa.Column("task_id", sa.Text, index=True),  # no foreign key: a log may name a task that nobody has
    sa.Column("prompt_key", sa.Text),
    sa.Column("environment", sa.Text),
    sa.Column("contract", sa.Text),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("policy", sa.Text, index=True, nullable=False),
    sa.Column("group", sa.Text, index=True),
    sa.Column("reward", sa.Float),
    sa.Column("end", sa.Text, nullable=False),
    sa.Column("created", sa.Float),
    sa.Column("body", sa.LargeBinary, nullable=False),
)
SIGNALS = sa.Table(
    "signals",
    SCHEMA,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("trajectory_id", sa.Text, sa.ForeignKey("trajectories.id"), index=True, nullable=False),
    sa.Column("node", sa.Integer),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("layer", sa.Text, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("value", sa.Float),
    sa.Column("evidence", sa.Text, nullable=False),
    sa.Column("cost", sa.Float),
)
DISPOSITIONS = sa.Table(
    "dispositions",
    SCHEMA,
    sa.Column("record_id", sa.Text, primary_key=True),
    sa.Column("stage", sa.Text, primary_key=True),
    sa.Column("disposition", sa.Text, index=True, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
)
JOURNAL = sa.Table(
    "journal",
    SCHEMA,
    sa.Column("stage", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("started", sa.Float, nullable=False),
    sa.Column("finished", sa.Float),
    sa.Column("result", sa.Text),
)
CHECKPOINTS = sa.Table(
    "checkpoints",
    SCHEMA,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("id", sa.Text, unique=True, nullable=False),
    sa.Column("stage", sa.Text, nullable=False),
    sa.Column("manifest", sa.LargeBinary, nullable=False),
)


class Disposition(msgspec.Struct, frozen=True):
    record_id: str
    stage: str
    disposition: str
    reason: str


def open_engine(location: str, *, create: bool) -> sa.Engine:
    """An engine for a file path (SQLite) or a database URL. Raises UserError when that can't be."""
    url = _url(location, create)
    try:
        engine = sa.create_engine(url)
    except ModuleNotFoundError as error:
        raise UserError(f"{url.drivername} needs the Python package {error.name!r}: install it first") from error
    except sa.exc.ArgumentError as error:
        raise UserError(f"can't use {location!r} as a store: {error}") from error
    if url.get_backend_name() == "sqlite":
        _tune_sqlite(engine)
    return engine


def _url(location: str, create: bool) -> sa.URL:
    if "://" in location:
        try:
            return sa.make_url(location)
        except sa.exc.ArgumentError as error:
            raise UserError(f"{location!r} is not a database URL: write postgresql+psycopg://user@host/name") from error
    path = Path(location)
    if path.is_dir():
        raise UserError(f"{location} is a folder: give the path of the database file, such as {path / 'treadle.db'}")
    if not path.exists() and not create:
        raise UserError(f"no store at {location}: run `treadle init` in the workspace first")
    if not path.parent.is_dir():
        raise UserError(f"can't create {location}: the folder {path.parent} does not exist")
    return sa.URL.create("sqlite", database=str(path))


def _tune_sqlite(engine: sa.Engine) -> None:
    @sa.event.listens_for(engine, "connect")
    def _connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # transactions are begun below, not guessed by the driver
        for pragma in ("busy_timeout=30000", "journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        # A writer takes the lock at once: upgrading a read transaction would fail instead of waiting.
        writes = connection.get_execution_options().get("write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


# ---------------------------------------------------------------- rows


def write_task(connection: sa.Connection, task: Task) -> None:
    public = msgspec.structs.replace(task, private={}, split=None)
    row = {
        "id": task.id,
        "content_key": task.content_key(),
        "prompt_key": prompt_key(task.messages),
        "environment": task.environment,
        "kind": str(task.kind),
        "split": task.split and str(task.split),
        "public": to_msgpack(public),
    }
    connection.execute(sa.insert(TASKS).values(row))
    connection.execute(sa.insert(PRIVATE).values(id=task.id, private=to_msgpack(task.private)))


def read_task(connection: sa.Connection, task_id: str) -> Task | None:
    query = (
        sa.select(TASKS.c.public, TASKS.c.split, PRIVATE.c.private)
        .join(PRIVATE, PRIVATE.c.id == TASKS.c.id)
        .where(TASKS.c.id == task_id)
    )
    row = connection.execute(query).one_or_none()
    return None if row is None else task_from(*row)


def task_from(public: bytes, split: str | None, private: bytes | None = None) -> Task:
    secret = {} if private is None else from_msgpack(private, dict)
    return msgspec.structs.replace(
        from_msgpack(public, Task), split=None if split is None else Split(split), private=secret
    )


def same_task(a: Task, b: Task) -> bool:
    """Equal in everything stored but the split, which curate may change."""
    return to_msgpack(msgspec.structs.replace(a, split=None)) == to_msgpack(msgspec.structs.replace(b, split=None))


def words(text: str) -> list[str]:
    """Case, spacing and punctuation aside."""
    return re.findall(r"\w+", text.casefold())


def prompt_words(messages: Iterable[Message]) -> list[str]:
    """The user's words before the first reply. The system prompt is the environment's, the same for all its tasks."""
    asked = takewhile(lambda message: message.role != "assistant", messages)
    return [word for message in asked if message.role == "user" for word in words(message.content)]


def prompt_key(messages: Iterable[Message]) -> str | None:
    """Hash of the prompt's words; None when there are none."""
    found = prompt_words(messages)
    return fingerprint(found) if found else None


def body(trajectory: Trajectory) -> bytes:
    """All of it but the signals, which have a table of their own because they grow."""
    return to_msgpack(msgspec.structs.replace(trajectory, signals=[]))


def prompt_of(trajectory: Trajectory) -> str | None:
    return prompt_key(node.message for node in trajectory.nodes)


def task_of(trajectory: Trajectory) -> str | None:
    """The task's id: a client of a served agent can only give it as a label."""
    return trajectory.task_id or trajectory.labels.get("task_id")


def trajectory_row(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "id": trajectory.id,
        "task_id": task_of(trajectory),
        "prompt_key": prompt_of(trajectory),
        "environment": trajectory.environment,
        "contract": trajectory.contract,
        "source": str(trajectory.source),
        "policy": trajectory.policy,
        "group": trajectory.group,
        "reward": trajectory.outcome.reward,
        "end": str(trajectory.outcome.end),
        "created": trajectory.created,
    }


def read_signals(connection: sa.Connection, ids: list[str]) -> dict[str, list[Signal]]:
    query = sa.select(SIGNALS).where(SIGNALS.c.trajectory_id.in_(ids)).order_by(SIGNALS.c.seq)
    found: dict[str, list[Signal]] = {}
    for row in connection.execute(query).mappings():
        fields = {name: row[name] for name in ("name", "value", "node", "version", "evidence", "cost")}
        found.setdefault(row["trajectory_id"], []).append(Signal(layer=Layer(row["layer"]), **fields))
    return found


def append_signals(connection: sa.Connection, trajectory_id: str, signals: Iterable[Signal]) -> int:
    known = set(read_signals(connection, [trajectory_id]).get(trajectory_id, ()))
    new = [signal for signal in dict.fromkeys(signals) if signal not in known]
    rows = [{**msgspec.structs.asdict(s), "layer": str(s.layer), "trajectory_id": trajectory_id} for s in new]
    if rows:
        connection.execute(sa.insert(SIGNALS), rows)
    return len(rows)


# ---------------------------------------------------------------- held-out tasks


class HeldOutTasks(msgspec.Struct, frozen=True):
    """What must never be trained on: tasks by id and content, and prompts.

    Other tasks may be asked for in the same words: a trajectory is of the task that it names if it begins as that does.
    """

    tasks: frozenset[str]
    asked: dict[str, str | None]  # every task's id, and the hash of its words
    prompts: frozenset[str]

    def holds(self, task_id: str | None, prompt: str | None) -> bool:
        named = task_id in self.asked and self.asked[task_id] == prompt
        return task_id in self.tasks or (not named and prompt in self.prompts)


def held_out(connection: sa.Connection) -> HeldOutTasks:
    columns = TASKS.c
    rows = connection.execute(sa.select(columns.id, columns.content_key, columns.prompt_key, columns.split)).all()
    held = [row for row in rows if row.split == Split.HELD_OUT]
    contents = {row.content_key for row in held}
    return HeldOutTasks(
        tasks=frozenset(row.id for row in rows if row.content_key in contents),
        asked={row.id: row.prompt_key for row in rows},
        prompts=frozenset(row.prompt_key for row in held if row.prompt_key),
    )


def guard_split(connection: sa.Connection, task_id: str, content_key: str, split: Split | None) -> None:
    """No task may be in training while another with its content is held out, whichever comes second."""
    clash = {Split.TRAIN: Split.HELD_OUT, Split.HELD_OUT: Split.TRAIN}.get(split) if split else None
    if clash is None:
        return
    columns = TASKS.c
    query = sa.select(columns.id).where(
        columns.content_key == content_key, columns.split == str(clash), columns.id != task_id
    )
    other = connection.scalar(query)
    if other is not None:
        raise HeldOut(f"task {task_id!r} can't be {split}: task {other!r} with the same content is {clash}")


def guard_disposition(connection: sa.Connection, held: HeldOutTasks, decision: Disposition) -> None:
    columns = TRAJECTORIES.c
    query = sa.select(columns.task_id, columns.prompt_key).where(columns.id == decision.record_id)
    row = connection.execute(query).one_or_none()
    if decision.record_id in held.tasks or (row is not None and held.holds(row.task_id, row.prompt_key)):
        raise HeldOut(f"{decision.record_id!r} is held out: it can't be marked {decision.disposition!r} for training")
