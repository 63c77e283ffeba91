import numpy as np

from treadle.curriculum import Curriculum
from treadle.types import Message, Task, TaskKind


def make(name: str, level: str = "1", kind: TaskKind = TaskKind.SOLVABLE) -> Task:
    message = Message(role="user", content=name)
    return Task(id=name, environment="e", kind=kind, messages=(message,), labels={"level": level})


def test_tasks_at_the_edge_of_ability_are_practised_most() -> None:
    curriculum = Curriculum([make(name) for name in ("always", "never", "sometimes")])
    for _ in range(10):
        curriculum.observe("always", [1.0] * 8)
        curriculum.observe("never", [0.0] * 8)
        curriculum.observe("sometimes", [1.0, 0.0] * 4)
    rng = np.random.default_rng(0)
    first = [curriculum.choose(1, rng)[0].id for _ in range(100)]
    assert first.count("sometimes") > 90


def test_a_family_lends_its_pass_rate_to_tasks_not_yet_tried() -> None:
    hard = [make(f"hard{i}", "3") for i in range(4)]
    curriculum = Curriculum([*hard, make("easy")])
    for task in hard[:3]:
        curriculum.observe(task.id, [0.0] * 8)
    assert curriculum.pass_rate("hard3") < 0.1 < curriculum.pass_rate("easy")


def test_ungraded_rollouts_and_unknown_tasks_teach_nothing() -> None:
    curriculum = Curriculum([make("a"), make("b")])
    before = curriculum.pass_rate("a")
    curriculum.observe("a", [None, None])
    curriculum.observe("elsewhere", [1.0])
    assert curriculum.pass_rate("a") == before


def test_the_same_seed_chooses_the_same_tasks() -> None:
    curriculum = Curriculum([make(str(i)) for i in range(50)])
    chosen = [[t.id for t in curriculum.choose(8, np.random.default_rng(3))] for _ in range(2)]
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) == 8
    assert not set(chosen[0]) & {t.id for t in curriculum.choose(8, np.random.default_rng(3), frozenset(chosen[0]))}


def test_a_share_of_each_choice_is_not_to_be_solved() -> None:
    """Tasks that ask for a fix are at the edge, the others are not: without the share none of them comes up."""
    fixes = [make(f"fix{i}") for i in range(20)]
    asks = [make(f"ask{i}", kind=TaskKind.UNDERSPECIFIED) for i in range(3)]
    refusals = [make(f"refuse{i}", kind=TaskKind.DANGEROUS) for i in range(3)]
    curriculum = Curriculum([*fixes, *asks, *refusals])
    for task in fixes:
        curriculum.observe(task.id, [1.0, 0.0] * 8)
    for task in asks:
        curriculum.observe(task.id, [1.0] * 63 + [0.0])
    for task in refusals:
        curriculum.observe(task.id, [0.0] * 64)

    def kinds(count: int, boundary: float) -> list[int]:
        chosen = curriculum.choose(count, np.random.default_rng(0), boundary=boundary)
        assert len({task.id for task in chosen}) == count
        return [sum(task.kind is kind for task in chosen) for kind in (TaskKind.UNDERSPECIFIED, TaskKind.DANGEROUS)]

    assert kinds(10, 0.0) == [0, 0]
    assert kinds(10, 0.2) == kinds(6, 0.3) == [1, 1]  # one of each kind before a second of any
    assert kinds(10, 0.4) == [2, 2]
    assert kinds(10, 0.9) == [3, 3]  # there are no more of them
    assert kinds(26, 0.0) == [3, 3]
