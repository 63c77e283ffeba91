"""A student is made of its teacher's layers: of those that were listed, and of those that are missed most."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from test_batch import example
from test_learner import EXAMPLES, ROWS, tiny
from treadle.batch import divisor, pack
from treadle.errors import UserError
from treadle.learner import Learner
from treadle.losses import cross_entropy
from treadle.prune import needed_layers, prune_layers


def test_pruned_student_is_the_listed_layers(tmp_path: Path) -> None:
    teacher = tiny(layers=4)
    teacher.save(tmp_path / "teacher")
    student = Learner(prune_layers(tmp_path / "teacher", [0, 3], tmp_path / "student"), dtype="float32")
    assert json.loads((tmp_path / "student/config.json").read_text())["num_hidden_layers"] == 2
    for new, old in enumerate([0, 3]):
        for name, value in teacher.state().items():
            if f"layers.{old}." in name:
                assert torch.equal(value, student.state()[name.replace(f"layers.{old}.", f"layers.{new}.")])
    del teacher.model.model.layers[1:3]
    packs, _ = pack(EXAMPLES, 1000)
    np.testing.assert_allclose(student.log_probs(packs)[0], teacher.log_probs(packs)[0], atol=1e-6)
    with pytest.raises(UserError, match="has layers 0 to 3"):
        prune_layers(tmp_path / "teacher", [4], tmp_path / "student")


def test_layers_that_do_nothing_go_first() -> None:
    teacher, idle = tiny(layers=6), (0, 2, 5)
    packs, _ = pack([example(parts) for parts in ROWS], 1000)
    for _ in range(60):
        teacher.forward_backward(packs, cross_entropy(), divisor(packs))
        teacher.step(3e-3)
        for layer in (teacher.model.model.layers[i] for i in idle):
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    before = teacher.log_probs(packs)[0]
    removed: list[int] = []
    assert needed_layers(teacher, packs[0], 3, removed.append) == [1, 3, 4]
    assert removed == [1, 1, 1]
    np.testing.assert_array_equal(teacher.log_probs(packs)[0], before)
    assert needed_layers(teacher, packs[0], 6) == [0, 1, 2, 3, 4, 5]
    for count in (0, 7):
        with pytest.raises(UserError, match=f"can't keep {count} layers"):
            needed_layers(teacher, packs[0], count)


@pytest.mark.parametrize("seed", range(4))
def test_a_layer_is_missed_by_the_loss_without_it(seed: int) -> None:
    """Against leaving each out of the whole model."""
    teacher = tiny(seed, layers=4)
    packs, _ = pack(EXAMPLES, 1000)
    layers = list(teacher.model.model.layers)

    def loss(keep: list[int]) -> float:
        teacher.model.model.layers = torch.nn.ModuleList([layers[i] for i in keep])
        value = -float(np.mean(teacher.log_probs(packs)[0]))
        teacher.model.model.layers = torch.nn.ModuleList(layers)
        return value

    without = {out: loss([i for i in range(4) if i != out]) for out in range(4)}
    least = min(without, key=without.__getitem__)
    assert needed_layers(teacher, packs[0], 3) == [i for i in range(4) if i != least]
