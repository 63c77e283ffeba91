"""Advantages and credit: plain numbers in, plain numbers out.

G rollouts of one task (a group) · T tokens of one row · K steps (policy decisions) of one rollout.

`None` is an ungraded rollout: it leaves every statistic and gets advantage 0. Whether a group has spread is decided by
exact equality of its rewards, so that float noise is never divided by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treadle.errors import UserError, unknown
from treadle.types import Trajectory

Floats = NDArray[np.float64]
Rewards = Sequence[float | None]


# ---------------------------------------------------------------- one number a rollout


def has_spread(rewards_G: Rewards) -> bool:
    """True when two graded rollouts differ: only then does an outcome say anything."""
    return len({reward for reward in rewards_G if reward is not None}) > 1


def _within_group(rewards_G: Rewards, scale: Callable[[Floats], float]) -> Floats:
    advantages_G = np.zeros(len(rewards_G))
    if not has_spread(rewards_G):
        return advantages_G
    graded = [i for i, reward in enumerate(rewards_G) if reward is not None]
    known = np.array([reward for reward in rewards_G if reward is not None], dtype=np.float64)
    if not np.isfinite(known).all():
        raise UserError(f"rewards must be finite numbers or None (ungraded), got {list(rewards_G)}")
    advantages_G[graded] = (known - known.mean()) * scale(known)
    return advantages_G


def grpo(rewards_G: Rewards) -> Floats:
    """(R - mean) / (sample std + 1e-6), Shao et al. 2024."""
    return _within_group(rewards_G, lambda known: float(1.0 / (known.std(ddof=1) + 1e-6)))


def dr_grpo(rewards_G: Rewards) -> Floats:
    """R - mean, Liu et al. 2025. Goes with the `constant` aggregation of the loss."""
    return _within_group(rewards_G, lambda known: 1.0)


def rloo(rewards_G: Rewards) -> Floats:
    """n/(n-1) (R - mean): each rollout against the mean of the others, Ahmadian et al. 2024."""
    return _within_group(rewards_G, lambda known: len(known) / (len(known) - 1))


ADVANTAGES: dict[str, Callable[[Rewards], Floats]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def group_advantages(rewards_G: Rewards, method: str = "grpo") -> Floats:
    """Advantages [G] of one group by the method's name (see ADVANTAGES)."""
    if method not in ADVANTAGES:
        raise UserError(unknown("advantage method", method, ADVANTAGES))
    return ADVANTAGES[method](rewards_G)


# ---------------------------------------------------------------- one number a step


def signals_by_node(trajectory: Trajectory, names: Sequence[str]) -> dict[int, float]:
    """Sum of the named signals on each node. A node whose judges all abstained is absent, not zero."""
    totals: dict[int, float] = {}
    for signal in trajectory.signals:
        if signal.name in names and signal.node is not None and signal.value is not None:
            totals[signal.node] = totals.get(signal.node, 0.0) + signal.value
    return totals


def decisions(trajectory: Trajectory) -> list[int]:
    """Ids of the nodes the policy sampled."""
    return [node.id for node in trajectory.nodes if node.message.role == "assistant" and any(node.mask)]


def step_advantages(
    trajectories_G: Sequence[Trajectory],
    advantages_G: ArrayLike,
    signals_G: Sequence[Mapping[int, float]],
    weight: float,
) -> list[dict[int, float]]:
    """Advantage of every decision: its rollout's advantage + weight x (its signal - mean over the group's steps).

    `signals_G` maps node ids to step signals (see `signals_by_node`); a step without one takes no part in the mean and
    keeps the rollout's advantage. An ungraded rollout gets {}: it trains nothing and leaves the mean.
    """
    graded_G = [trajectory.outcome.reward is not None for trajectory in trajectories_G]
    nodes_G = [decisions(t) if graded else [] for t, graded in zip(trajectories_G, graded_G, strict=True)]
    known = [
        signals[node] for nodes, signals in zip(nodes_G, signals_G, strict=True) for node in nodes if node in signals
    ]
    mean = float(np.mean(known)) if known else 0.0
    return [
        {node: float(outcome) + weight * (signals.get(node, mean) - mean) for node in nodes}
        for nodes, outcome, signals in zip(nodes_G, np.asarray(advantages_G), signals_G, strict=True)
    ]


def turn_returns(parents_K: Sequence[int | None], rewards_K: Sequence[float], discount: float) -> Floats:
    """Return of each turn of a tree: its own reward + discount x the mean return of its children.

    Parents come before their children. The mean keeps a turn's credit free of how many branches were tried after it.
    """
    returns_K = np.array(rewards_K, dtype=np.float64)
    children: dict[int, list[int]] = defaultdict(list)
    for step, parent in enumerate(parents_K):
        if parent is not None:
            children[parent].append(step)
    for step in reversed(range(len(returns_K))):
        if children[step]:
            returns_K[step] += discount * returns_K[children[step]].mean()
    return returns_K


def gigpo(
    advantages_G: Sequence[float],
    anchors_G: Sequence[Sequence[str]],
    rewards_G: Sequence[Sequence[float]],
    *,
    omega: float = 1.0,
    gamma: float = 0.95,
    divide_by_std: bool = False,
) -> list[Floats]:
    """Episode advantage + omega x advantage among the group's visits of the same state (Feng et al. 2025).

    `anchors_G[i][k]` is the state fingerprint that step k of rollout i acted in (no history, counters or clocks);
    `rewards_G` are step rewards. Called once per task, so equal states of different tasks never meet. A state seen
    once gives 0. The episode part counts each rollout once, however many steps it has.
    """
    returns_G = [turn_returns([None, *range(len(r) - 1)][: len(r)], r, gamma) for r in rewards_G]
    visits: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for i, anchors in enumerate(anchors_G):
        for k, anchor in enumerate(anchors):
            visits[anchor].append((i, k))
    result_G = [np.full(len(r), float(a)) for r, a in zip(rewards_G, advantages_G, strict=True)]
    local = grpo if divide_by_std else dr_grpo
    for places in visits.values():
        gained = local([float(returns_G[i][k]) for i, k in places])
        for (i, k), advantage in zip(places, gained, strict=True):
            result_G[i][k] += omega * advantage
    return result_G


# ---------------------------------------------------------------- one number a token


def onto_trained(rewards_T: ArrayLike, mask_T: ArrayLike) -> Floats:
    """Move each reward on a masked token to the last trained one before it.

    A reward before the first trained token followed no decision and goes nowhere.
    """
    rewards_T, trained_T = np.asarray(rewards_T, dtype=np.float64), np.asarray(mask_T, dtype=bool)
    moved_T = np.zeros(len(rewards_T))
    last_T = np.maximum.accumulate(np.where(trained_T, np.arange(len(rewards_T)), -1))
    np.add.at(moved_T, last_T[last_T >= 0], rewards_T[last_T >= 0])
    return moved_T


def returns(rewards_T: ArrayLike, mask_T: ArrayLike, gamma: float) -> Floats:
    """G_t = r_t + gamma G_next over trained tokens; masked spans neither discount nor receive."""
    return gae(rewards_T, np.zeros(len(np.asarray(mask_T))), mask_T, gamma, 1.0)


def gae(rewards_T: ArrayLike, values_T: ArrayLike, mask_T: ArrayLike, gamma: float, lam: float) -> Floats:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438) that skips observations: masked tokens
    get 0 and pass everything through.
    """
    moved_T, values_T = onto_trained(rewards_T, mask_T), np.asarray(values_T, dtype=np.float64)
    advantages_T = np.zeros(len(moved_T))
    advantage = next_value = 0.0
    for t in np.flatnonzero(np.asarray(mask_T))[::-1]:
        delta = moved_T[t] + gamma * next_value - values_T[t]
        advantage = delta + gamma * lam * advantage
        advantages_T[t], next_value = advantage, values_T[t]
    return advantages_T


def reinforce_plus_plus(rewards_B: Sequence[ArrayLike], masks_B: Sequence[ArrayLike], gamma: float) -> list[Floats]:
    """Token returns of B rows, whitened over all trained tokens of the batch; without spread all zero (Hu 2025)."""
    returns_B = [returns(r, m, gamma) for r, m in zip(rewards_B, masks_B, strict=True)]
    trained_B = [np.asarray(m, dtype=bool) for m in masks_B]
    known = np.concatenate([r[m] for r, m in zip(returns_B, trained_B, strict=True)])
    if len(known) == 0 or (known == known[0]).all():
        return [np.zeros_like(r) for r in returns_B]
    scale = known.std(ddof=1) + 1e-6
    return [np.where(m, (r - known.mean()) / scale, 0.0) for r, m in zip(returns_B, trained_B, strict=True)]
