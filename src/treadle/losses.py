"""Losses: tensors in, (sum, metrics) out. No divisor is hidden in here.

N trained tokens of one pack · V vocabulary · U = the rows (or pairs) they belong to.

Every loss returns the *sum* of its terms. The caller divides by a number counted over all packs before anything was
rejected (`batch.divisor`), so that splitting a batch changes nothing and a rejection shrinks the gradient.
Metrics are (sum, count) pairs for the same reason. Masked tokens never get here: see `batch`.

The factories close over hyper-parameters: `learner.forward_backward(packs, policy_loss(tis=2.0), divisor)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from treadle.errors import DataError, UserError, unknown

Metrics = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class PackTensors:
    """What a loss may look at beside the logits. Row and pair numbers are any integers; pair is -1 outside pairs."""

    target_N: Tensor
    weight_N: Tensor  # advantage, or weight of the token
    row_N: Tensor
    pair_N: Tensor
    chosen_N: Tensor  # bool
    behaviour_logp_N: Tensor  # as recorded when sampling; NaN where unknown
    old_logp_N: Tensor | None = None  # the trainer's own at the start of the batch
    reference_logp_N: Tensor | None = None
    teacher_logits_NV: Tensor | None = None


Loss = Callable[[Tensor, PackTensors], tuple[Tensor, Metrics]]


# ---------------------------------------------------------------- pieces


def scaled(logits_NV: Tensor, temperature: float) -> Tensor:
    """Logits / temperature in float32; temperature 0 (greedy) leaves them unscaled, as the engine does."""
    return logits_NV.float() / temperature if temperature not in (0.0, 1.0) else logits_NV.float()


def token_log_probs(logits_NV: Tensor, target_N: Tensor, temperature: float = 1.0) -> Tensor:
    """log-softmax(logits / temperature) at the targets, [N] float32."""
    negative_N: Tensor = F.cross_entropy(scaled(logits_NV, temperature), target_N, reduction="none")
    return -negative_N


def log_ratio(numerator_N: Tensor, denominator_N: Tensor) -> Tensor:
    """Difference of two log-probs in float32, clamped to +-20 so that its exponential stays finite."""
    return (numerator_N.float() - denominator_N.float()).clamp(-20.0, 20.0)


def entropy(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of each distribution in nats, [N], without gradient."""
    with torch.no_grad():
        logp_NV = scaled(logits_NV, temperature).log_softmax(-1)
        entropy_N: Tensor = -(logp_NV.exp() * logp_NV).sum(-1)
        return entropy_N


def row_mean(values_N: Tensor, row_N: Tensor) -> Tensor:
    """Mean over each row's tokens, given back to each of them: [N]. The gradient flows through the mean."""
    _, index_N, count_U = torch.unique(row_N, return_inverse=True, return_counts=True)
    sum_U = values_N.new_zeros(len(count_U)).index_add(0, index_N, values_N)
    mean_N: Tensor = (sum_U / count_U)[index_N]
    return mean_N


def aggregate(loss_N: Tensor, row_N: Tensor, aggregation: str) -> Tensor:
    """Sum whose quotient by `batch.divisor(packs, aggregation)` is the named mean.

    token_mean: sum over tokens / tokens. sequence_mean: mean of the rows' own means. constant: sum over tokens / a
    constant of the run (rows x longest row), which no row's length moves.
    """
    if aggregation not in ("token_mean", "sequence_mean", "constant"):
        raise UserError(unknown("aggregation", aggregation, ("token_mean", "sequence_mean", "constant")))
    if aggregation == "sequence_mean":
        _, index_N, count_U = torch.unique(row_N, return_inverse=True, return_counts=True)
        loss_N = loss_N / count_U[index_N]
    return loss_N.sum()


def kl_estimate(logp_N: Tensor, reference_N: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference): k1 = log-ratio, k2 = k1^2 / 2, k3 = exp(-k1) + k1 - 1
    (Schulman 2020, "Approximating KL divergence").

    As a *loss*, only k2 has the true gradient on the policy's own samples; k1 has none in expectation.
    """
    k1_N = log_ratio(logp_N, reference_N)
    if estimator == "k1":
        return k1_N
    if estimator == "k2":
        return 0.5 * k1_N.square()
    if estimator == "k3":
        return torch.exp(-k1_N) + k1_N - 1.0
    raise UserError(unknown("KL estimator", estimator, ("k1", "k2", "k3")))


def clipped_objective(ratio_N: Tensor, advantage_N: Tensor, low: float, high: float, bound: float) -> Tensor:
    """-min(rA, clip(r, 1-low, 1+high) A); for A < 0 at most -bound x A.

    Clip: Schulman et al. 2017 (arXiv:1707.06347); two bounds: Yu et al. 2025 (arXiv:2503.14476); dual clip: Ye et al.
    2020 (arXiv:1912.09729).
    """
    clipped_N = ratio_N.clamp(1.0 - low, 1.0 + high)
    loss_N = torch.maximum(-ratio_N * advantage_N, -clipped_N * advantage_N)
    return torch.where(advantage_N < 0, torch.minimum(loss_N, -bound * advantage_N), loss_N)


def _total(values_N: Tensor) -> tuple[float, float]:
    return float(values_N.detach().sum()), float(len(values_N))


# ---------------------------------------------------------------- supervised


def cross_entropy() -> Loss:
    """Sum of weight x -log p(target)."""

    def loss(logits_NV: Tensor, pack: PackTensors) -> tuple[Tensor, Metrics]:
        nll_N = -token_log_probs(logits_NV, pack.target_N)
        right_N = (logits_NV.detach().argmax(-1) == pack.target_N).float()
        return (pack.weight_N * nll_N).sum(), {"nll": _total(nll_N), "accuracy": _total(right_N)}

    return loss


# ---------------------------------------------------------------- policy gradients


def _correction(old_N: Tensor, behaviour_N: Tensor, row_N: Tensor, tis: float, bounds: tuple[float, float]) -> Tensor:
    """Constant factor of each token: min(rho, tis), and 0 on rows whose geometric mean of rho is out of bounds."""
    log_rho_N = log_ratio(old_N, behaviour_N)
    mean_N = row_mean(log_rho_N, row_N).exp()
    kept_N = (mean_N >= bounds[0]) & (mean_N <= bounds[1])
    return torch.where(kept_N, log_rho_N.exp().clamp(max=tis), torch.zeros_like(log_rho_N)).detach()


def _known(behaviour_N: Tensor) -> Tensor:
    missing = int(torch.isnan(behaviour_N).sum())
    if missing:
        raise DataError(
            f"{missing} of {len(behaviour_N)} trained tokens have no behaviour log-prob, so they can't be corrected "
            "for what sampled them; train only on recorded rollouts (Pack.require_behaviour names the first)"
        )
    return behaviour_N


def policy_loss(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    negative_bound: float = 3.0,
    tis: float = 2.0,
    row_bounds: tuple[float, float] = (0.5, 2.0),
    correction: str = "decoupled",
    kind: str = "clip",
    aggregation: str = "token_mean",
    temperature: float = 1.0,
    kl_weight: float = 0.0,
    kl_estimator: str = "k2",
) -> Loss:
    """Policy gradient on recorded rollouts; `weight_N` is the advantage.

    kind: "clip" (PPO, asymmetric), "gspo" (one ratio a row, exp of the mean log-ratio: Zheng et al. 2025,
    arXiv:2507.18071) or "cispo" (the clipped ratio, 1-clip_low .. 1+clip_high, as a constant weight of the log-prob:
    MiniMax 2025, arXiv:2506.13585).
    correction: "decoupled" (Hilton et al. 2021, arXiv:2110.00641) multiplies by sg[min(rho, tis)], rho =
    old/behaviour, and masks rows by the geometric mean of rho; "bypass" takes the behaviour policy for the old one,
    and no rho. Without `old_logp_N` the old policy is the current one (one update a batch), so the ratio is exactly 1.
    `kl_weight` adds KL to `reference_logp_N`.
    """
    if kl_weight and kl_estimator == "k1":
        raise UserError("k1 as a loss has zero expected gradient: use kl_estimator 'k2' (true gradient) or 'k3'")
    for name, value, choices in (
        ("correction", correction, ("decoupled", "bypass")),
        ("policy loss", kind, ("clip", "gspo", "cispo")),
    ):
        if value not in choices:
            raise UserError(unknown(name, value, choices))

    def loss(logits_NV: Tensor, pack: PackTensors) -> tuple[Tensor, Metrics]:
        logp_N = token_log_probs(logits_NV, pack.target_N, temperature)
        behaviour_N = _known(pack.behaviour_logp_N)
        old_N = behaviour_N if correction == "bypass" else pack.old_logp_N
        old_N = logp_N.detach() if old_N is None else old_N
        change_N = log_ratio(logp_N, old_N)
        ratio_N = (row_mean(change_N, pack.row_N) if kind == "gspo" else change_N).exp()
        if kind == "cispo":
            weight_N = ratio_N.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
            loss_N = -weight_N * pack.weight_N * logp_N
        else:
            loss_N = clipped_objective(ratio_N, pack.weight_N, clip_low, clip_high, negative_bound)
        factor_N = torch.ones_like(logp_N)
        if correction == "decoupled":
            factor_N = _correction(old_N, behaviour_N, pack.row_N, tis, row_bounds)
        loss_N = torch.where(factor_N > 0, factor_N * loss_N, torch.zeros_like(loss_N))
        trainer_N = old_N if correction == "decoupled" else logp_N.detach()
        gap_N = kl_estimate(behaviour_N, trainer_N, "k3")
        metrics = _policy_metrics(logits_NV, temperature, gap_N, ratio_N, factor_N, clip_low, clip_high)
        if kl_weight:
            kl_N = kl_estimate(logp_N, _needed(pack.reference_logp_N, "reference_logp_N"), kl_estimator)
            loss_N = loss_N + kl_weight * kl_N
            metrics["reference_kl"] = _total(kl_N)
        return aggregate(loss_N, pack.row_N, aggregation), metrics

    return loss


def _policy_metrics(
    logits_NV: Tensor,
    temperature: float,
    gap_N: Tensor,
    ratio_N: Tensor,
    factor_N: Tensor,
    clip_low: float,
    clip_high: float,
) -> Metrics:
    """`gap_N` is the sampler's distance from the trainer before its first update, where that is known."""
    clipped_N = (ratio_N < 1.0 - clip_low) | (ratio_N > 1.0 + clip_high)
    return {
        "entropy": _total(entropy(logits_NV, temperature)),
        "behaviour_k3": _total(gap_N),
        "ratio": _total(ratio_N),
        "clipped": _total(clipped_N.float()),
        "rejected": _total((factor_N == 0).float()),
    }


def _needed(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise DataError(f"this loss needs {name} on every pack: set it from Learner.log_probs or pass a teacher")
    return value


# ---------------------------------------------------------------- preferences


def dpo(beta: float = 0.1) -> Loss:
    """Sum over pairs of -logsigmoid(beta (delta chosen - delta rejected)), delta = log policy - log reference
    (Rafailov et al. 2023, arXiv:2305.18290).

    Both rows of a pair are in one pack, with the tokens of their shared prefix left out. Divisor: pairs.
    """

    def loss(logits_NV: Tensor, pack: PackTensors) -> tuple[Tensor, Metrics]:
        if bool((pack.pair_N < 0).any()):
            raise DataError("a row outside any pair reached the preference loss: set Example.pair and Example.chosen")
        logp_N = token_log_probs(logits_NV, pack.target_N)
        delta_N = logp_N - _needed(pack.reference_logp_N, "reference_logp_N")
        signed_N = torch.where(pack.chosen_N, delta_N, -delta_N)
        pairs_U, index_N = torch.unique(pack.pair_N, return_inverse=True)
        margin_U = torch.zeros(len(pairs_U), device=signed_N.device).index_add(0, index_N, signed_N)
        loss_U = -F.logsigmoid(beta * margin_U)
        return loss_U.sum(), {
            "dpo": _total(loss_U),
            "margin": _total(beta * margin_U),
            "pair_accuracy": _total((margin_U > 0).float()),
        }

    return loss


# ---------------------------------------------------------------- distillation


def same_vocabulary(student: Mapping[str, int], teacher: Mapping[str, int]) -> int:
    """Size of the vocabulary if both tokenizers give every id the same string; otherwise DataError naming the first."""
    ours = {index: text for text, index in student.items()}
    theirs = {index: text for text, index in teacher.items()}
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            raise DataError(
                f"token {index} is {ours.get(index)!r} to the student and {theirs.get(index)!r} to the teacher: "
                "distillation by logits needs one vocabulary; use a teacher with the student's tokenizer"
            )
    return max(ours, default=-1) + 1


def shared_width(student_NV: Tensor, teacher_NV: Tensor, vocabulary: int | None) -> tuple[Tensor, Tensor]:
    """Both cut to the shared vocabulary when their widths differ only by padding rows.

    `vocabulary` is what `same_vocabulary` proved. Softmax comes after the cut, so probabilities still sum to 1.
    """
    ours, theirs = student_NV.shape[-1], teacher_NV.shape[-1]
    if ours == theirs:
        return student_NV, teacher_NV
    if vocabulary is None or vocabulary > min(ours, theirs):
        raise DataError(
            f"the student has {ours} logits and the teacher {theirs}, and the proven shared vocabulary is "
            f"{vocabulary}: pass the size from same_vocabulary(), which must fit both"
        )
    return student_NV[..., :vocabulary], teacher_NV[..., :vocabulary]


def reverse_kl(temperature: float = 1.0, vocabulary: int | None = None) -> Loss:
    """Sum of weight x KL(student || teacher) over the whole vocabulary: for the student's own samples
    (Agarwal et al. 2024, arXiv:2306.13649).
    """
    return _teacher_kl(temperature, vocabulary, reverse=True)


def forward_kl(temperature: float = 1.0, vocabulary: int | None = None) -> Loss:
    """Sum of weight x KL(teacher || student) over the whole vocabulary: for the teacher's samples."""
    return _teacher_kl(temperature, vocabulary, reverse=False)


def _teacher_kl(temperature: float, vocabulary: int | None, *, reverse: bool) -> Loss:
    def loss(logits_NV: Tensor, pack: PackTensors) -> tuple[Tensor, Metrics]:
        teacher_NV = _needed(pack.teacher_logits_NV, "teacher logits").detach()
        student_NV, teacher_NV = shared_width(logits_NV, teacher_NV, vocabulary)
        student_NV = scaled(student_NV, temperature).log_softmax(-1)
        teacher_NV = scaled(teacher_NV, temperature).log_softmax(-1)
        first_NV, second_NV = (student_NV, teacher_NV) if reverse else (teacher_NV, student_NV)
        kl_N = F.kl_div(second_NV, first_NV, reduction="none", log_target=True).sum(-1)
        return (pack.weight_N * kl_N).sum(), {"teacher_kl": _total(kl_N)}

    return loss
