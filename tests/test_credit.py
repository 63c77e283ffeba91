"""Advantages and credit: values recomputed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle import credit
from treadle.errors import UserError
from treadle.types import End, Layer, Message, Node, Outcome, Signal, Source, Trajectory


def episode(reward: float | None, steps: int, signals: list[Signal] | None = None) -> Trajectory:
    """user, then `steps` times assistant and tool."""
    nodes = [Node(id=0, parent=None, message=Message(role="user"), tokens=[1, 2], mask=[0, 0])]
    for k in range(steps):
        nodes.append(Node(id=2 * k + 1, parent=2 * k, message=Message(role="assistant"), tokens=[3, 4], mask=[1, 1]))
        nodes.append(Node(id=2 * k + 2, parent=2 * k + 1, message=Message(role="tool"), tokens=[5], mask=[0]))
    outcome = Outcome(end=End.SUBMITTED, reward=reward)
    return Trajectory(
        id="t",
        task_id="a",
        environment="e",
        contract=None,
        source=Source.ROLLOUT,
        policy="p",
        nodes=nodes,
        outcome=outcome,
        signals=signals or [],
    )


def test_ungraded_rollouts_leave_the_statistics() -> None:
    """F28, F29: mean 2/3 and not 1/2."""
    np.testing.assert_allclose(credit.grpo([1, 0, None, 1]), [0.5773, -1.1547, 0, 0.5773], atol=1e-4)
    np.testing.assert_allclose(credit.dr_grpo([1, 0, None, 1]), [1 / 3, -2 / 3, 0, 1 / 3])
    np.testing.assert_allclose(credit.rloo([1, 0, None, 1]), [0.5, -1, 0, 0.5])
    assert credit.grpo([None, None]).tolist() == [0, 0]
    assert credit.grpo([0, None]).tolist() == [0, 0]  # measured zero beside an unknown: still a group of one


@pytest.mark.parametrize("method", credit.ADVANTAGES)
def test_group_of_one_and_no_spread_give_zero(method: str) -> None:
    """F40, F41: zero, finite, whatever the reward."""
    for rewards in ([0.7], [0.95] * 7, [0.1 + 0.2] * 3, [], [None, 0.3, 0.3]):
        assert credit.group_advantages(rewards, method).tolist() == [0.0] * len(rewards)


def test_leave_one_out_is_not_divided_by_noise() -> None:
    """F41 in float32 rewards."""
    rewards = [float(np.float32(x)) for x in [0] + [0.95] * 7]
    assert credit.rloo(rewards)[0] == pytest.approx(-0.95, abs=1e-6)


def test_statistics_belong_to_the_group() -> None:
    """F42."""
    np.testing.assert_allclose(credit.grpo([1, 0]), credit.grpo([10, 9]))


@given(st.lists(st.one_of(st.none(), st.floats(-100, 100)), max_size=8), st.randoms())
def test_order_changes_nothing_and_leave_one_out_is_rloo(rewards: list[float | None], random: object) -> None:
    order = np.random.default_rng(len(rewards)).permutation(len(rewards))
    shuffled = [rewards[i] for i in order]
    for method in credit.ADVANTAGES:
        advantages = credit.group_advantages(rewards, method)
        assert np.isfinite(advantages).all()
        np.testing.assert_allclose(credit.group_advantages(shuffled, method), advantages[order], atol=1e-7, rtol=1e-6)
    known = [r for r in rewards if r is not None]
    if credit.has_spread(rewards):
        others = [r - (sum(known) - r) / (len(known) - 1) for r in known]
        got = [a for a, r in zip(credit.rloo(rewards), rewards, strict=True) if r is not None]
        np.testing.assert_allclose(got, others, atol=1e-9)


def test_bad_input_is_named() -> None:
    with pytest.raises(UserError, match="did you mean 'grpo'"):
        credit.group_advantages([1, 0], "gpro")
    with pytest.raises(UserError, match="finite"):
        credit.grpo([1.0, math.nan])


def test_step_signals_are_centred_over_the_groups_steps() -> None:
    """Invariants 3 and 4: a silent judge is no zero, and an ungraded rollout takes no part."""
    good, bad, lost = episode(1, 2), episode(0, 2), episode(None, 1)
    result = credit.step_advantages([good, bad, lost], [1, -1, 0], [{1: 0, 3: 0}, {1: -1}, {1: -100}], weight=0.7)
    mean = -1 / 3
    assert result[0] == pytest.approx({1: 1 - 0.7 * mean, 3: 1 - 0.7 * mean})
    assert result[1] == pytest.approx({1: -1 + 0.7 * (-1 - mean), 3: -1})  # step 3 was not judged
    assert result[2] == {}


def test_signals_by_node_sums_names_and_skips_abstentions() -> None:
    signals = [
        Signal(name="invalid", layer=Layer.PROCESS, value=-1, node=1),
        Signal(name="repeat", layer=Layer.PROCESS, value=-0.5, node=1),
        Signal(name="repeat", layer=Layer.PROCESS, value=None, node=3),
        Signal(name="other", layer=Layer.JUDGE, value=9, node=1),
        Signal(name="repeat", layer=Layer.PROCESS, value=-1, node=None),
    ]
    assert credit.signals_by_node(episode(1, 2, signals), ["invalid", "repeat"]) == {1: -1.5}


def test_gae_skips_observations() -> None:
    """Masked spans pass everything through unchanged; a reward on one moves to the last trained token."""
    zeros = np.zeros(4)
    assert credit.gae([0, 0, 0, 1], zeros, [1, 0, 0, 1], 1.0, 0.5).tolist() == [0.5, 0, 0, 1]
    assert credit.gae([0, 0, 1], zeros[:3], [1, 1, 0], 0.0, 0.5).tolist() == [0, 1, 0]
    # with values, by hand: delta2 = 1 - .5, A2 = .5; delta0 = .9*.5 - .2 = .25, A0 = .25 + .9*.5*.5
    got = credit.gae([0, 0, 1], [0.2, 7, 0.5], [1, 0, 1], 0.9, 0.5)
    np.testing.assert_allclose(got, [0.475, 0, 0.5])


def test_returns_pass_through_masked_spans() -> None:
    assert credit.returns([0, 0, 0, 1], [1, 0, 0, 1], 0.5).tolist() == [0.5, 0, 0, 1]
    assert credit.onto_trained([5, 1, 1], [0, 1, 0]).tolist() == [0, 2, 0]


def test_reinforce_plus_plus_whitens_over_the_batch() -> None:
    rows = credit.reinforce_plus_plus([[0, 0, 1], [0, 0]], [[1, 0, 1], [1, 0]], 1.0)
    known = np.array([1, 1, 0.0])
    expected = (known - known.mean()) / (known.std(ddof=1) + 1e-6)
    np.testing.assert_allclose([rows[0][0], rows[0][2], rows[1][0]], expected)
    assert rows[0][1] == 0 and rows[1][1] == 0
    assert credit.reinforce_plus_plus([[1]], [[1]], 1.0)[0].tolist() == [0]


def test_turn_discount_flows_from_leaf_to_root() -> None:
    assert credit.turn_returns([None, 0, 1], [0, 0, 1], 0.5).tolist() == [0.25, 0.5, 1]
    assert credit.turn_returns([None, 0, 0], [0, 1, 0], 1.0).tolist() == [0.5, 1, 0]  # two branches


def test_gigpo_compares_visits_of_one_state() -> None:
    result = credit.gigpo([1, -1], [["s", "x"], ["s", "y", "s"]], [[0, 1], [0, 0, 0]], gamma=0.5)
    # returns: [.5, 1] and [0, 0, 0]; state s was visited with .5, 0, 0; x and y once
    np.testing.assert_allclose(result[0], [1 + 1 / 3, 1])
    np.testing.assert_allclose(result[1], [-1 - 1 / 6, -1, -1 - 1 / 6])
    assert [len(r) for r in credit.gigpo([0], [[]], [[]])] == [0]


def test_the_baseline_counts_each_rollout_once() -> None:
    """Three rows of a rollout worth 1 and one row of one worth 0: the mean is .5."""
    advantages = credit.dr_grpo([1, 0])
    rows = credit.step_advantages([episode(1, 3), episode(0, 1)], advantages, [{}, {}], 0.7)
    assert rows == [{1: 0.5, 3: 0.5, 5: 0.5}, {1: -0.5}]
