"""Decoding speed of the slot engine against Hugging Face `generate`, on the same model, prompts and threads.

    python bench/bench_decode.py --sizes 1,8,32 --json decode.json

A student that keeps `--student` decoder layers decodes beside them; `student_cost` is its time over the whole model's.
Each size prefills once, then decodes `--repeats` times from the same keys, the two sides taking turns, so that a busy
or drifting machine hits both. The ratio of the medians is the fact to take home.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, LlamaForCausalLM

from treadle.engine.base import Sample
from treadle.engine.slots import SlotEngine
from treadle.models import smollm2
from treadle.prune import prune_layers
from treadle.types import SamplingParams

Prompts = list[list[int]]


async def ours(engine: SlotEngine, prompts: Prompts, new: int) -> tuple[float, list[Sample]]:
    started = time.perf_counter()
    params = [SamplingParams(max_tokens=new, seed=seed) for seed in range(len(prompts))]
    calls = (engine.sample(ids, p, f"s{k}") for k, (ids, p) in enumerate(zip(prompts, params, strict=True)))
    samples = await asyncio.gather(*calls)
    return time.perf_counter() - started, samples


@torch.inference_mode()
def theirs_prefill(model: Any, prompts: Prompts) -> tuple[float, DynamicCache]:
    started, cache = time.perf_counter(), DynamicCache(config=model.config)
    model(torch.tensor(prompts)[:, :-1], past_key_values=cache, logits_to_keep=1)
    return time.perf_counter() - started, cache


@torch.inference_mode()
def theirs_decode(model: Any, prompts: Prompts, cache: DynamicCache, new: int) -> float:
    mine, ids = copy.deepcopy(cache), torch.tensor(prompts)
    limits = {"max_new_tokens": new, "min_new_tokens": new}
    started = time.perf_counter()
    model.generate(ids, past_key_values=mine, do_sample=True, top_k=0, attention_mask=torch.ones_like(ids), **limits)
    return time.perf_counter() - started


@torch.inference_mode()
def k3(model: Any, prompts: Prompts, samples: list[Sample]) -> float:
    """Mean r - 1 - log r over sampled tokens, r = plain forward's probability / recorded probability."""
    gaps = []
    for ids, sample in zip(prompts, samples, strict=True):
        row = torch.tensor([*ids, *sample.ids])
        logits = model(row[None], logits_to_keep=len(sample.ids) + 1).logits[0, :-1].float()
        plain = torch.log_softmax(logits, -1).gather(1, row[-len(sample.ids) :, None])[:, 0].tolist()
        gaps += [p - (s or 0.0) for p, s in zip(plain, sample.log_probs, strict=True)]
    return statistics.fmean(math.expm1(gap) - gap for gap in gaps)


async def measure(
    engine: SlotEngine, student: SlotEngine, model: Any, size: int, options: argparse.Namespace
) -> dict[str, float]:
    length, new = options.length, options.new
    generator = torch.Generator().manual_seed(size)
    prompts: Prompts = torch.randint(10, model.config.vocab_size, (size, length), generator=generator).tolist()
    prompts = [[*prompts[0][: options.shared], *ids[options.shared :]] for ids in prompts]
    our_prefill, _ = await ours(engine, prompts, 1)
    their_prefill, cache = theirs_prefill(model, prompts)
    await ours(student, prompts, 1)
    our_times, their_times, student_times = [], [], []
    samples: list[Sample] = []
    for _ in range(options.repeats):
        seconds, samples = await ours(engine, prompts, new)
        our_times.append(seconds)
        their_times.append(theirs_decode(model, prompts, cache, new))
        student_times.append((await ours(student, prompts, new))[0])
    our_median, their_median = statistics.median(our_times), statistics.median(their_times)
    return {
        "sessions": size,
        "slots_prefill": size * length / our_prefill,
        "hf_prefill": size * length / their_prefill,
        "slots_decode": size * new / our_median,
        "hf_decode": size * new / their_median,
        "decode_ratio": their_median / our_median,
        "student_cost": statistics.median(student_times) / our_median,
        "k3": k3(model, prompts[:4], samples[:4]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="saved Hugging Face folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--sizes", default="1,8,32", help="sessions at once")
    parser.add_argument("--length", type=int, default=500, help="prompt tokens")
    parser.add_argument("--shared", type=int, default=0, help="first prompt tokens that all sessions have in common")
    parser.add_argument("--new", type=int, default=32, help="tokens sampled by each session")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--student", type=int, default=11, help="decoder layers of the student")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder, sizes = options.model or smollm2(), [int(size) for size in options.sizes.split(",")]
    model = LlamaForCausalLM.from_pretrained(folder, dtype=options.dtype).eval()
    context = options.length + options.new + 1
    room = {"slots": max(sizes), "context": context, "dtype": options.dtype, "threads": options.threads}
    engine = SlotEngine.from_model(model, **room)
    with tempfile.TemporaryDirectory() as scratch:
        kept = range(options.student)  # whichever they are, they cost the same
        student = SlotEngine.from_folder(prune_layers(folder, kept, Path(scratch) / "student"), **room)
    rows = [asyncio.run(measure(engine, student, model, size, options)) for size in sizes]
    context_note = f"{options.length} tokens of context, {options.shared} of them shared"
    table = Table(title=f"tokens/s, {options.dtype}, {options.threads} threads, {context_note}")
    for name in rows[0]:
        table.add_column(name.replace("_", "\n"), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" for value in row.values()))
    Console().print(table)
    if options.json:
        options.json.write_text(
            json.dumps({"torch": torch.__version__, "options": vars(options), "rows": rows}, indent=2, default=str)
            + "\n"
        )


if __name__ == "__main__":
    main()
