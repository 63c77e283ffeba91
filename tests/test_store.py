"""The store: append-only, durable, and closed to held-out tasks."""

import multiprocessing
import os
import signal
import sqlite3
from pathlib import Path

import msgspec
import pytest

from treadle.errors import DataError, HeldOut, UserError
from treadle.store import Store
from treadle.types import (
    Checkpoint,
    End,
    Layer,
    Message,
    Node,
    Outcome,
    Signal,
    Source,
    Split,
    Task,
    TaskKind,
    Trajectory,
)


def task(name: str, text: str = "", split: Split | None = Split.TRAIN) -> Task:
    return Task(
        id=name,
        environment="repair",
        kind=TaskKind.SOLVABLE,
        messages=(Message(role="user", content=text or f"fix {name}"),),
        public={"line": 3},
        private={"answer": f"secret of {name}"},
        split=split,
    )


def run(
    name: str, task_id: str | None = "a", reward: float | None = 1.0, text: str = "", group: str = ""
) -> Trajectory:
    nodes = [
        Node(
            id=0,
            parent=None,
            message=Message(role="user", content=text or f"fix {task_id}"),
            tokens=[1, 2],
            mask=[0, 0],
        ),
        Node(
            id=1,
            parent=0,
            message=Message(role="assistant", content="done"),
            tokens=[3, 4],
            mask=[1, 1],
            log_probs=[-0.5, None],
            versions=[7, None],
        ),
    ]
    return Trajectory(
        id=name,
        task_id=task_id,
        environment="repair",
        contract="c1",
        source=Source.ROLLOUT,
        policy="p",
        nodes=nodes,
        outcome=Outcome(end=End.SUBMITTED, reward=reward),
        group=group or None,
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "treadle.db")


def test_what_goes_in_comes_out_unchanged(store: Store) -> None:
    store.add_trajectory(run("t1"))
    store.add_trajectory(run("t2", reward=None))
    assert store.trajectory("t1") == run("t1")
    ungraded = store.trajectory("t2")
    assert ungraded is not None and ungraded.outcome.reward is None, "not known must not come back as zero"
    assert store.trajectory("t3") is None
    assert [t.id for t in store.trajectories(graded=True)] == ["t1"]
    assert [t.id for t in store.trajectories(policy="someone else")] == []


def test_trajectories_are_append_only(store: Store) -> None:
    assert store.add_trajectory(run("t")) is True
    assert store.add_trajectory(run("t")) is False
    changed = run("t")
    changed.nodes[1].tokens = [3, 5]
    with pytest.raises(DataError, match="append-only"):
        store.add_trajectory(changed)
    assert store.trajectory("t") == run("t")


def test_signals_are_added_without_touching_tokens(store: Store) -> None:
    first = Signal(name="solved", layer=Layer.VERIFIER, value=1.0)
    store.add_trajectory(run("t"))
    assert store.add_signals("t", [first, Signal(name="rude", layer=Layer.JUDGE, value=None, node=1)]) == 2
    assert store.add_signals("t", [first]) == 0, "adding the same signal again after a crash changes nothing"
    store.add_signals("t", [Signal(name="solved", layer=Layer.VERIFIER, value=0.0, version="2")])
    found = store.trajectory("t")
    assert found is not None
    assert [(s.name, s.value, s.version) for s in found.signals] == [
        ("solved", 1.0, "1"),
        ("rude", None, "1"),
        ("solved", 0.0, "2"),
    ]
    assert found.nodes == run("t").nodes
    assert store.add_trajectory(run("t")) is False, "signals given later don't make a trajectory another one"
    with pytest.raises(DataError, match="no trajectory 'x'"):
        store.add_signals("x", [first])


def test_iteration_crosses_pages_and_survives_writes(store: Store) -> None:
    for i in range(600):
        store.add_trajectory(run(f"t{i}"))
    seen = []
    for t in store.trajectories():
        seen.append(t.id)
        store.dispose(t.id, "view", "seen", "read while iterating")
    assert seen == [f"t{i}" for i in range(600)]


def test_group_outcomes(store: Store) -> None:
    store.add_trajectory(run("t1", group="rl_1-a"))
    store.add_trajectory(run("t2", group="rl_1-a", reward=None))
    store.add_trajectory(run("t3", group="rlx1-b"))
    assert store.group_outcomes("rl_1-") == [("rl_1-a", "a", 1.0), ("rl_1-a", "a", None)]


# ---------------------------------------------------------------- tasks


def test_private_halves_stay_out_of_lists(store: Store) -> None:
    store.add_tasks([task("a"), task("b", split=None)])
    assert [t.private for t in store.tasks()] == [{}, {}]
    assert store.tasks(split=Split.TRAIN, with_private=True) == [task("a")]
    assert store.task("b") == task("b", split=None)
    assert store.add_tasks([task("a"), task("c")]) == 1
    with pytest.raises(DataError, match="'a' is already stored"):
        store.add_task(task("a", "another problem"))


def test_a_bad_task_leaves_nothing_half_written(store: Store) -> None:
    store.add_task(task("a"))
    with pytest.raises(DataError):
        store.add_tasks([task("new"), task("a", "another problem")])
    assert store.task("new") is None


# ---------------------------------------------------------------- invariant 6: held-out tasks never enter training


def test_a_held_out_task_cannot_become_a_training_task(store: Store) -> None:
    """F81: by id, and by content under another id, whichever comes first."""
    store.add_tasks([task("held", "same", Split.HELD_OUT), task("copy", "same", None), task("train", "other")])
    with pytest.raises(HeldOut):
        store.set_split("held", Split.TRAIN)
    with pytest.raises(HeldOut):
        store.set_split("held", None)
    with pytest.raises(HeldOut):
        store.set_split("copy", Split.TRAIN)
    with pytest.raises(HeldOut):
        store.add_task(task("copy2", "same", Split.TRAIN))
    with pytest.raises(HeldOut):
        store.add_task(task("held2", "other", Split.HELD_OUT))
    store.set_split("copy", Split.HELD_OUT)


def test_held_out_trajectories_are_kept_but_never_trained(store: Store) -> None:
    store.add_tasks(
        [task("a"), task("held", "the held out one", Split.HELD_OUT), task("twin", "the held out one", None)]
    )
    kept = [
        run("good", "a"),
        run("by-id", "held"),
        run("by-content", "twin"),
        run("by-prompt", None, text="The  held OUT one"),
        run("unknown", None, text="something else"),
    ]
    for t in kept:
        store.add_trajectory(t)
    for name in ("by-id", "by-content", "by-prompt", "held"):
        with pytest.raises(HeldOut):
            store.dispose(name, "curate", "train", "solved")
    for t in kept[1:4]:
        with pytest.raises(HeldOut):
            store.admit_training([kept[0], t])
    assert store.admit_training([kept[0], kept[4]]) == [kept[0], kept[4]]
    store.dispose("good", "curate", "train", "solved")
    store.dispose("unknown", "curate", "boundary", "asked")
    assert [t.id for t in store.training_trajectories()] == ["good", "unknown"]


def test_a_served_session_names_its_task_in_a_label(store: Store) -> None:
    """Training tasks may share the words of a held-out one: then the task's id decides. Others can't stand for them."""
    asks = msgspec.structs.replace(task("a", "something is wrong"), public={"line": 4})
    store.add_tasks([task("held", "something is wrong", Split.HELD_OUT), asks, task("b", "other words")])
    served = run("served", None, text="something is wrong")
    served.labels["task_id"] = "a"
    store.add_trajectory(served)
    assert store.admit_training([served]) == [served]
    assert [t.id for t in store.trajectories(task_id="a")] == ["served"]
    for other in ("held", "b", "nobody's"):
        served.labels["task_id"] = other
        with pytest.raises(HeldOut):
            store.admit_training([served])


def test_a_task_held_out_later_takes_its_trajectories_out_of_training(store: Store) -> None:
    store.add_task(task("a", split=None))
    store.add_trajectory(run("t", "a"))
    store.dispose("t", "curate", "train", "solved")
    store.set_split("a", Split.HELD_OUT)
    assert list(store.training_trajectories()) == []


def test_purposes(store: Store) -> None:
    for name, disposition in (("t1", "train"), ("t2", "preference"), ("t3", "drop"), ("t4", "boundary")):
        store.add_trajectory(run(name))
        store.dispose(name, "curate", disposition, "because")
    assert [t.id for t in store.training_trajectories("sft")] == ["t1", "t4"]
    assert [t.id for t in store.training_trajectories("preference")] == ["t1", "t2", "t4"]
    with pytest.raises(UserError, match="did you mean 'preference'"):
        list(store.training_trajectories("preferences"))


def test_dispositions_keep_the_last_word_of_each_stage(store: Store) -> None:
    store.dispose("r", "ingest", "quarantine", "broken_json: line 3")
    store.dispose("r", "curate", "drop", "first thought")
    store.dispose("r", "curate", "train", "second thought")
    assert [(d.stage, d.disposition, d.reason) for d in store.dispositions()] == [
        ("curate", "train", "second thought"),
        ("ingest", "quarantine", "broken_json: line 3"),
    ]
    assert len(store.dispositions("ingest")) == 1


# ---------------------------------------------------------------- journal and checkpoints


def test_only_finished_work_is_done(store: Store) -> None:
    store.begin("sft", "k")
    assert store.done("sft", "k") is None
    store.begin("sft", "k")
    store.finish("sft", "k", {"loss": 0.5, "none": None})
    store.begin("sft", "k")
    assert store.done("sft", "k") == {"loss": 0.5, "none": None}, "starting again must not undo what is finished"
    assert store.done("sft", "other") is None


def test_checkpoints(store: Store) -> None:
    base = Checkpoint(id="base", path="/x", parent=None, stage="base")
    store.add_checkpoint(base)
    store.add_checkpoint(Checkpoint(id="s", path="/y", parent="base", stage="sft", updates=3))
    store.add_checkpoint(Checkpoint(id="base", path="/x", parent=None, stage="base", updates=3))
    assert [c.id for c in store.checkpoints()] == ["base", "s"]
    found = store.checkpoint("base")
    assert found is not None and found.updates == 3
    assert store.checkpoint("x") is None


# ---------------------------------------------------------------- durability and bad input


def _write_until_killed(path: str, told: "multiprocessing.connection.Connection") -> None:
    store = Store(path)
    for i in range(10_000):
        store.add_trajectory(run(f"t{i}"))
        told.send(i)


def test_kill_9_loses_no_finished_trajectory(tmp_path: Path) -> None:
    """Invariant 10: whatever add_trajectory returned for is there after the process died."""
    context = multiprocessing.get_context("spawn")
    hear, tell = context.Pipe(duplex=False)
    process = context.Process(target=_write_until_killed, args=(str(tmp_path / "treadle.db"), tell))
    process.start()
    last = -1
    while last < 40:
        assert hear.poll(30), "the writer said nothing"
        last = hear.recv()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    while hear.poll(0):
        last = hear.recv()
    stored = [t.id for t in Store(tmp_path / "treadle.db").trajectories()]
    assert stored[: last + 1] == [f"t{i}" for i in range(last + 1)]
    assert len(stored) <= last + 2


def _write_share(path: str, share: int) -> None:
    store = Store(path)
    for i in range(50):
        store.add_trajectory(run(f"t{share}-{i}"))
        store.dispose("same", "stage", "keep", str(i))


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    path = tmp_path / "treadle.db"
    writers = [context.Process(target=_write_share, args=(str(path), i)) for i in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert sum(1 for _ in Store(path).trajectories()) == 150


def test_bad_locations_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no store at .*treadle init"):
        Store(tmp_path / "missing.db", create=False)
    assert not (tmp_path / "missing.db").exists()
    with pytest.raises(UserError, match="is a folder"):
        Store(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        Store(tmp_path / "no" / "treadle.db")
    (tmp_path / "corrupt.db").write_bytes(b"this is no database, but it is long enough to look like one" * 50)
    with pytest.raises(UserError, match=r"corrupt\.db can't be opened"):
        Store(tmp_path / "corrupt.db")
    with pytest.raises(UserError, match="database URL"):
        Store("://nothing")
    with pytest.raises(UserError):
        Store("nonsense://host/name")


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "treadle.db").close()
    with sqlite3.connect(tmp_path / "treadle.db") as connection:
        connection.execute("UPDATE meta SET value = '999'")
    with pytest.raises(UserError, match="schema 999"):
        Store(tmp_path / "treadle.db")
