"""Rows and packs: what is trained, what is shared, what is dropped."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.batch import Example, Pack, branches, divisor, pack, unfit
from treadle.errors import DataError, UserError
from treadle.types import Message, Node, Source, Trajectory

Part = tuple[str, list[int]]


def trajectory(
    parts: list[Part], name: str = "t", group: str | None = None, parents: list[int] | None = None
) -> Trajectory:
    """Nodes of role and ids; assistant ids are sampled, with log-prob -id/100 and version 3."""
    nodes = []
    for i, (role, ids) in enumerate(parts):
        own = role == "assistant"
        parent = (parents[i] if parents else i - 1) if i else None
        nodes.append(
            Node(
                id=i,
                parent=parent,
                message=Message(role=role),
                tokens=ids,
                mask=[int(own)] * len(ids),
                log_probs=[-token / 100 if own else None for token in ids],
                versions=[3 if own else None for _ in ids],
            )
        )
    return Trajectory(
        id=name,
        task_id="a",
        environment="e",
        contract=None,
        source=Source.ROLLOUT,
        policy="p",
        nodes=nodes,
        group=group,
    )


def example(parts: list[Part], weight: float = 1.0, **extra: object) -> Example:
    found = trajectory(parts)
    weights = {node.id: weight for node in found.nodes if node.message.role == "assistant"}
    return Example(found, weights, **extra)  # type: ignore[arg-type]


def one(examples: list[Example], max_tokens: int = 1000) -> Pack:
    packs, _ = pack(examples, max_tokens)
    assert len(packs) == 1
    return packs[0]


def path_of(found: Pack, entry: int) -> list[int]:
    """Ids the model sees when it predicts N-entry `entry`, read off the attention mask in order of position."""
    seen = np.flatnonzero(found.ancestors()[found.source_N[entry]])
    assert found.positions_T[seen].tolist() == list(range(len(seen)))
    return [int(token) for token in found.tokens_T[seen]]


def test_exactly_the_sampled_ids_are_trained() -> None:
    """F1, F2, F4: user, assistant(3), tool(5), assistant(2): five targets, each with its whole past."""
    row = [("user", [1, 2]), ("assistant", [3, 4, 0]), ("tool", [5, 6, 7, 8, 9]), ("assistant", [3, 0])]
    found = one([example(row)])
    assert found.target_N.tolist() == [3, 4, 0, 3, 0]  # 0 would be pad and end id at once: it is trained
    assert path_of(found, 0) == [1, 2]
    assert path_of(found, 3) == [1, 2, 3, 4, 0, 5, 6, 7, 8, 9]
    assert found.node_N.tolist() == [1, 1, 1, 3, 3]
    assert found.behaviour_logp_N[1] == pytest.approx(-0.04) and found.version_N.tolist() == [3] * 5


def test_an_appended_end_token_is_context_whatever_its_log_prob() -> None:
    """F5, F48: mask 0 inside an assistant node, with nonsense stored beside it."""
    parts: list[Part] = [("user", [1]), ("assistant", [2, 3]), ("tool", [4]), ("assistant", [5])]
    clean, dirty = trajectory(parts), trajectory(parts)
    for found, value in ((clean, None), (dirty, 123.0)):
        found.nodes[1].mask[1] = 0
        found.nodes[1].log_probs[1] = value
        found.nodes[2].log_probs[0] = math.nan if value else None
    first, second = (one([Example(t, {1: 1.0, 3: 1.0})]) for t in (clean, dirty))
    assert first.target_N.tolist() == [2, 5]
    np.testing.assert_array_equal(first.behaviour_logp_N, second.behaviour_logp_N)


def test_nodes_without_weight_are_context() -> None:
    """A failed first try stays in the context, untrained."""
    row = trajectory([("user", [1]), ("assistant", [2]), ("tool", [3]), ("assistant", [4])])
    found = one([Example(row, {3: 0.5})])
    assert (found.target_N.tolist(), found.weight_N.tolist()) == ([4], [0.5])
    assert path_of(found, 0) == [1, 2, 3]


def test_shared_beginnings_are_stored_once() -> None:
    prompt: Part = ("user", list(range(10, 30)))
    rows = [example([prompt, ("assistant", [k, 5])], weight=k) for k in (1, 2, 3)]
    packs, report = pack(rows, 1000)
    assert (report.tokens_before_sharing, report.tokens, report.trained_tokens) == (66, 26, 6)
    found = packs[0]
    assert found.source_N[[0, 2, 4]].tolist() == [19, 19, 19]  # three entries at one place
    assert found.row_N.tolist() == [0, 0, 1, 1, 2, 2] and found.weight_N.tolist() == [1, 1, 2, 2, 3, 3]
    assert [path_of(found, i)[-1] for i in (1, 3, 5)] == [1, 2, 3]


def test_rows_with_one_sampled_prefix_keep_their_own_entries() -> None:
    rows = [example([("user", [1]), ("assistant", [2, 3, k])], weight=k) for k in (8, 9)]
    found = one(rows)
    assert found.target_N.tolist() == [2, 3, 8, 2, 3, 9] and len(found.tokens_T) == 5
    assert found.weight_N.tolist() == [8, 8, 8, 9, 9, 9]


def test_a_node_on_several_paths_is_trained_once() -> None:
    tree = trajectory(
        [("user", [1]), ("assistant", [2]), ("tool", [3]), ("assistant", [4]), ("tool", [5]), ("assistant", [6])],
        parents=[-1, 0, 1, 2, 1, 4],
    )
    rows = branches(tree, {1: 1.0, 3: 1.0, 5: 1.0})
    found = one(rows)
    assert sorted(found.target_N.tolist()) == [2, 4, 6] and len(found.tokens_T) == 6
    assert path_of(found, found.target_N.tolist().index(6)) == [1, 2, 5]


ROWS = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=12)


@given(ROWS, st.integers(9, 40))
def test_any_rows_see_exactly_their_own_past(ids: list[list[int]], max_tokens: int) -> None:
    """F74: whatever is shared or put side by side, each target's visible past is its own row's."""
    packs, report = pack([example([("user", row[:1]), ("assistant", row[1:])]) for row in ids], max_tokens)
    seen = []
    for found in packs:
        assert len(found.tokens_T) <= max_tokens
        for entry, row in enumerate(found.row_N):
            seen.append((int(row), [*path_of(found, entry), int(found.target_N[entry])]))
    assert sorted(seen) == [(i, row[:k]) for i, row in enumerate(ids) for k in range(2, len(row) + 1)]
    assert report.kept == len(ids) and report.tokens == sum(len(found.tokens_T) for found in packs)


def test_groups_stay_together() -> None:
    rows = []
    for member in range(3):
        for group in ("x", "y"):
            prompt: Part = ("user", [ord(group)] * 10)
            found = trajectory([prompt, ("assistant", [member, member])], group=group)
            rows.append(Example(found, {1: 1.0}))
    packs, report = pack(rows, max_tokens=16)
    assert [sorted(found.names) for found in packs] == [[0, 2, 4], [1, 3, 5]]
    assert report.tokens == 32


def test_two_limits_and_nothing_cut_below_them() -> None:
    """F7, F9: turns of 6, an observation of 6, a turn of 6: 18 long, 12 trained."""
    row = [("user", [1]), ("assistant", [2] * 6), ("tool", [3] * 6), ("assistant", [4] * 6)]
    found, report = pack([example(row)], max_tokens=100, max_row=19)
    assert (len(found[0].tokens_T), len(found[0].target_N), report.cut_rows) == (19, 12, 0)


def test_long_rows_lose_whole_nodes_from_the_end_with_a_count() -> None:
    row = [("user", [1]), ("assistant", [2] * 6), ("tool", [3] * 6), ("assistant", [4] * 6)]
    packs, report = pack([example(row), example([("user", [9] * 30), ("assistant", [1])])], max_tokens=18)
    assert packs[0].target_N.tolist() == [2] * 6 and len(packs[0].tokens_T) == 7
    assert (report.cut_rows, report.cut_trained_tokens) == (1, 6)
    assert (report.rows, report.kept, dict(report.dropped)) == (2, 1, {"too long": 1})


def test_nothing_to_learn_is_an_error() -> None:
    """F11, F75."""
    with pytest.raises(DataError, match=r"0 trainable tokens in 8 rows \(8 too long\)"):
        pack([example([("user", [1] * 50), ("assistant", [2])])] * 8, max_tokens=20)
    with pytest.raises(DataError, match="2 nothing trained"):
        pack([example([("user", [1, 2])])] * 2, max_tokens=20)
    with pytest.raises(DataError, match="0 trainable tokens in 0 rows"):
        pack([], max_tokens=20)


def pair(chosen: list[Part], rejected: list[Part], number: int = 0) -> list[Example]:
    return [example(chosen, pair=number, chosen=True), example(rejected, pair=number, chosen=False)]


def test_pairs_train_only_after_their_shared_prefix() -> None:
    start: list[Part] = [("user", [1]), ("assistant", [2]), ("tool", [3])]
    found = one(pair([*start, ("assistant", [4, 5])], [*start, ("assistant", [4, 6, 7])]))
    assert found.target_N.tolist() == [5, 6, 7]
    assert found.chosen_N.tolist() == [True, False, False] and found.pair_N.tolist() == [0, 0, 0]
    assert divisor([found], "pairs") == 1


def test_pairs_without_contrast_are_dropped_with_a_count() -> None:
    """F83: equal rows, rows equal after truncation, half pairs and pairs that fit no pack."""
    good = pair([("user", [1]), ("assistant", [2])], [("user", [1]), ("assistant", [3])])
    same = pair([("user", [1]), ("assistant", [2])], [("user", [1]), ("assistant", [2])], 1)
    long: list[Part] = [("user", [1]), ("assistant", [2] * 5)]
    cut = pair([*long, ("tool", [1]), ("assistant", [3] * 9)], [*long, ("tool", [1]), ("assistant", [4] * 9)], 2)
    half = pair([("user", [1]), ("assistant", [2])], [("user", [1] * 99), ("assistant", [3])], 3)
    wide = pair([("user", [1]), ("assistant", [2] * 9)], [("user", [5]), ("assistant", [3] * 9)], 4)
    packs, report = pack([*good, *same, *cut, *half, *wide], max_tokens=12)
    assert sorted(packs[0].names) == [0, 1] and len(packs) == 1
    assert dict(report.dropped) == {
        "too long": 1,
        "pair without partner": 1,
        "pair equal after truncation": 4,
        "pair too long": 2,
    }
    assert report.rows == report.kept + sum(report.dropped.values())
    alone = [unfit(*rows, limit=12) for rows in (good, same, wide, good[:1])]
    assert alone == [None, "pair equal after truncation", "pair too long", "pair without partner"]


def test_missing_behaviour_log_probs_are_named() -> None:
    """F5, F90."""
    row = trajectory([("user", [1]), ("assistant", [2, 3])], name="episode-7")
    one([Example(row, {1: 1.0})]).require_behaviour()
    row.nodes[1].log_probs = []
    found = one([Example(row, {1: 1.0})])
    assert np.isnan(found.behaviour_logp_N).all()
    with pytest.raises(DataError, match="trajectory 'episode-7', node 1: 2 trained tokens"):
        found.require_behaviour()


def test_bad_rows_are_named() -> None:
    row = trajectory([("user", [1]), ("assistant", [2, 3])])
    with pytest.raises(DataError, match="node 1: weight nan"):
        pack([Example(row, {1: math.nan})], 10)
    row.nodes[1].mask = [1]
    with pytest.raises(DataError, match=r"node 1: 2 tokens, but \{'mask': 1\}"):
        pack([Example(row, {1: 1.0})], 10)


def test_divisors_are_counted_over_all_packs() -> None:
    rows = [example([("user", [k]), ("assistant", [5] * n)], weight=0.5) for k, n in ((1, 4), (2, 1), (3, 1))]
    packs, _ = pack(rows, max_tokens=5)
    assert len(packs) == 2
    assert (divisor(packs), divisor(packs, "sequence_mean")) == (6, 3)
    assert divisor(packs, "constant", 24) == 24
    with pytest.raises(UserError, match="must be above 0"):
        divisor(packs, "constant")
    with pytest.raises(UserError, match="did you mean 'token_mean'"):
        divisor(packs, "tokn_mean")
