"""The learner: packs and a loss in, better weights out. It does not know which algorithm it serves.

T tokens of one pack · N trained tokens · U distinct positions they are predicted at · V vocabulary.

Weights are float32 masters; matrix products run in bfloat16 under autocast where the hardware multiplies it fast.
Logits are made at the trained positions alone.
"""

from __future__ import annotations

import math
import resource
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from treadle import attention
from treadle.batch import Pack
from treadle.errors import TreadleError, UserError
from treadle.losses import Loss, PackTensors, token_log_probs
from treadle.models import load_model, product_dtype, recovered, replace_folder

STATE_FILE = "learner.pt"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf", STATE_FILE)


class Learner:
    """A causal language model with its optimizer (AdamW).

    `model` is a Hugging Face folder or a loaded model. `dtype` is that of the matrix products: "float32", "bfloat16" or
    "auto". `trained_layers`: only so many decoder layers, from the top, and the last norm are trained; what lies below
    is run without gradients; 0, or more than there are, trains every weight. `threads` is torch's, for the process.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        dtype: str = "auto",
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        device: str = "cpu",
        trained_layers: int = 0,
        threads: int | None = None,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.folder = Path(model) if isinstance(model, str | Path) else None
        self.model: PreTrainedModel = load_model(Path(model)) if isinstance(model, str | Path) else model
        self.model.set_attn_implementation(attention.NAME)
        self.model.to(device).float().eval()  # eval: no dropout, so a log-prob depends on weights and ids alone
        _train_upper(self.model, trained_layers)
        self.device = torch.device(device)
        self.dtype = product_dtype(dtype, device)
        self.max_grad_norm = max_grad_norm
        self.updates = 0  # optimizer updates contained in the weights
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=0.0,
            betas=betas,
            weight_decay=weight_decay,
            fused=True,
        )

    # ------------------------------------------------------------ forward

    def logits(self, pack: Pack) -> Tensor:
        """Logits [N, V] that predict the pack's trained tokens; without gradient under `torch.no_grad()`."""
        tokens_1T = torch.from_numpy(pack.tokens_T)[None].to(self.device)
        positions_1T = torch.from_numpy(pack.positions_T)[None].to(self.device)
        source_U, index_N = np.unique(pack.source_N, return_inverse=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            hidden_TH = self.model.base_model(
                input_ids=tokens_1T,
                position_ids=positions_1T,
                use_cache=False,
                stretches=attention.plan(pack, self.dtype, self.device),
            ).last_hidden_state[0]
            at_U = torch.from_numpy(source_U).to(self.device)
            logits_UV: Tensor = self.model.get_output_embeddings()(hidden_TH[at_U])
        if len(source_U) == len(index_N) and (np.diff(index_N) > 0).all():
            return logits_UV
        return logits_UV[torch.from_numpy(index_N).to(self.device)]

    def log_probs(self, packs: Sequence[Pack], temperature: float = 1.0) -> list[NDArray[np.float32]]:
        """For each pack, the log-probs [N] of its trained tokens under the weights held now."""
        found = []
        with torch.no_grad():
            for pack in packs:
                target_N = torch.from_numpy(pack.target_N).to(self.device)
                found.append(token_log_probs(self.logits(pack), target_N, temperature).cpu().numpy())
        return found

    # ------------------------------------------------------------ training

    def forward_backward(
        self,
        packs: Sequence[Pack],
        loss: Loss,
        divisor: float,
        *,
        teacher: Learner | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, float]:
        """Add the gradient of (sum of losses) / divisor; returns means of the loss's metrics, and rates.

        Gradients add up until `step`. `teacher` gives its logits for the same packs; `progress(done, of)` is called
        after each pack. Tokens count as trained on by separate rows, computed as run through the model.
        """
        began = perf_counter()
        total = 0.0
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for done, pack in enumerate(packs, start=1):
            tensors = self._tensors(pack, teacher)
            loss_sum, metrics = loss(self.logits(pack), tensors)
            (loss_sum / divisor).backward()  # type: ignore[no-untyped-call]
            total += float(loss_sum.detach()) / divisor
            for name, (value, count) in metrics.items():
                sums[name][0] += value
                sums[name][1] += count
            if progress:
                progress(done, len(packs))
        return {
            "loss": total,
            **{name: value / count for name, (value, count) in sums.items() if count},
            **_work(packs, perf_counter() - began),
        }

    def _tensors(self, pack: Pack, teacher: Learner | None) -> PackTensors:
        def on_device(array: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(array).to(self.device)

        with torch.no_grad():
            teacher_logits_NV = None if teacher is None else teacher.logits(pack).to(self.device)
        old, reference = pack.old_logp_N, pack.reference_logp_N
        return PackTensors(
            target_N=on_device(pack.target_N),
            weight_N=on_device(pack.weight_N),
            row_N=on_device(pack.row_N),
            pair_N=on_device(pack.pair_N),
            chosen_N=on_device(pack.chosen_N),
            behaviour_logp_N=on_device(pack.behaviour_logp_N),
            old_logp_N=None if old is None else on_device(old),
            reference_logp_N=None if reference is None else on_device(reference),
            teacher_logits_NV=teacher_logits_NV,
        )

    def step(self, learning_rate: float) -> dict[str, float]:
        """One clipped AdamW update. No gradient, or one that is not finite, is an error and makes no update."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm))
        if not parameters or not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            what = f"the gradient norm is {norm}" if parameters else "there is no gradient: call forward_backward first"
            raise TreadleError(f"update {self.updates + 1}: {what}; the weights were left as they are")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return {"grad_norm": norm, "learning_rate": learning_rate}

    # ------------------------------------------------------------ weights

    def state(self) -> Mapping[str, Tensor]:
        """Weights under their Hugging Face names: float32 and shared with the learner, so copy before the next step."""
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}

    def save(self, folder: str | Path, *, resumable: bool = True) -> Path:
        """Write a Hugging Face folder; `resumable` adds optimizer state, generator state and the update count.

        Everything is written beside `folder` and then renamed, so a kill leaves the old state or the new one.
        """
        target = Path(folder)
        temporary = target.with_name(target.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        if self.folder:
            copy_companions(self.folder, temporary)
        self.model.save_pretrained(temporary)
        if resumable:
            state = {"optimizer": self.optimizer.state_dict(), "updates": self.updates, "rng": torch.get_rng_state()}
            torch.save(state, temporary / STATE_FILE)
        replace_folder(temporary, target)
        self.folder = self.folder or target
        return target

    def load(self, folder: str | Path) -> None:
        """Take weights, optimizer, generator state and update count from what `save` wrote."""
        source = recovered(Path(folder))
        if not (source / STATE_FILE).is_file():
            raise UserError(
                f"{source} holds no {STATE_FILE}, so training can't resume from it: save with resumable=True"
            )
        self.model.load_state_dict(load_model(source).state_dict())
        state = torch.load(source / STATE_FILE, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = int(state["updates"])
        torch.set_rng_state(state["rng"])


# ---------------------------------------------------------------- folders and figures


def _train_upper(model: PreTrainedModel, layers: int) -> None:
    held = model.base_model.layers
    everything = not 0 < layers <= len(held)
    model.requires_grad_(everything)
    if everything:
        return
    for part in (*held[-layers:], model.base_model.norm):
        part.requires_grad_(True)


def copy_companions(source: Path, target: Path) -> None:
    """Tokenizer, templates and settings: every file that isn't weights or training state."""
    weights = {path for pattern in _WEIGHTS for path in source.glob(pattern)}
    for path in source.iterdir():
        if path.is_file() and path not in weights:
            shutil.copy2(path, target / path.name)


def _work(packs: Sequence[Pack], seconds: float) -> dict[str, float]:
    """Counts of what was done. Peak memory is the process's own, in MiB."""
    separate = sum(pack.tokens_before_sharing for pack in packs)
    return {
        "tokens": float(separate),
        "tokens_computed": float(sum(len(pack.tokens_T) for pack in packs)),
        "tokens_trained": float(sum(len(pack.target_N) for pack in packs)),
        "seconds": seconds,
        "tokens_per_second": separate / seconds,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
