"""Prefix tries over token ids: equal beginnings of many rows are stored once.

L ids of one row · T ids of the whole trie · R runs (stretches without a branch).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def common(first: Ints, second: Ints) -> int:
    """Length of the longest common prefix."""
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    return int(differ[0]) if len(differ) else size


@dataclass
class Run:
    """A stretch of tokens without a branch; children by their first token. Start is set when the pack is laid out."""

    ids: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # empty at the root alone
    children: dict[int, Run] = field(default_factory=dict)
    start: int = -1


def find(root: Run, ids: Ints) -> int:
    """How many of the first ids the trie already holds."""
    at, found = root, 0
    while found < len(ids) and int(ids[found]) in at.children:
        at = at.children[int(ids[found])]
        shared = common(at.ids, ids[found:])
        found += shared
        if shared < len(at.ids):
            break
    return found


def insert(root: Run, ids: Ints) -> None:
    at = root
    while len(ids):
        child = at.children.get(int(ids[0]))
        if child is None:
            at.children[int(ids[0])] = Run(ids)
            return
        shared = common(child.ids, ids)
        if shared < len(child.ids):
            child.children = {int(child.ids[shared]): Run(child.ids[shared:], child.children)}
            child.ids = child.ids[:shared]
        at, ids = child, ids[shared:]


def layout(root: Run) -> tuple[Ints, Ints, Ints]:
    """Tokens, positions and runs, each trie in depth-first order, so that parents come before their children."""
    tokens, positions, runs = [], [], []
    size = 0
    stack = [(child, -1, 0) for child in reversed(root.children.values())]
    while stack:
        run, parent, depth = stack.pop()
        run.start, stop = size, size + len(run.ids)
        tokens.append(run.ids)
        positions.append(np.arange(depth, depth + len(run.ids)))
        runs.append((size, stop, parent))
        stack += [(child, stop - 1, depth + len(run.ids)) for child in reversed(run.children.values())]
        size = stop
    return np.concatenate(tokens), np.concatenate(positions), np.array(runs, dtype=np.int64)


def places(root: Run, ids_L: Ints) -> Ints:
    """The T-index of each token of a row."""
    at, parts, done = root, [], 0
    while done < len(ids_L):
        at = at.children[int(ids_L[done])]
        parts.append(np.arange(at.start, at.start + len(at.ids)))
        done += len(at.ids)
    return np.concatenate(parts)
