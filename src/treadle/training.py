"""What the training stages share: text logs to token rows, and one pass of a learner over examples."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from treadle.batch import DropReport, Example, divisor, pack, unfit
from treadle.errors import DataError
from treadle.feedback.process import faulty, is_marked
from treadle.learner import Learner
from treadle.losses import Loss
from treadle.render.base import Renderer, contract_fingerprint, undeclared_calls
from treadle.types import Contract, Node, Trajectory

Item = TypeVar("Item")


def tokenised(trajectory: Trajectory, renderer: Renderer, contract: Contract) -> Trajectory:
    """A text-only trajectory with each node's tokens filled in; one that has tokens is returned as it is.

    The mask is 1 on what the assistant wrote. Log-probs stay unknown: such a row serves SFT, never RL.
    """
    if any(node.tokens for node in trajectory.nodes):
        return trajectory
    nodes = [_tokenised(node, renderer, contract) for node in trajectory.nodes]
    return msgspec.structs.replace(trajectory, nodes=nodes)


def demonstrations(
    trajectories: Iterable[Trajectory], renderer: Renderer, contract: Contract
) -> tuple[list[Trajectory], int]:
    """Token rows of what may be imitated under a contract, and how many were left out.

    Text that calls tools of another contract is: under this one's tool block it would teach calls nobody declared. So
    are tokens that were sampled under another.
    """
    ours = contract_fingerprint(contract, renderer)
    kept: list[Trajectory] = []
    foreign = 0
    for trajectory in trajectories:
        if any(node.tokens for node in trajectory.nodes):
            of_another = trajectory.contract != ours
        else:
            of_another = bool(undeclared_calls([node.message for node in trajectory.nodes], contract.tools))
        if of_another:
            foreign += 1
        else:
            kept.append(tokenised(trajectory, renderer, contract))
    return kept, foreign


def _tokenised(node: Node, renderer: Renderer, contract: Contract) -> Node:
    first = node.parent is None
    if node.message.role == "assistant":
        ids, mask = renderer.reply(node.message, first=first)
    else:
        ids = renderer.delta(node.message, first=first, tools=contract.tools, acts=contract.acts)
        mask = [0] * len(ids)
    unknown: list[float | None] = [None] * len(ids)
    versions: list[int | None] = [None] * len(ids)
    return msgspec.structs.replace(node, tokens=ids, mask=mask, log_probs=unknown, versions=versions)


def imitation(trajectory: Trajectory) -> Example:
    """Train every reply on a trajectory's last path, which is what was graded, but mistakes, which stay as context.

    Mistakes are replies marked so in the log, and those that a step signal finds.
    """
    faults = faulty(trajectory)
    weights = {
        node.id: 1.0
        for node in trajectory.path()
        if node.message.role == "assistant" and node.id not in faults and not is_marked(node)
    }
    return Example(trajectory=trajectory, weights=weights)


def batches(items: Sequence[Item], rows: int, epochs: int, seed: int) -> Iterator[list[Item]]:
    """Shuffled batches of `rows`; a tail makes a smaller batch, so that nothing is left out."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(items))
        for start in range(0, len(order), rows):
            yield [items[i] for i in order[start : start + rows]]


def warmup_decay(step: int, steps: int, peak: float, warmup: float = 0.1) -> float:
    """Linear rise over the first share of the steps, then linear fall towards a tenth, which the next would have."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return peak * (step + 1) / rise
    return peak * (1.0 - 0.9 * (step - rise) / max(1, steps - rise))


def update(
    learner: Learner,
    examples: Sequence[Example],
    loss: Loss,
    learning_rate: float,
    pack_tokens: int,
    teacher: Learner | None = None,
) -> tuple[dict[str, float], DropReport]:
    """One optimizer update over `examples`, whatever number of micro-batches they need."""
    packs, report = pack(examples, pack_tokens)
    metrics = learner.forward_backward(packs, loss, divisor(packs, "token_mean"), teacher=teacher)
    return metrics | learner.step(learning_rate), report


COUNTS = {"tokens", "tokens_computed", "tokens_trained", "seconds", "cut_rows", "cut_trained_tokens"}
LEFT_OUT = "left out: "  # begins the name of a count of rows, and the reason follows


def joined(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """One metrics row of several calls to a learner: counts are sums, all else is the last that was told."""
    found = {name: value for part in parts for name, value in part.items()}
    counts = [name for name in found if name in COUNTS or name.startswith(LEFT_OUT)]
    found |= {name: sum(part.get(name, 0.0) for part in parts) for name in counts}
    if "tokens_per_second" in found:
        found["tokens_per_second"] = found["tokens"] / found["seconds"]
    return found


def cuts(report: DropReport) -> dict[str, float]:
    """What the packs had to leave out, for a metrics row."""
    dropped = {f"{LEFT_OUT}{reason}": float(count) for reason, count in report.dropped.items()}
    return {"cut_rows": float(report.cut_rows), "cut_trained_tokens": float(report.cut_trained_tokens), **dropped}


def fit(
    learner: Learner,
    examples: Sequence[Example],
    loss: Loss,
    *,
    rows: int,
    epochs: int,
    learning_rate: float,
    pack_tokens: int,
    seed: int,
    advance: Callable[[int], None],
    log: Callable[[dict[str, float]], None],
    teacher: Learner | None = None,
) -> None:
    """Epochs of updates with a rising and falling learning rate; one metrics row an update.

    Rows of which nothing can be trained are left out first, and counted in a metrics row of their own.
    """
    reasons = [unfit(example, limit=pack_tokens) for example in examples]
    examples = [example for example, reason in zip(examples, reasons, strict=True) if reason is None]
    left_out = Counter(reason for reason in reasons if reason)
    if not examples:
        told = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise DataError(f"nothing to train in {len(reasons)} rows ({told}): pack_tokens is {pack_tokens}; raise it")
    if left_out:
        log({f"{LEFT_OUT}{reason}": float(count) for reason, count in left_out.items()})
        advance(sum(left_out.values()) * epochs)
    plan = list(batches(examples, rows, epochs, seed))
    for step, batch in enumerate(plan):
        rate = warmup_decay(step, len(plan), learning_rate)
        metrics, report = update(learner, batch, loss, rate, pack_tokens, teacher)
        log({**metrics, **cuts(report)})
        advance(len(batch))


class Steps:
    """The learner after each step of a stage, so that a stage that was killed goes on with the step it was in.

    Only the last one is kept, in a folder beside the checkpoints.
    """

    def __init__(self, checkpoints: Path, prefix: str) -> None:
        self.checkpoints, self.prefix = checkpoints, prefix

    def resume(self, learner: Learner) -> int:
        """Put what was saved last into the learner; gives its number, or 0 if nothing was saved."""
        last = max(self._folders(), key=self._number, default=None)
        if last is None:
            return 0
        learner.load(last)
        return self._number(last)

    def save(self, learner: Learner, number: int) -> None:
        self.forget(but=learner.save(self.checkpoints / f"{self.prefix}{number:04d}"))

    def forget(self, but: Path | None = None) -> None:
        for folder in self._folders():
            if folder != but:
                shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> list[Path]:
        found = self.checkpoints.glob(f"{self.prefix}*")  # half-written ones beside them end otherwise
        return [folder for folder in found if folder.name.removeprefix(self.prefix).isdecimal()]

    def _number(self, folder: Path) -> int:
        return int(folder.name.removeprefix(self.prefix))
