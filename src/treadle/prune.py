"""prune: a student is made of the layers that its teacher would miss most.

Which those are is measured, not read off their places: a few layers in the middle carry what copies names out of the
context, and without them a student is fluent and useless. T tokens of a pack · N trained tokens · H hidden width.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from treadle.batch import Pack
from treadle.errors import DataError, UserError
from treadle.learner import Learner, copy_companions
from treadle.models import replace_folder


def check_layers(layers: int, count: int) -> None:
    if not 1 <= count <= layers:
        raise UserError(f"can't keep {count} layers (distill.layers): the model has {layers}, so choose 1 to {layers}")


def needed_layers(
    teacher: Learner, pack: Pack, count: int, progress: Callable[[int], None] = lambda removed: None
) -> list[int]:
    """The `count` decoder layers that are left when the others have been taken out, the least missed first.

    A layer is missed by as much as the loss on the pack's trained tokens is higher without it. Layers fill in for each
    other, so that this changes with every removal: the least one is measured anew, and goes if it still is the least
    (lazy greedy, Minoux 1978). `progress` is called with 1 after each removal. The teacher is as before afterwards.
    """
    base = teacher.model.base_model
    layers, embedding = list(base.layers), base.embed_tokens
    check_layers(len(layers), count)
    keep = list(range(len(layers)))
    missed = dict.fromkeys(keep, -math.inf)  # not measured yet, so measured before any goes
    fresh: set[int] = set()  # those measured since the last removal
    inputs: dict[int, Tensor] = {}

    def loss(hidden: Tensor | None, left: Sequence[int]) -> float:
        """Mean loss of the layers `left`, fed with `hidden` [1, T, H], or with the tokens."""
        base.embed_tokens = embedding if hidden is None else _Given(hidden)
        base.layers = nn.ModuleList([layers[i] for i in left])
        return -float(np.mean(teacher.log_probs([pack])[0]))

    try:
        while len(keep) > count:
            least = min(missed, key=missed.__getitem__)
            if least in fresh:
                keep.remove(least)
                del missed[least]
                fresh.clear()
                progress(1)
                continue
            if not fresh:
                inputs = _inputs(layers, keep, loss)
            missed[least] = loss(inputs[least], keep[keep.index(least) + 1 :])
            fresh.add(least)
    finally:
        base.embed_tokens, base.layers = embedding, nn.ModuleList(layers)
    return keep


def _inputs(
    layers: Sequence[nn.Module], keep: Sequence[int], loss: Callable[[Tensor | None, Sequence[int]], float]
) -> dict[int, Tensor]:
    """What goes into each kept layer, [1, T, H]: leaving one out changes nothing before it."""
    inputs: dict[int, Tensor] = {}

    def note(layer: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, given: inputs.__setitem__(layer, given[0])

    hooks = [layers[i].register_forward_pre_hook(note(i)) for i in keep]
    loss(None, keep)
    for hook in hooks:
        hook.remove()
    return inputs


class _Given(nn.Module):
    """Stands where the embedding was, and gives hidden states that are known already."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, ids: Tensor) -> Tensor:
        return self.hidden


def prune_layers(folder: str | Path, keep: Sequence[int], out: str | Path) -> Path:
    """Write a model made of the listed decoder layers (in that order) of another: a student to distil into."""
    source, target = Path(folder), Path(out)
    config = json.loads((source / "config.json").read_text())
    layers = int(config["num_hidden_layers"])
    wrong = [layer for layer in keep if not 0 <= layer < layers]
    if wrong or not keep:
        raise UserError(f"can't keep layers {list(keep)}: {source} has layers 0 to {layers - 1}")
    weights = {
        name: tensor for part in sorted(source.glob("*.safetensors")) for name, tensor in load_file(part).items()
    }
    if not weights:
        raise DataError(f"{source} has no .safetensors weights; save the model in that format first")
    kept = {name: tensor for name, tensor in weights.items() if ".layers." not in name}
    for new, old in enumerate(keep):
        mark = f".layers.{old}."
        kept |= {n.replace(mark, f".layers.{new}."): t.clone() for n, t in weights.items() if mark in n}
    config["num_hidden_layers"] = len(keep)
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][layer] for layer in keep]
    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    copy_companions(source, temporary)
    save_file(kept, temporary / "model.safetensors", metadata={"format": "pt"})
    (temporary / "config.json").write_text(json.dumps(config, indent=2))
    replace_folder(temporary, target)
    return target
