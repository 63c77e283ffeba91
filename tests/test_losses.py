"""Losses: golden numbers, and what they must not depend on."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from treadle import losses
from treadle.errors import DataError, UserError
from treadle.losses import Loss, PackTensors


def tensors(target: list[int], weight: list[float], row: list[int], **extra: Tensor) -> PackTensors:
    n = len(target)
    base = {
        "pair_N": torch.full((n,), -1),
        "chosen_N": torch.ones(n, dtype=torch.bool),
        "behaviour_logp_N": torch.zeros(n),
    }
    return PackTensors(
        target_N=torch.tensor(target), weight_N=torch.tensor(weight), row_N=torch.tensor(row), **(base | extra)
    )


def for_ratio(ratio: list[float], advantage: list[float], row: list[int] | None = None) -> tuple[Tensor, PackTensors]:
    """Logits and a pack whose ratios to the old policy are as given; the behaviour policy equals the old one."""
    logits = torch.randn(len(ratio), 5, generator=torch.Generator().manual_seed(1))
    logp = losses.token_log_probs(logits, torch.zeros(len(ratio), dtype=torch.long))
    old = logp - torch.tensor(ratio).log()
    rows = row or [0] * len(ratio)
    return logits, tensors([0] * len(ratio), advantage, rows, behaviour_logp_N=old, old_logp_N=old)


def test_temperature_scales_logits() -> None:
    """F45."""
    got = losses.token_log_probs(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), 0.5)
    assert float(got) == pytest.approx(-0.0181, abs=1e-4)
    greedy = losses.token_log_probs(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), 0.0)
    assert float(greedy) == pytest.approx(-math.log(1 + math.exp(-2)))


def test_log_softmax_is_exact_for_wide_bfloat16_logits() -> None:
    """F50."""
    logits = (torch.randn(8, 50_000, generator=torch.Generator().manual_seed(0)) * 5).bfloat16()
    target = torch.arange(8)
    exact = logits.double().log_softmax(-1)[torch.arange(8), target]
    assert (losses.token_log_probs(logits, target) - exact).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 1.0, -1.0),
        (1.5, 1.0, -1.28),  # clipped above
        (0.5, 1.0, -0.5),  # the pessimistic side
        (0.5, -1.0, 0.8),  # clipped below
        (2.0, -1.0, 2.0),
        (9.0, -1.0, 3.0),  # bounded for negative advantages
    ],
)
def test_asymmetric_clip(ratio: float, advantage: float, expected: float) -> None:
    logits, pack = for_ratio([ratio], [advantage])
    loss, _ = losses.policy_loss()(logits, pack)
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("aggregation", "divisor", "expected"),
    [("sequence_mean", 2, 0.0), ("token_mean", 10, -0.6), ("constant", 16, -0.375)],
)
def test_aggregation_is_named(aggregation: str, divisor: float, expected: float) -> None:
    """F44: token losses +1 x 2 and -1 x 8; the constant is 2 rows x 8."""
    loss = torch.tensor([1.0] * 2 + [-1.0] * 8)
    row = torch.tensor([4] * 2 + [9] * 8)
    assert float(losses.aggregate(loss, row, aggregation)) / divisor == pytest.approx(expected)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UserError, match="token_mean"):
        losses.aggregate(torch.ones(1), torch.zeros(1), "mean")
    with pytest.raises(UserError, match="decoupled"):
        losses.policy_loss(correction="decupled")
    with pytest.raises(UserError, match="gspo"):
        losses.policy_loss(kind="gsppo")
    with pytest.raises(UserError, match="zero expected gradient"):
        losses.policy_loss(kl_weight=0.1, kl_estimator="k1")


def test_gspo_ratio_is_free_of_length() -> None:
    """F49: a gap of .01 over 200 tokens gives 1.01, not e^2 = 7.39; the gradient flows through the mean."""
    change = torch.full((200,), 0.01, requires_grad=True)
    ratio = losses.row_mean(change, torch.zeros(200)).exp()
    assert ratio.tolist() == pytest.approx([1.01005] * 200, rel=1e-4)
    (gradient,) = torch.autograd.grad(ratio.mean(), change)
    assert gradient.tolist() == pytest.approx([1.01005 / 200] * 200, rel=1e-3)
    logits, pack = for_ratio([1.5, 0.5, 1.0], [1.0, 1.0, 1.0], [0, 0, 1])
    loss, _ = losses.policy_loss(kind="gspo", aggregation="sequence_mean")(logits, pack)
    assert float(loss) == pytest.approx(-math.sqrt(0.75) - 1.0, rel=1e-4)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    logits, pack = for_ratio([3.0], [2.0])
    logits.requires_grad_()
    loss, _ = losses.policy_loss(kind="cispo")(logits, pack)
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = -1.28 * 2.0 * (torch.eye(5)[0] - logits.detach().softmax(-1)[0])
    torch.testing.assert_close(gradient[0], expected)


def test_decoupled_correction_caps_tokens_and_rejects_rows() -> None:
    logits, pack = for_ratio([1.0] * 4, [1.0] * 4, [0, 0, 1, 1])
    assert pack.old_logp_N is not None
    rho = torch.tensor([4.0, 0.25, 4.0, 4.0])  # row 0 has geometric mean 1, row 1 has 4
    pack = dataclasses.replace(pack, behaviour_logp_N=pack.old_logp_N - rho.log())
    loss, metrics = losses.policy_loss(tis=2.0, row_bounds=(0.5, 2.0))(logits, pack)
    assert float(loss) == pytest.approx(-2.0 - 0.25, rel=1e-5)
    assert metrics["rejected"] == (2.0, 4.0)


def test_bypass_has_no_second_factor() -> None:
    logits, pack = for_ratio([1.0], [1.0])
    old = pack.behaviour_logp_N
    pack = dataclasses.replace(pack, behaviour_logp_N=old - math.log(1.2))
    assert float(losses.policy_loss(correction="bypass")(logits, pack)[0]) == pytest.approx(-1.2, rel=1e-5)
    assert float(losses.policy_loss(correction="decoupled")(logits, pack)[0]) == pytest.approx(-1.2, rel=1e-5)
    pack = dataclasses.replace(pack, behaviour_logp_N=old - math.log(1.9))
    assert float(losses.policy_loss(correction="bypass")(logits, pack)[0]) == pytest.approx(-1.28, rel=1e-5)
    assert float(losses.policy_loss(correction="decoupled")(logits, pack)[0]) == pytest.approx(-1.9, rel=1e-5)


def test_one_update_a_batch_has_ratio_one() -> None:
    """Without stored old log-probs the old policy is the current one, and the gradient is the policy gradient."""
    logits, pack = for_ratio([1.7], [2.0])
    pack = dataclasses.replace(pack, old_logp_N=None, behaviour_logp_N=losses.token_log_probs(logits, pack.target_N))
    logits.requires_grad_()
    loss, metrics = losses.policy_loss()(logits, pack)
    assert metrics["ratio"] == (1.0, 1.0)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient[0], -2.0 * (torch.eye(5)[0] - logits.detach().softmax(-1)[0]))


def test_missing_behaviour_log_probs_are_an_error_not_ratio_one() -> None:
    """F5, F90."""
    logits, pack = for_ratio([1.0, 1.0], [1.0, 1.0])
    pack = dataclasses.replace(pack, behaviour_logp_N=torch.tensor([0.0, math.nan]))
    with pytest.raises(DataError, match="1 of 2 trained tokens have no behaviour log-prob"):
        losses.policy_loss()(logits, pack)


@pytest.mark.parametrize("kind", ["clip", "gspo", "cispo"])
@pytest.mark.parametrize("gap", [100.0, -100.0, math.inf])
def test_extreme_log_ratios_stay_finite(kind: str, gap: float) -> None:
    logits, pack = for_ratio([1.0, 1.0], [1.0, -1.0], [0, 1])
    assert pack.old_logp_N is not None
    pack = dataclasses.replace(pack, old_logp_N=pack.old_logp_N - gap)
    logits.requires_grad_()
    loss, _ = losses.policy_loss(kind=kind, kl_weight=0.1)(
        logits, dataclasses.replace(pack, reference_logp_N=pack.behaviour_logp_N - gap)
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    assert math.isfinite(float(loss.detach())) and bool(gradient.isfinite().all())


def exact_gradient(estimator: str) -> list[float]:
    """Expected gradient of the estimator as a loss, at pi = (.5, .5) against (.8, .2), summed over both samples."""
    logits = torch.zeros(2, requires_grad=True)
    reference = torch.tensor([0.8, 0.2]).log()
    values = losses.kl_estimate(logits.log_softmax(-1), reference, estimator)
    (gradient,) = torch.autograd.grad((torch.tensor([0.5, 0.5]) * values).sum(), logits)
    return gradient.tolist()


def test_kl_estimators_as_losses() -> None:
    """F47."""
    logits = torch.zeros(2, requires_grad=True)
    logp, reference = logits.log_softmax(-1), torch.tensor([0.8, 0.2]).log()
    (true,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits)
    assert true.tolist() == pytest.approx([-0.3466, 0.3466], abs=1e-4)
    assert exact_gradient("k1") == pytest.approx([0, 0], abs=1e-7)
    assert exact_gradient("k2") == pytest.approx(true.tolist(), abs=1e-6)
    assert exact_gradient("k3") == pytest.approx([-0.3, 0.3], abs=1e-6)
    assert math.isfinite(float(losses.kl_estimate(torch.tensor([0.0]), torch.tensor([-100.0]), "k3")))
    assert math.isfinite(float(losses.kl_estimate(torch.tensor([-100.0]), torch.tensor([0.0]), "k3")))


def test_cross_entropy_weighs_tokens() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    loss, metrics = losses.cross_entropy()(logits, tensors([0, 0], [1.0, 0.5], [0, 0]))
    expected = math.log(1 + math.exp(-2)) + 0.5 * math.log(1 + math.exp(3))
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert metrics["accuracy"] == (1.0, 2.0)


def dpo_pack(reference: Tensor) -> PackTensors:
    return tensors(
        [0, 1, 1],
        [1.0] * 3,
        [0, 0, 1],
        pair_N=torch.tensor([7, 7, 7]),
        chosen_N=torch.tensor([True, True, False]),
        reference_logp_N=reference,
    )


def test_dpo_by_hand() -> None:
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    logp = losses.token_log_probs(logits, torch.tensor([0, 1, 1]))
    loss, metrics = losses.dpo(beta=0.5)(logits, dpo_pack(torch.tensor([-1.0, -1.0, -0.1])))
    margin = 0.5 * (float(logp[0] + logp[1]) + 2.0 - (float(logp[2]) + 0.1))
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-margin)), rel=1e-5)
    assert metrics["pair_accuracy"] == (1.0, 1.0)
    at_start, _ = losses.dpo()(logits, dpo_pack(logp))
    assert float(at_start) == pytest.approx(math.log(2))


def test_dpo_refuses_what_it_cannot_use() -> None:
    pack = dpo_pack(torch.zeros(3))
    with pytest.raises(DataError, match="outside any pair"):
        losses.dpo()(torch.zeros(3, 2), dataclasses.replace(pack, pair_N=torch.tensor([7, 7, -1])))
    with pytest.raises(DataError, match="reference_logp_N"):
        losses.dpo()(torch.zeros(3, 2), dataclasses.replace(pack, reference_logp_N=None))


def kl(loss: Loss, student: Tensor, teacher: Tensor) -> float:
    n = len(student)
    return float(loss(student, tensors([0] * n, [1.0] * n, [0] * n, teacher_logits_NV=teacher))[0])


def test_teacher_kl_both_ways_at_one_temperature() -> None:
    student, teacher = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([[0.0, 2.0, 0.0]])
    p, q = (student / 2).softmax(-1), (teacher / 2).softmax(-1)
    assert kl(losses.reverse_kl(2.0), student, teacher) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
    assert kl(losses.forward_kl(2.0), student, teacher) == pytest.approx(float((q * (q / p).log()).sum()), rel=1e-5)


def test_padded_logit_width() -> None:
    """F85: widths 8 and 10, the first 8 equal: KL 0 after the cut, and a clear message without proof."""
    student = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    teacher = torch.cat([student, torch.full((3, 2), 5.0)], -1)
    for loss in (losses.reverse_kl(vocabulary=8), losses.forward_kl(vocabulary=8)):
        assert kl(loss, student, teacher) == pytest.approx(0.0, abs=1e-6)
    _, cut = losses.shared_width(student, teacher, 8)
    torch.testing.assert_close(cut.softmax(-1).sum(-1), torch.ones(3))
    for vocabulary in (None, 9):
        with pytest.raises(DataError, match="8 logits and the teacher 10"):
            kl(losses.reverse_kl(vocabulary=vocabulary), student, teacher)


def test_vocabularies_must_be_the_same() -> None:
    """F84."""
    assert losses.same_vocabulary({"a": 0, "b": 1}, {"b": 1, "a": 0}) == 2
    with pytest.raises(DataError, match="token 0 is 'a' to the student and 'b' to the teacher"):
        losses.same_vocabulary({"a": 0, "b": 1}, {"a": 1, "b": 0})
    with pytest.raises(DataError, match="token 2"):
        losses.same_vocabulary({"a": 0, "b": 1}, {"a": 0, "b": 1, "c": 2})
