"""Trajectories -> rows -> packs.

T tokens of one pack · N trained tokens of one pack · R runs of one pack.

A pack stores the token sequences of many rows as prefix tries: what several rows have in common at their beginning (a
group's prompt, a system prompt, the turns before a branch) is stored and computed once. An attention mask of ancestors
and positions counted from each root make every row see exactly its own path, so packing leaks nothing. One mechanism
gives packing, shared prefixes and branches.

Trained tokens are those with mask 1 in nodes that have a weight; all else is context. They are listed in the N arrays,
one entry for each row that trains them: a loss never sees a masked token. Target n is predicted at T-index source_N[n].
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treadle.errors import DataError, UserError, unknown
from treadle.prefix import Ints, Run, common, find, insert, layout, places
from treadle.types import Node, Trajectory

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Example:
    """One root-to-leaf path to train on. `weights`: node id -> advantage or weight; other nodes are context only."""

    trajectory: Trajectory
    weights: Mapping[int, float]
    leaf: int | None = None  # default: the last node
    pair: int | None = None  # the two rows of a preference pair share it
    chosen: bool = True


@dataclass
class Pack:
    """One forward pass. `behaviour_logp_N` is NaN and `version_N` -1 where unknown; `row_N` indexes the examples."""

    tokens_T: Ints
    positions_T: Ints  # depth on its own path
    runs_R3: Ints  # start, stop and the T-index of the parent token (-1: a root) of each unbranched stretch
    source_N: Ints
    target_N: Ints
    weight_N: Floats
    behaviour_logp_N: Floats
    version_N: Ints
    row_N: Ints
    node_N: Ints
    pair_N: Ints  # -1 outside pairs
    chosen_N: Bools
    tokens_before_sharing: int
    names: dict[int, str]  # row -> trajectory id
    old_logp_N: Floats | None = None  # from Learner.log_probs, before the first update on this batch
    reference_logp_N: Floats | None = None  # the same from a frozen model

    def ancestors(self) -> Bools:
        """[T, T]: True where the row token may attend to the column token (itself and its ancestors)."""
        size = len(self.tokens_T)
        mask_TT = np.zeros((size, size), dtype=bool)
        for start, stop, parent in self.runs_R3:
            if parent >= 0:
                mask_TT[start:stop] = mask_TT[parent]
            mask_TT[start:stop, start:stop] = np.tri(stop - start, dtype=bool)
        return mask_TT

    def require_behaviour(self) -> None:
        """DataError naming the first trained token whose sampling log-prob was not recorded."""
        missing = np.flatnonzero(np.isnan(self.behaviour_logp_N))
        if len(missing):
            row, node = int(self.row_N[missing[0]]), int(self.node_N[missing[0]])
            raise DataError(
                f"trajectory {self.names[row]!r}, node {node}: {len(missing)} trained tokens of this pack have no "
                "behaviour log-prob; only rollouts that recorded them can be used for RL"
            )


@dataclass
class DropReport:
    """What became of the rows. Counts of tokens are of kept rows, before and after sharing."""

    rows: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> rows
    cut_rows: int = 0
    cut_trained_tokens: int = 0
    tokens_before_sharing: int = 0
    tokens: int = 0
    trained_tokens: int = 0


@dataclass
class _Row:
    """One example as arrays: L ids of its path, and N trained tokens at given depths."""

    index: int
    example: Example
    ids_L: Ints
    ends: list[int]  # depth at which each node ends
    depth_N: Ints
    weight_N: Floats
    logp_N: Floats
    version_N: Ints
    node_N: Ints

    def keep(self, kept_N: Bools) -> None:
        self.depth_N, self.node_N, self.version_N = self.depth_N[kept_N], self.node_N[kept_N], self.version_N[kept_N]
        self.weight_N, self.logp_N = self.weight_N[kept_N], self.logp_N[kept_N]


def branches(trajectory: Trajectory, weights: Mapping[int, float]) -> list[Example]:
    """One example per leaf of a tree; a node on several paths is trained by the first of them only."""
    left = dict(weights)
    examples = []
    for leaf in trajectory.leaves():
        own = {node.id: left.pop(node.id) for node in trajectory.path(leaf) if node.id in left}
        examples.append(Example(trajectory, own, leaf))
    return [example for example in examples if example.weights]


def divisor(packs: Sequence[Pack], aggregation: str = "token_mean", constant: float | None = None) -> float:
    """What a loss's sum is divided by, counted over all packs before any rejection.

    token_mean: trained tokens · sequence_mean: rows · pairs: pairs · constant: as given.
    """
    counts = {
        "token_mean": float(sum(len(pack.target_N) for pack in packs)),
        "sequence_mean": float(sum(len(np.unique(pack.row_N)) for pack in packs)),
        "pairs": float(sum(len(np.unique(pack.pair_N)) for pack in packs)),
        "constant": float(constant or 0.0),
    }
    if aggregation not in counts:
        raise UserError(unknown("aggregation", aggregation, counts))
    if not counts[aggregation] > 0:
        raise UserError(f"the divisor {aggregation!r} is {counts[aggregation]}: it must be above 0")
    return counts[aggregation]


# ---------------------------------------------------------------- rows


def _row(index: int, example: Example) -> _Row:
    path = example.trajectory.path(example.leaf)
    ends = np.cumsum([len(node.tokens) for node in path]).tolist()
    parts: list[list[NDArray[np.generic]]] = [[], [], [], [], []]
    for node, end in zip(path, ends, strict=True):
        _check(example, node)
        if node.id not in example.weights:
            continue
        at = np.flatnonzero(np.asarray(node.mask, dtype=bool))
        logp = np.array([np.nan if x is None else x for x in node.log_probs] or [np.nan] * len(node.tokens))
        version = np.array([-1 if x is None else x for x in node.versions] or [-1] * len(node.tokens))
        values = (
            at + end - len(node.tokens),
            np.full(len(at), example.weights[node.id]),
            logp[at],
            version[at],
            np.full(len(at), node.id),
        )
        for part, value in zip(parts, values, strict=True):
            part.append(value)
    empty = np.zeros(0)
    depth, weight, logp, version, node_id = (np.concatenate([empty, *part]) for part in parts)
    return _Row(
        index,
        example,
        np.array([token for node in path for token in node.tokens], dtype=np.int64),
        ends,
        depth.astype(np.int64),
        weight.astype(np.float32),
        logp.astype(np.float32),
        version.astype(np.int64),
        node_id.astype(np.int64),
    )


def _check(example: Example, node: Node) -> None:
    size = len(node.tokens)
    lengths = {"mask": len(node.mask), "log_probs": len(node.log_probs), "versions": len(node.versions)}
    wrong = {
        name: length for name, length in lengths.items() if length not in ({size} if name == "mask" else {0, size})
    }
    where = f"trajectory {example.trajectory.id!r}, node {node.id}"
    if wrong:
        raise DataError(f"{where}: {size} tokens, but {wrong}; they must be equally long")
    if not np.isfinite(example.weights.get(node.id, 0.0)):
        raise DataError(
            f"{where}: weight {example.weights[node.id]} is not a finite number; leave the node out instead"
        )


def _shorten(row: _Row, limit: int, report: DropReport) -> str | None:
    """Cut whole nodes from the end until the row fits; the reason if nothing to train is left.

    Context after the last trained token changes nothing, so it goes first and isn't counted as cut.
    """
    row.keep(row.depth_N > 0)  # nothing predicts a row's first token
    if len(row.depth_N) == 0:
        return "nothing trained"
    row.ids_L = row.ids_L[: row.depth_N[-1] + 1]
    if len(row.ids_L) <= limit:
        return None
    end = max((end for end in row.ends if end <= limit), default=0)
    before = len(row.depth_N)
    row.keep(row.depth_N < end)
    if len(row.depth_N) == 0:
        return "too long"
    report.cut_rows += 1
    report.cut_trained_tokens += before - len(row.depth_N)
    row.ids_L = row.ids_L[: row.depth_N[-1] + 1]
    return None


def _units(rows: Iterable[_Row], report: DropReport, max_tokens: int) -> list[list[_Row]]:
    """Rows that must share a pack: the two of a pair, or one alone. Pairs lose the tokens of their shared prefix."""
    pairs: dict[int, list[_Row]] = defaultdict(list)
    units = []
    for row in rows:
        if row.example.pair is None:
            units.append([row])
        else:
            pairs[row.example.pair].append(row)
    for pair in pairs.values():
        reason = _pair_fault(pair, max_tokens)
        if reason:
            report.dropped[reason] += len(pair)
        else:
            units.append(pair)
    return units


def _pair_fault(pair: list[_Row], max_tokens: int) -> str | None:
    if sorted(row.example.chosen for row in pair) != [False, True]:
        return "pair without partner"
    shared = common(pair[0].ids_L, pair[1].ids_L)
    if sum(len(row.ids_L) for row in pair) - shared > max_tokens:
        return "pair too long"
    for row in pair:
        row.keep(row.depth_N >= shared)
    return None if all(len(row.depth_N) for row in pair) else "pair equal after truncation"


# ---------------------------------------------------------------- packs


@dataclass
class _Bin:
    root: Run
    rows: list[_Row]
    size: int = 0

    def added(self, unit: list[_Row]) -> int:
        """Tokens this unit would add."""
        total = 0
        for i, row in enumerate(unit):
            held = max([find(self.root, row.ids_L), *(common(row.ids_L, other.ids_L) for other in unit[:i])])
            total += len(row.ids_L) - held
        return total

    def add(self, unit: list[_Row]) -> None:
        self.size += self.added(unit)
        self.rows += unit
        for row in unit:
            insert(self.root, row.ids_L)


def _fill(units: list[list[_Row]], max_tokens: int) -> list[_Bin]:
    """Each unit goes where it adds least, then where least room is left; groups one after another, longest first."""
    group_of = [unit[0].example.trajectory.group or unit[0].example.trajectory.id for unit in units]
    length_of = [sum(len(row.ids_L) for row in unit) for unit in units]
    group_length: Counter[str] = Counter()
    for group, length in zip(group_of, length_of, strict=True):
        group_length[group] += length
    order = sorted(range(len(units)), key=lambda i: (-group_length[group_of[i]], group_of[i], -length_of[i], i))
    bins: list[_Bin] = []
    for i in order:
        costs = [(each.added(units[i]), -each.size, k) for k, each in enumerate(bins)]
        fitting = [cost for cost in costs if cost[0] - cost[1] <= max_tokens]
        if not fitting:
            bins.append(_Bin(Run(np.zeros(0, np.int64), {}), []))
        bins[min(fitting)[2] if fitting else -1].add(units[i])
    return bins


def _pack(filled: _Bin) -> Pack:
    tokens_T, positions_T, runs_R3 = layout(filled.root)
    rows = sorted(filled.rows, key=lambda row: row.index)
    sizes = [len(row.depth_N) for row in rows]
    return Pack(
        tokens_T=tokens_T,
        positions_T=positions_T,
        runs_R3=runs_R3,
        source_N=np.concatenate([places(filled.root, row.ids_L)[row.depth_N - 1] for row in rows]),
        target_N=np.concatenate([row.ids_L[row.depth_N] for row in rows]),
        weight_N=np.concatenate([row.weight_N for row in rows]),
        behaviour_logp_N=np.concatenate([row.logp_N for row in rows]),
        version_N=np.concatenate([row.version_N for row in rows]),
        row_N=np.repeat([row.index for row in rows], sizes),
        node_N=np.concatenate([row.node_N for row in rows]),
        pair_N=np.repeat([-1 if row.example.pair is None else row.example.pair for row in rows], sizes),
        chosen_N=np.repeat([row.example.chosen for row in rows], sizes),
        tokens_before_sharing=sum(len(row.ids_L) for row in rows),
        names={row.index: row.example.trajectory.id for row in rows},
    )


def unfit(*examples: Example, limit: int) -> str | None:
    """Why nothing of a row, or of the two of a pair, could be trained in `limit` tokens; None where it can."""
    report = DropReport()
    rows = [_row(index, example) for index, example in enumerate(examples)]
    cut = [reason for row in rows if (reason := _shorten(row, limit, report))]
    if cut:
        return cut[0]
    return None if _units(rows, report, limit) else next(iter(report.dropped))


def pack(examples: Sequence[Example], max_tokens: int, max_row: int | None = None) -> tuple[list[Pack], DropReport]:
    """Put rows into packs of at most `max_tokens` tokens after sharing; one row holds at most `max_row`.

    A longer row loses whole nodes from its end. Raises DataError when nothing is left to train.
    """
    report = DropReport(rows=len(examples))
    limit = min(max_row or max_tokens, max_tokens)
    rows = []
    for index, example in enumerate(examples):
        row = _row(index, example)
        reason = _shorten(row, limit, report)
        if reason:
            report.dropped[reason] += 1
        else:
            rows.append(row)
    packs = [_pack(filled) for filled in _fill(_units(rows, report, max_tokens), max_tokens)]
    if not packs:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.dropped.items())
        raise DataError(
            f"0 trainable tokens in {len(examples)} rows ({reasons or 'no rows'}): "
            f"a row may hold {limit} tokens; raise the limit, or check masks and weights"
        )
    report.kept = sum(len(each.names) for each in packs)
    report.tokens_before_sharing = sum(each.tokens_before_sharing for each in packs)
    report.tokens = sum(len(each.tokens_T) for each in packs)
    report.trained_tokens = sum(len(each.target_N) for each in packs)
    return packs, report
