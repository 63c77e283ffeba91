"""Every record ends with a disposition and a reason; nothing held out gets into training."""

from pathlib import Path

import pytest

from test_process import FAILS, FIX_A, FIX_B, PASSES, SUBMIT, Step, edit, episode
from treadle.pool.curate import CurateReport, curate
from treadle.store import Store
from treadle.types import (
    End,
    Failure,
    FailureKind,
    Layer,
    Message,
    Outcome,
    Signal,
    Source,
    Split,
    Task,
    TaskKind,
    Trajectory,
)

LONG = "the function that merges two sorted lists of numbers loses the last element of the longer one when asked twice"
OTHER = "parsing of dates written with a month name fails on leap years because the table of days is read off by one"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "treadle.db")


def task(name: str, text: str = "", split: Split | None = Split.TRAIN, kind: TaskKind = TaskKind.SOLVABLE) -> Task:
    words = text or f"{name} of {name} does {name} wrong so mend what {name} does in {name} and say {name} when done"
    return Task(id=name, environment="repair", kind=kind, messages=(Message(role="user", content=words),), split=split)


def logged(
    name: str, task_id: str | None, *steps: Step, reward: float | None = 1.0, end: End = End.SUBMITTED
) -> Trajectory:
    trajectory = episode(
        *(steps or (("read", {"path": name}, f"what {name} holds", None), SUBMIT)), reward=reward, end=end
    )
    trajectory.id, trajectory.task_id, trajectory.source = name, task_id, Source.LOG
    return trajectory


def fates(store: Store) -> dict[str, tuple[str, str]]:
    return {d.record_id: (d.disposition, d.reason.split(":")[0]) for d in store.dispositions("curate")}


def add(store: Store, *trajectories: Trajectory) -> None:
    for trajectory in trajectories:
        store.add_trajectory(trajectory)


# ---------------------------------------------------------------- every record has a fate


def test_every_kind_of_record_ends_somewhere(store: Store) -> None:
    store.add_tasks(
        [
            task("a"),
            task("b"),
            task("ask", kind=TaskKind.UNDERSPECIFIED),
            task("val", split=Split.VALIDATION),
            task("held", LONG, Split.HELD_OUT),
        ]
    )
    lost = logged("lost", "a", reward=None, end=End.ERROR)
    lost.outcome = Outcome(end=End.ERROR, failure=Failure(kind=FailureKind.INFRASTRUCTURE, stage="tool"))
    cut, empty = logged("cut", "a"), logged("empty", "a")
    cut.extra, empty.extra = {"interrupted": 2}, {"empty_replies": 1}
    noisy = logged("noisy", "a", edit(FIX_A, "text_not_found"), edit(FIX_A, "text_not_found"), SUBMIT)
    add(
        store,
        logged("solved", "a"),
        logged("recovered", "a", FAILS, edit(FIX_A), FAILS, edit(FIX_B), PASSES, SUBMIT),
        logged("failed", "a", reward=0.0),
        logged("hopeless", "b", reward=0.0),
        logged("asked", "ask", end=End.ASKED),
        logged("wrong-act", "ask", reward=0.0, end=End.SUBMITTED),
        logged("validating", "val"),
        logged("evaluated", "held"),
        logged("ungraded", "a", reward=None),
        logged("stranger", None),
        lost,
        cut,
        empty,
        noisy,
    )
    report = curate(store)
    assert fates(store) == {
        "a": ("train", "solvable"),
        "b": ("train", "solvable"),
        "ask": ("boundary", "underspecified"),
        "val": ("evaluate", "validation"),
        "held": ("hold_out", "held_out"),
        "solved": ("train", "solved"),
        "recovered": ("train", "recovery"),
        "failed": ("preference", "unsolved"),
        "hopeless": ("drop", "unsolved"),
        "asked": ("boundary", "underspecified"),
        "wrong-act": ("preference", "unsolved"),
        "validating": ("evaluate", "validation"),
        "evaluated": ("hold_out", "held_out"),
        "ungraded": ("quarantine", "ungraded"),
        "stranger": ("train", "solved"),
        "lost": ("quarantine", "infrastructure"),
        "cut": ("quarantine", "interrupted"),
        "empty": ("quarantine", "empty_replies"),
        "noisy": ("drop", "noise"),
    }
    assert sum(report.tasks.values()) == 5 and sum(report.trajectories.values()) == 14
    assert report.reasons["trajectory train recovery"] == 1
    assert {t.id for t in store.training_trajectories()} == {"solved", "recovered", "asked", "stranger"}
    assert {t.id for t in store.training_trajectories("preference")} >= {"failed", "wrong-act"}


def test_curating_again_changes_nothing(store: Store) -> None:
    store.add_tasks(
        [task("a", split=None), task("b", LONG, None), task("b2", LONG, None), task("h", OTHER, Split.HELD_OUT)]
    )
    store.add_task(task("leaky", OTHER.upper(), Split.TRAIN))
    add(store, logged("x", "a"), logged("y", "b", reward=0.0))
    first = curate(store)
    before = store.dispositions("curate")
    assert curate(store) == first and store.dispositions("curate") == before
    assert curate(Store(Path(store.location).parent / "empty.db")) == CurateReport()


def test_a_later_success_changes_the_fate_of_an_earlier_failure(store: Store) -> None:
    store.add_task(task("a"))
    add(store, logged("failed", "a", reward=0.0))
    curate(store)
    assert fates(store)["failed"] == ("drop", "unsolved")
    add(store, logged("solved", "a"))
    curate(store)
    assert fates(store)["failed"] == ("preference", "unsolved")


def test_rollouts_made_by_training_are_no_candidates(store: Store) -> None:
    store.add_task(task("a"))
    rollout = logged("r", "a")
    rollout.source = Source.ROLLOUT
    add(store, rollout)
    assert curate(store).trajectories == {}


# ---------------------------------------------------------------- noise and recovery


def test_marked_mistakes_are_context_and_no_noise(store: Store) -> None:
    """A demonstration with a deliberate wrong try teaches recovery; the same run unmarked is mostly noise."""
    store.add_task(task("a"))
    wrong = edit(FIX_A, "text_not_found")
    marked, plain = logged("marked", "a", wrong, wrong, SUBMIT), logged("plain", "a", wrong, wrong, wrong, SUBMIT)
    for node in (marked.nodes[1], marked.nodes[3]):
        node.extra["untrained"] = True
    nothing = logged("nothing", "a", SUBMIT)
    nothing.nodes[1].extra["untrained"] = True
    add(store, marked, plain, nothing)
    curate(store)
    assert fates(store)["marked"] == ("train", "solved")
    assert fates(store)["plain"] == ("drop", "noise")
    assert fates(store)["nothing"] == ("drop", "nothing_to_imitate")


def test_a_verdict_given_later_grades_a_served_session(store: Store) -> None:
    store.add_task(task("a"))
    served = logged("served", None, reward=None)
    served.source, served.labels = Source.SERVED, {"task_id": "a"}
    add(store, served)
    curate(store)
    assert fates(store)["served"] == ("quarantine", "ungraded")
    store.add_signals("served", [Signal(name="verifier", layer=Layer.VERIFIER, value=1.0)])
    curate(store)
    assert fates(store)["served"] == ("train", "solved")


def test_two_verdicts_on_the_same_words_are_no_copies(store: Store) -> None:
    store.add_task(task("a"))
    for name, verdict in (("good", 1.0), ("bad", 0.0)):
        served = logged(name, None, reward=None)
        served.source, served.labels = Source.SERVED, {"task_id": "a"}
        add(store, served)
        store.add_signals(name, [Signal(name="verifier", layer=Layer.VERIFIER, value=verdict)])
    curate(store)
    assert fates(store)["good"] == ("train", "solved")
    assert fates(store)["bad"] == ("preference", "unsolved")


def test_what_a_client_calls_its_session_is_no_fault_of_it(store: Store) -> None:
    store.add_task(task("a"))
    served = logged("served", "a")
    served.source, served.labels = Source.SERVED, {"interrupted": "no", "empty_replies": "none"}
    add(store, served)
    curate(store)
    assert fates(store)["served"] == ("train", "solved")


def test_another_tasks_name_does_not_hide_what_is_held_out(store: Store) -> None:
    store.add_tasks([task("held", LONG, split=Split.HELD_OUT), task("a", OTHER)])
    stolen = logged("stolen", "a", SUBMIT)
    stolen.nodes[0].message = Message(role="user", content=LONG)
    add(store, stolen)
    curate(store)
    assert fates(store)["stolen"] == ("hold_out", "leak")


# ---------------------------------------------------------------- duplicates


def test_copies_are_dropped_and_say_of_what(store: Store) -> None:
    store.add_tasks([task("a", LONG), task("again", LONG), task("b", OTHER)])
    steps: list[Step] = [("read", {"path": f"file{i}.py"}, f"line {i} of it", None) for i in range(20)]
    nearly: list[Step] = [*steps[:-1], ("read", {"path": "file19.py"}, "line nineteen of it", None)]
    add(
        store,
        logged("first", "a", *steps),
        logged("exact", "a", *steps),
        logged("near", "a", *nearly),
        logged("near-but-failed", "a", *nearly, reward=0.0),
        logged("other-task", "b", *steps),
    )
    curate(store)
    found = fates(store)
    assert found["again"] == ("drop", "duplicate")
    assert found["exact"] == ("drop", "duplicate")
    assert found["near"] == ("drop", "near_duplicate")
    assert found["near-but-failed"] == ("preference", "unsolved"), "where two runs part is what a pair needs"
    assert found["first"] == found["other-task"] == ("train", "solved")
    reasons = {d.record_id: d.reason for d in store.dispositions("curate")}
    assert "first" in reasons["exact"] and "first" in reasons["near"]
    assert store.tasks(split=Split.TRAIN) == [task("a", LONG), task("b", OTHER)], "no stage may choose a dropped task"


# ---------------------------------------------------------------- leakage (F81)


@pytest.mark.parametrize(
    ("text", "leaks"),
    [
        (LONG, True),
        (LONG.upper().replace(" ", "  \n"), True),
        ("Please: " + LONG + "!", True),
        (" ".join(LONG.split()[:-1]), True),
        (OTHER, False),
        (" ".join(sorted(LONG.split())), False),
        ("mend it", False),
    ],
)
def test_what_overlaps_the_held_out_is_kept_out(store: Store, text: str, leaks: bool) -> None:
    """F81: exact, re-cased and re-spaced, and by runs of words; for tasks, and for logs whose task nobody knows."""
    store.add_task(task("held", LONG, Split.HELD_OUT))
    store.add_task(task("t", text, None if text == LONG else Split.TRAIN))  # the store refuses the very same text
    stranger, of_t = logged("stranger", None), logged("of-t", "t")
    stranger.nodes[0].message = Message(role="user", content=text)
    add(store, stranger, of_t)
    curate(store)
    found = fates(store)
    assert (found["t"] == ("drop", "leak")) is leaks
    assert (found["stranger"] == ("hold_out", "leak")) is leaks
    assert (found["of-t"] == ("hold_out", "held_out")) is leaks
    kept = {t.id for t in store.training_trajectories()}
    assert "stranger" not in kept if leaks else "stranger" in kept
    assert not leaks or store.tasks(split=Split.TRAIN) == []


def test_the_held_out_task_of_the_highest_share_is_found(store: Store) -> None:
    """A text may share more runs with a long held-out task of which it holds little than with a short one it holds."""
    words = [f"word{i}" for i in range(400)]
    store.add_task(task("long", " ".join(words), Split.HELD_OUT))
    short = " ".join([*words[:3], *(f"own{i}" for i in range(12))])
    store.add_task(task("short", short, Split.HELD_OUT))
    padding = " ".join(f"other{i}" for i in range(300))
    store.add_task(task("t", f"{' '.join(words[50:90])} {short} {padding}", Split.TRAIN))
    curate(store)
    assert fates(store)["t"] == ("drop", "leak")


def scene_task(i: int, line: str, split: Split, function: str = "") -> Task:
    """As environments make them: one phrase for all, small differences in the scene."""
    name = function or f"function{i}"
    public = {
        "package": "toolz",
        "version": "1.0.0",
        "path": "toolz/itertoolz.py",
        "function": name,
        "lines": [i, i + 9],
    }
    return Task(
        id=f"task{i}",
        environment="repair",
        kind=TaskKind.SOLVABLE,
        messages=(
            Message(role="system", content=LONG),
            Message(role="user", content=f"Test test_{name} fails. Fix itertoolz.py."),
        ),
        public={
            **public,
            "tests": [f"toolz/tests/test_itertoolz.py::test_{name}"],
            "edits": [["toolz/itertoolz.py", i, line]],
        },
        split=split,
    )


def test_the_phrases_of_an_environment_are_no_leak(store: Store) -> None:
    """Hundreds of tasks share their prompt's wording and differ in function, line and bug."""
    held = [scene_task(i, f"return first(seq{i}) + rest{i}[{i}:]", Split.HELD_OUT) for i in range(60)]
    train = [scene_task(i, f"yield value{i} if key{i} else default{i}", Split.TRAIN) for i in range(100, 160)]
    again = scene_task(999, "yield  VALUE101 if key101 else default101", Split.TRAIN, function="function101")
    store.add_tasks([*held, *train, again])
    report = curate(store)
    assert report.tasks == {"hold_out": 60, "train": 61}


# ---------------------------------------------------------------- splits


def test_tasks_of_one_origin_share_a_split(store: Store) -> None:
    def made(i: int) -> Task:
        return Task(
            id=f"t{i}",
            environment="repair",
            kind=TaskKind.SOLVABLE,
            messages=(Message(role="user", content=f"case{i} " * 9),),
            lineage=(f"function{i % 50}",),
        )

    store.add_task(task("known", split=Split.HELD_OUT))
    store.add_tasks([made(i) for i in range(200)])
    curate(store)
    splits: dict[str, set[Split | None]] = {}
    for t in store.tasks():
        splits.setdefault((t.lineage or ("",))[0], set()).add(t.split)
    assert all(len(found) == 1 and None not in found for found in splits.values())
    counts = [sum(t.split is split for t in store.tasks()) for split in (Split.TRAIN, Split.VALIDATION, Split.HELD_OUT)]
    assert counts[0] > counts[1] > 0 and counts[2] > 0
