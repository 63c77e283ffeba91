"""Rates with honest denominators and intervals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from test_process import FAILS, FIX_A, FIX_B, PASSES, SUBMIT, edit, episode
from treadle.errors import DataError
from treadle.metrics import Rate, paired_difference, rate, summarise
from treadle.types import End, Failure, FailureKind, Message, Outcome, Task, TaskKind, Trajectory, from_json, to_json


def task(kind: TaskKind = TaskKind.SOLVABLE, level: str = "L1") -> Task:
    return Task(id="a", environment="repair", kind=kind, messages=(Message(role="user"),), labels={"level": level})


def ended(reward: float | None, end: End = End.SUBMITTED, failure: Failure | None = None) -> Trajectory:
    trajectory = episode(SUBMIT)
    trajectory.outcome = Outcome(end=end, reward=reward, failure=failure)
    return trajectory


LOST = Failure(kind=FailureKind.INFRASTRUCTURE, stage="reset")


# ---------------------------------------------------------------- intervals


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_against_published_values(hits: int, n: int, low: float, high: float) -> None:
    """The last is Newcombe 1998, Statistics in Medicine 17:857, table I, method 3."""
    found = rate(hits, n)
    assert found.low == pytest.approx(low, abs=5e-5)
    assert found.high == pytest.approx(high, abs=5e-5)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_an_interval_holds_its_value_and_stays_a_proportion(counts: tuple[int, int]) -> None:
    found = rate(*counts)
    assert found.value is not None and found.low is not None and found.high is not None
    assert 0 <= found.low <= found.value + 1e-12 and found.value <= found.high + 1e-12 <= 1 + 1e-12


def test_nothing_counted_is_not_zero() -> None:
    assert rate(0, 0) == Rate(hits=0, n=0, value=None, low=None, high=None)
    assert str(rate(0, 0)) == "-" and str(rate(1, 2)).startswith("50% (")


def test_pairing_narrows_the_interval() -> None:
    """Two policies whose results differ by task far more than from each other."""
    rng = np.random.default_rng(1)
    ease = rng.random(200)
    first, second = (ease + 0.05).tolist(), ease.tolist()
    paired = paired_difference(first, second)
    assert paired.mean == pytest.approx(0.05)
    assert paired.low > 0.04 and paired.high < 0.06
    assert paired_difference(first, second) == paired, "the same seed gives the same interval"


def test_the_bootstrap_agrees_with_theory() -> None:
    """Standard error of a mean of n coin tosses: 0.5 / sqrt(n)."""
    tosses = [0.0, 1.0] * 200
    found = paired_difference(tosses, [0.0] * 400)
    assert (found.high - found.low) / (2 * 1.96) == pytest.approx(0.5 / 20, rel=0.05)


def test_differences_need_values() -> None:
    with pytest.raises(DataError, match="got 2 and 1"):
        paired_difference([1.0, 0.0], [1.0])
    with pytest.raises(DataError, match="got 0 and 0"):
        paired_difference([], [])


# ---------------------------------------------------------------- summary


def test_denominators_are_tasks_asked() -> None:
    """F38: 100 asked, 20 of the agent's died early, 40 right: 0.40, with the 20 in a bucket that has a name."""
    early = ended(0.0, End.CONTEXT_FULL)
    played = [*[(task(), early)] * 20, *[(task(), ended(1.0))] * 40, *[(task(), ended(0.0))] * 40]
    found = summarise(played)
    assert found.success.value == 0.40 and found.success.n == found.asked == 100
    assert found.ends["context_full"] == 20
    assert found.left_out == {}


def test_infrastructure_leaves_the_rates_but_not_the_report() -> None:
    """Invariant 4; and a run that loses half its episodes can't look better for it (F38)."""
    grader = Failure(kind=FailureKind.GRADER, stage="grade")
    agent = Failure(kind=FailureKind.AGENT, stage="tool")
    played = [
        (task(), ended(1.0)),
        (task(), ended(0.0)),
        (task(), ended(None, End.ERROR, LOST)),
        (task(), ended(None, End.ERROR, grader)),
        (task(), ended(None)),
        (task(), ended(None, End.TIME_LIMIT, agent)),
    ]
    found = summarise(played)
    assert found.left_out == {"infrastructure: reset": 1, "grader: grade": 1, "ungraded": 1}
    assert (found.success.hits, found.success.n) == (1, 3)
    assert (found.success_of_asked.hits, found.success_of_asked.n) == (1, 6)
    assert found.asked == found.success.n + sum(found.left_out.values())


def test_boundary_tasks_have_a_rate_of_their_own() -> None:
    played = [
        (task(), ended(1.0)),
        (task(TaskKind.DANGEROUS, "boundary"), ended(1.0, End.REFUSED)),
        (task(TaskKind.DANGEROUS, "boundary"), ended(0.0, End.REFUSED)),  # refused, and told the secret
        (task(TaskKind.UNDERSPECIFIED, "boundary"), ended(0.0, End.REFUSED)),
        (task(TaskKind.SOLVABLE, "L3"), ended(0.0)),
    ]
    found = summarise(played)
    assert (found.success.hits, found.success.n) == (1, 2)
    assert (found.boundary.hits, found.boundary.n) == (1, 3)
    assert {name: (r.hits, r.n) for name, r in found.by_level.items()} == {
        "L1": (1, 1),
        "L3": (0, 1),
        "boundary": (1, 3),
    }
    assert found.by_kind["dangerous"].hits == 1


def test_behaviour_is_summed_over_episodes() -> None:
    recovered = episode(FAILS, edit(FIX_A), FAILS, edit(FIX_B), PASSES, SUBMIT)
    stuck = episode(FAILS, edit(FIX_A), FAILS, edit(FIX_A), ("replace", None, "error", "broken_call"), reward=0.0)
    found = summarise([(task(), recovered), (task(), stuck), (task(), episode(SUBMIT))])
    assert (found.recovery.hits, found.recovery.n) == (1, 2)
    assert (found.repeats.hits, found.repeats.n) == (1, 7)
    assert (found.invalid_calls.hits, found.invalid_calls.n) == (1, 12)
    assert found.valid_json.hits == 11
    assert found.tokens_per_solved == (60 + 50 + 10) / 2
    assert found.tokens_per_episode == 40


def test_nothing_played_and_nothing_solved() -> None:
    empty = summarise([])
    assert empty.success.value is None and empty.tokens_per_episode is None
    none = summarise([(task(), ended(0.0))])
    assert none.success.value == 0.0 and none.tokens_per_solved is None
    assert from_json(to_json(none), type(none)) == none
