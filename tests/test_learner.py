"""The learner on a tiny random model: packing changes nothing, splitting changes nothing, resuming changes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from test_batch import Part, example, pair, trajectory
from treadle.batch import Example, Pack, branches, divisor, pack
from treadle.errors import DataError, TreadleError, UserError
from treadle.learner import Learner
from treadle.losses import cross_entropy, dpo, forward_kl, policy_loss, reverse_kl
from treadle.training import fit

PROMPT: Part = ("user", list(range(5, 25)))
ROWS: list[list[Part]] = [
    [PROMPT, ("assistant", [30, 31, 2]), ("tool", [7, 8, 9]), ("assistant", [33, 2])],
    [PROMPT, ("assistant", [30, 31, 2]), ("tool", [7, 8, 10]), ("assistant", [34, 35, 2])],
    [PROMPT, ("assistant", [40, 2])],
    [("user", [11, 12]), ("assistant", [13, 14, 15, 2])],
]
EXAMPLES = [example(parts, weight=weight) for parts, weight in zip(ROWS, (1.0, -0.5, 0.25, 2.0), strict=True)]


def tiny(seed: int = 0, *, layers: int = 2, exact: bool = True) -> Learner:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    return Learner(model, dtype="float32" if exact else "bfloat16")


def by_row(packs: list[Pack], values: list[NDArray[np.float32]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for each, value in zip(packs, values, strict=True):
        for row, x in zip(each.row_N, value, strict=True):
            found.setdefault(int(row), []).append(float(x))
    return found


def separate(examples: list[Example]) -> list[Pack]:
    """Each row in a pack of its own, under its own number."""
    packs = []
    for i, each in enumerate(examples):
        (alone,), _ = pack([each], 1000)
        alone.row_N[:] = i
        packs.append(alone)
    return packs


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None}
    learner.optimizer.zero_grad()
    return found


def plain_log_probs(learner: Learner, each: Example) -> list[float]:
    """The model's own forward on one unpadded row, without mask or positions given."""
    ids = torch.tensor([each.trajectory.tokens()])
    with torch.no_grad():
        logp = learner.model(ids).logits[0].log_softmax(-1)
    mask = [m for node in each.trajectory.path() for m in node.mask]
    return [float(logp[t - 1, ids[0, t]]) for t in range(1, len(mask)) if mask[t]]


def test_packed_rows_equal_separate_rows() -> None:
    """F51, F74: a tree of shared prefixes beside another row gives every row's own log-probs."""
    learner = tiny()
    packs, report = pack(EXAMPLES, 1000)
    assert len(packs) == 1 and report.tokens < report.tokens_before_sharing
    packed = by_row(packs, learner.log_probs(packs))
    for i, each in enumerate(EXAMPLES):
        np.testing.assert_allclose(packed[i], plain_log_probs(learner, each), atol=1e-5)


def test_a_row_does_not_see_its_neighbours() -> None:
    """F74: change sample 1; sample 2 stays."""
    learner = tiny()
    other = example([("user", [50, 51, 52]), ("assistant", [53])])
    first, _ = pack([EXAMPLES[0], EXAMPLES[3]], 1000)
    second, _ = pack([other, EXAMPLES[3]], 1000)
    before = by_row(first, learner.log_probs(first))[1]
    after = by_row(second, learner.log_probs(second))[1]
    np.testing.assert_allclose(before, after, atol=1e-5)  # other shapes, other last bits


def test_tool_tokens_are_seen_and_not_learned() -> None:
    """F1, F6: another tool id changes later log-probs; its own position has no target and no gradient."""
    learner = tiny()
    changed = [list(parts) for parts in ROWS[:1]]
    changed[0][2] = ("tool", [7, 20, 9])
    first, second = pack([EXAMPLES[0]], 1000)[0], pack([example(changed[0])], 1000)[0]
    a, b = learner.log_probs(first)[0], learner.log_probs(second)[0]
    np.testing.assert_array_equal(a[:3], b[:3])
    assert (a[3:] != b[3:]).all()
    learner.forward_backward(first, cross_entropy(), 1.0)
    gradient = gradients(learner)["model.embed_tokens.weight"]
    assert 8 not in first[0].target_N and first[0].source_N.tolist() == [19, 20, 21, 25, 26]
    assert gradient[8].abs().sum() > 0  # it is read


@pytest.mark.parametrize("kind", ["cross_entropy", "clip", "gspo", "cispo"])
def test_tree_gradient_is_the_sum_of_the_rows(kind: str) -> None:
    """F43: any split into packs gives the same gradient, for each loss and aggregation."""
    learner = tiny()
    how = "sequence_mean" if kind == "gspo" else "token_mean"
    loss = (
        cross_entropy()
        if kind == "cross_entropy"
        else policy_loss(kind=kind, aggregation=how, tis=1.5, row_bounds=(0, 99))
    )
    found = []
    for packs in (pack(EXAMPLES, 1000)[0], pack(EXAMPLES, 34)[0], separate(EXAMPLES)):
        metrics = learner.forward_backward(packs, loss, divisor(packs, how))
        found.append((len(packs), metrics, gradients(learner)))
    assert [count for count, _, _ in found] == [1, 2, 4]
    assert max(float(value.abs().max()) for value in found[0][2].values()) > 1e-3
    for _, metrics, gradient in found[1:]:
        assert metrics["loss"] == pytest.approx(found[0][1]["loss"], abs=1e-5)
        for name, value in gradient.items():
            torch.testing.assert_close(value, found[0][2][name], atol=1e-5, rtol=1e-4)


def test_mean_over_all_micro_batches() -> None:
    """F43: losses [4] and [1, 1, 1] give 1.75 however they are split."""
    learner = tiny()
    rows = [example([("user", [5]), ("assistant", [6])], weight=4), example([("user", [9]), ("assistant", [7, 8, 9])])]
    packs = separate(rows)

    def weights_alone(logits: torch.Tensor, tensors: object) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
        weight = packs[0].weight_N if len(logits) == 1 else packs[1].weight_N
        return torch.from_numpy(weight).sum() + 0.0 * logits.sum(), {"weight": (float(weight.sum()), len(weight))}

    metrics = learner.forward_backward(packs, weights_alone, divisor(packs))
    assert (metrics["loss"], metrics["weight"]) == (1.75, 1.75)


@pytest.mark.parametrize("exact", [True, False])
def test_ratio_is_exactly_one_before_the_first_update(exact: bool) -> None:
    """F45: at a temperature other than 1, with stored old log-probs, in float32 and under autocast."""
    learner = tiny(exact=exact)
    packs, _ = pack(EXAMPLES, 34)
    for each, old in zip(packs, learner.log_probs(packs, 0.7), strict=True):
        each.old_logp_N = each.behaviour_logp_N = old
    loss = policy_loss(temperature=0.7)
    first = learner.forward_backward(packs, loss, divisor(packs))
    assert (first["ratio"], first["behaviour_k3"], first["rejected"]) == (1.0, 0.0, 0.0)
    learner.step(1e-2)
    then = learner.forward_backward(packs, loss, divisor(packs))
    assert then["ratio"] != 1.0 and then["behaviour_k3"] == 0.0  # the gap is the sampler's, not the update's


def test_learns_a_row_by_heart() -> None:
    """F2, F4: after overfitting, every trained token, the first and the end token too, is near certain."""
    learner = tiny()
    packs, _ = pack(EXAMPLES[3:], 1000)
    for _ in range(60):
        learner.forward_backward(packs, cross_entropy(), divisor(packs))
        learner.step(3e-3)
    assert learner.log_probs(packs)[0].min() > -0.1
    assert learner.updates == 60


def test_a_row_of_which_nothing_fits_is_left_out_and_counted() -> None:
    """A whole batch of such rows must not end a run that is under way."""
    long = example([("user", list(range(5, 25))), ("assistant", [30] * 40)])
    seen: list[dict[str, float]] = []
    done: list[int] = []
    options: dict[str, Any] = {"rows": 1, "epochs": 2, "learning_rate": 1e-3, "pack_tokens": 40, "seed": 0}
    fit(tiny(), [*EXAMPLES, long], cross_entropy(), advance=done.append, log=seen.append, **options)
    assert seen[0] == {"left out: too long": 1.0}
    assert len(seen) == 1 + 2 * len(EXAMPLES) and sum(done) == 2 * (len(EXAMPLES) + 1)
    with pytest.raises(DataError, match=r"1 too long.*pack_tokens is 40"):
        fit(tiny(), [long], cross_entropy(), advance=done.append, log=seen.append, **options)


def test_preferences_are_learned() -> None:
    learner = tiny()
    packs, _ = pack(pair(ROWS[0], ROWS[1]), 1000)
    for each, reference in zip(packs, learner.log_probs(packs), strict=True):
        each.reference_logp_N = reference
    start = learner.forward_backward(packs, dpo(), divisor(packs, "pairs"))
    assert start["loss"] == pytest.approx(math.log(2), abs=1e-5)
    for _ in range(10):
        learner.step(1e-3)
        metrics = learner.forward_backward(packs, dpo(), divisor(packs, "pairs"))
    assert metrics["loss"] < 0.4 and metrics["pair_accuracy"] == 1.0


@pytest.mark.parametrize("loss", [forward_kl(), reverse_kl()])
def test_distillation_approaches_the_teacher(loss: object) -> None:
    teacher, student = tiny(0), tiny(1)
    packs, _ = pack([example(parts) for parts in ROWS], 1000)
    same = teacher.forward_backward(packs, loss, divisor(packs), teacher=teacher)  # type: ignore[arg-type]
    assert same["loss"] == pytest.approx(0.0, abs=1e-5)
    gradients(teacher)
    losses = []
    for _ in range(15):
        metrics = student.forward_backward(packs, loss, divisor(packs), teacher=teacher)  # type: ignore[arg-type]
        losses.append(metrics["loss"])
        student.step(3e-3)
    assert losses[-1] < 0.5 * losses[0]
    assert not gradients(teacher)


def updates(learner: Learner, count: int) -> None:
    for _ in range(count):
        number = learner.updates
        packs, _ = pack([EXAMPLES[number % 4], EXAMPLES[(number + 1) % 4]], 1000)
        learner.forward_backward(packs, cross_entropy(), divisor(packs))
        learner.step(1e-3 / (1 + number))


def test_resume_equals_a_straight_run(tmp_path: Path) -> None:
    """F65: six updates against three, saved, loaded elsewhere, and three more; bit for bit."""
    straight = tiny()
    updates(straight, 6)
    first = tiny()
    updates(first, 3)
    noise = torch.get_rng_state()
    first.save(tmp_path / "at-3")
    second = Learner(tmp_path / "at-3", dtype="float32")
    torch.rand(3)
    second.load(tmp_path / "at-3")
    assert second.updates == 3 and torch.equal(torch.get_rng_state(), noise)
    updates(second, 3)
    assert second.updates == 6
    for name, value in straight.state().items():
        assert torch.equal(value, second.state()[name]), name


def test_save_replaces_whole_folders_and_keeps_the_tokenizer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    learner = tiny()
    learner.save(source, resumable=False)
    (source / "tokenizer.json").write_text("{}")
    learner = Learner(source, dtype="float32")
    updates(learner, 1)
    for _ in range(2):
        saved = learner.save(tmp_path / "out")
    assert (saved / "tokenizer.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    saved.rename(tmp_path / "out.old")  # killed between the two renames
    again = Learner(source, dtype="float32")
    again.load(tmp_path / "out")
    assert all(torch.equal(value, again.state()[name]) for name, value in learner.state().items())
    with pytest.raises(UserError, match="resumable"):
        again.load(source)
    with pytest.raises(UserError, match="no model folder at"):
        Learner(tmp_path / "nowhere")


def test_only_the_upper_layers_are_trained() -> None:
    """What lies below keeps its bits; what is trained gets the gradient that it gets when all is."""
    whole, upper = tiny(layers=3), tiny(layers=3)
    upper = Learner(upper.model, dtype="float32", trained_layers=1)
    packs, _ = pack(EXAMPLES, 1000)
    for learner in (whole, upper):
        learner.forward_backward(packs, cross_entropy(), divisor(packs, "token_mean"))
    expected = {name: g for name, g in gradients(whole).items() if "layers.2" in name or name == "model.norm.weight"}
    torch.testing.assert_close(gradients(upper), expected)
    before = {name: tensor.clone() for name, tensor in upper.state().items()}
    updates(upper, 2)
    changed = {name for name, tensor in upper.state().items() if not torch.equal(tensor, before[name])}
    assert changed == expected.keys()
    for count in (0, 4):  # a smaller model than the setting was made for is trained whole
        everything = Learner(upper.model, trained_layers=count).optimizer.param_groups[0]["params"]
        assert len(everything) == len(list(upper.model.parameters()))


def test_a_bad_gradient_makes_no_update() -> None:
    learner = tiny()
    before = {name: value.clone() for name, value in learner.state().items()}
    packs, _ = pack(EXAMPLES, 1000)
    with pytest.raises(TreadleError, match="update 1: there is no gradient"):
        learner.step(1e-3)
    packs[0].weight_N[0] = np.inf
    learner.forward_backward(packs, cross_entropy(), 1.0)
    with pytest.raises(TreadleError, match=r"update 1: the gradient norm is (nan|inf)"):
        learner.step(1e-3)
    assert learner.updates == 0 and all(torch.equal(v, before[n]) for n, v in learner.state().items())
    updates(learner, 1)  # the bad gradient is gone
    assert learner.updates == 1


def test_progress_and_work_are_reported() -> None:
    learner, seen = tiny(), []
    packs, report = pack(EXAMPLES, 34)
    metrics = learner.forward_backward(
        packs, cross_entropy(), divisor(packs), progress=lambda done, of: seen.append((done, of))
    )
    assert seen == [(1, 2), (2, 2)]
    assert metrics["tokens"] == report.tokens_before_sharing and metrics["tokens_computed"] == report.tokens
    assert metrics["tokens_trained"] == report.trained_tokens and metrics["peak_memory_mib"] > 0


def test_branches_of_one_tree() -> None:
    """Two branches in one pack: each sees its own past, and the shared reply is trained once."""
    learner = tiny()
    tree = trajectory(
        [("user", [5, 6]), ("assistant", [7]), ("tool", [8]), ("assistant", [9]), ("tool", [10]), ("assistant", [11])],
        parents=[-1, 0, 1, 2, 1, 4],
    )
    packs, _ = pack(branches(tree, {1: 1.0, 3: 1.0, 5: 1.0}), 1000)
    got = dict(zip(packs[0].target_N.tolist(), learner.log_probs(packs)[0].tolist(), strict=True))
    for ids, path in ((9, [5, 6, 7, 8]), (11, [5, 6, 7, 10]), (7, [5, 6])):
        with torch.no_grad():
            expected = learner.model(torch.tensor([path])).logits[0, -1].log_softmax(-1)[ids]
        assert got[ids] == pytest.approx(float(expected), abs=1e-5)
    assert len(got) == 3
