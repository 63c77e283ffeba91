"""The slot engine against the plain Hugging Face forward: whatever is reused, copied, evicted or batched with what."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from treadle.engine.base import Engine, Sample
from treadle.engine.llama import draw
from treadle.engine.slots import SlotEngine
from treadle.errors import EngineError, UserError
from treadle.types import SamplingParams, StopReason

VOCAB = 97
TOLERANCE = 1e-4


def llama(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 36,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,  # far from uniform, so that a wrong key shows
    }
    return LlamaForCausalLM(LlamaConfig(**(shape | changes))).float().eval()


MODEL = llama()


def engine_of(model: Any = MODEL, **options: Any) -> SlotEngine:
    return SlotEngine.from_model(model, **({"slots": 4, "context": 200, "dtype": "float32", "threads": 1} | options))


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def params(seed: int | None = 0, **changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 8, "seed": seed} | changes))


@torch.inference_mode()
def plain_log_probs(ids: Sequence[int], count: int, model: Any = MODEL, temperature: float = 1.0) -> list[float]:
    """log-softmax(logits / temperature) of the last `count` ids, by the plain forward over the whole sequence."""
    logits = model(torch.tensor([list(ids)])).logits[0, :-1]
    chosen = torch.tensor(ids[1:])[:, None]
    return torch.log_softmax(logits / temperature, -1).gather(1, chosen)[-count:, 0].tolist()


def assert_exact(ids: Sequence[int], sample: Sample, model: Any = MODEL, temperature: float = 1.0) -> None:
    assert sample.ids
    assert len(sample.ids) == len(sample.log_probs) == len(sample.versions)
    expected = plain_log_probs([*ids, *sample.ids], len(sample.ids), model, temperature)
    assert sample.log_probs == pytest.approx(expected, abs=TOLERANCE)


async def test_many_sessions_of_unlike_lengths_match_the_plain_forward() -> None:
    """F51: batch mates, padding and slot positions leave no trace; more requests than slots wait their turn."""
    engine: Engine = engine_of()
    lengths = [1, 2, 63, 64, 65, 130, 17, 100, 5]
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    samples = await asyncio.gather(
        *(engine.sample(ids, params(seed, max_tokens=5 + seed), f"s{seed}") for seed, ids in enumerate(prompts))
    )
    for seed, (ids, sample) in enumerate(zip(prompts, samples, strict=True)):
        assert len(sample.ids) == 5 + seed
        assert sample.stop is StopReason.LENGTH
        assert_exact(ids, sample)
    await engine.close()


async def test_a_session_goes_on_from_its_own_keys() -> None:
    """F12: sampled ids are the next prompt's ids; only what is new is computed, also after history was rewritten."""
    engine = engine_of()
    ids = prompt(40, 1)
    for turn in range(3):
        before = engine.stats.prefill_tokens
        sample = await engine.sample(ids, params(turn), "s")
        assert_exact(ids, sample)
        if turn:
            assert engine.stats.prefill_tokens - before == 1 + 20  # the last sampled id and the tool result
        ids = [*ids, *sample.ids, *prompt(20, 10 + turn)]
    rewritten = [*ids[:50], *prompt(30, 99)]
    assert_exact(rewritten, await engine.sample(rewritten, params(7), "s"))
    assert_exact(ids[:30], await engine.sample(ids[:30], params(8), "s"))  # wholly held already
    await engine.close()


async def test_a_groups_prompt_is_computed_once() -> None:
    engine = engine_of(slots=8)
    ids = prompt(90, 3)
    samples = await asyncio.gather(*(engine.sample(ids, params(seed), f"m{seed}") for seed in range(8)))
    assert engine.stats.prefill_tokens == 90 + 7  # each member still computes the last prompt id for its logits
    assert engine.stats.copied_tokens == 7 * 89
    for sample in samples:
        assert_exact(ids, sample)
    assert len({tuple(sample.ids) for sample in samples}) == 8  # F62: distinct seeds, distinct members
    await engine.close()


async def test_a_shared_beginning_is_copied_from_any_session() -> None:
    engine = engine_of()
    system = prompt(60, 4)
    first, second, third = ([*system, *prompt(20, seed)] for seed in (5, 6, 7))
    assert_exact(first, await engine.sample(first, params(), "a"))
    both = await asyncio.gather(engine.sample(second, params(), "b"), engine.sample(third, params(), "c"))
    assert engine.stats.copied_tokens == 120
    assert engine.stats.prefill_tokens == 80 + 20 + 20
    assert_exact(second, both[0])
    assert_exact(third, both[1])
    await engine.close()


async def test_a_shared_prefix_read_once_changes_nothing() -> None:
    """Groups in neighbouring slots, alike for 70 ids, in groups for 110, at unlike lengths; one slot shares nothing."""
    engine, system = engine_of(slots=8), prompt(70, 1)
    groups = [[*system, *prompt(40, group)] for group in (2, 3)]
    prompts = [[*groups[k // 3], *prompt(1 + 13 * k, 10 + k)] for k in range(6)] + [prompt(90, 50)]
    samples = await asyncio.gather(*(engine.sample(ids, params(k), f"s{k}") for k, ids in enumerate(prompts)))
    for ids, sample in zip(prompts, samples, strict=True):
        assert_exact(ids, sample)
    again = [[*ids, *sample.ids, 5, 6] for ids, sample in zip(prompts, samples, strict=True)]
    for ids, sample in zip(
        again, await asyncio.gather(*(engine.sample(i, params(9), f"s{k}") for k, i in enumerate(again))), strict=True
    ):
        assert_exact(ids, sample)
    await engine.close()


async def test_idle_sessions_are_evicted_least_recently_used_first() -> None:
    engine = engine_of(slots=2)
    a, b, c = (prompt(30, seed) for seed in (1, 2, 3))
    first = await engine.sample(a, params(), "a")
    await engine.sample(b, params(), "b")
    await engine.sample([*a, *first.ids], params(), "a")
    await engine.sample(c, params(), "c")  # takes b's slot
    assert engine.stats.evictions == 1
    computed = engine.stats.prefill_tokens
    assert_exact(a, await engine.sample(a, params(), "a"))
    assert engine.stats.prefill_tokens == computed + 1
    assert_exact(b, await engine.sample(b, params(), "b"))  # computed again, in c's slot
    assert engine.stats.prefill_tokens == computed + 1 + 30
    assert engine.stats.evictions == 2
    await engine.release("a")
    await engine.release("nobody")
    assert_exact(c, await engine.sample(c, params(), "c"))
    assert engine.stats.evictions == 2  # a's slot was free
    await engine.close()


async def test_long_prompts_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.engine.slots.PREFILL_TOKENS", 32)
    engine = engine_of()
    prompts = [prompt(length, length) for length in (150, 40, 33)]
    samples = await asyncio.gather(*(engine.sample(ids, params(), f"{len(ids)}") for ids in prompts))
    for ids, sample in zip(prompts, samples, strict=True):
        assert_exact(ids, sample)
    await engine.close()


@pytest.mark.parametrize("seed", [3, None])
async def test_a_requests_noise_is_its_own(seed: int | None) -> None:
    """F62: the same seed gives the same ids alone and in company; no seed gives fresh ones."""
    ids, alone, crowd = prompt(30, 1), engine_of(), engine_of(slots=8)
    one = await alone.sample(ids, params(seed, max_tokens=30), "s")
    others = [crowd.sample(prompt(9 * k, k), params(k), f"o{k}") for k in range(1, 7)]
    many = await asyncio.gather(*others, crowd.sample(ids, params(seed, max_tokens=30), "s"))
    assert (one.ids == many[-1].ids) == (seed is not None)
    await asyncio.gather(alone.close(), crowd.close())


async def test_two_runs_give_the_same_ids_and_log_probs() -> None:
    async def run() -> list[Sample]:
        engine, samples = engine_of(slots=3), []
        contexts = {f"s{k}": prompt(20 + 7 * k, k) for k in range(6)}
        for turn in range(3):
            calls = (engine.sample(ids, params(turn, max_tokens=4 + turn), name) for name, ids in contexts.items())
            turns = await asyncio.gather(*calls)
            samples += turns
            for name, sample in zip(contexts, turns, strict=True):
                contexts[name] = [*contexts[name], *sample.ids, 1, 2, 3]
        await engine.close()
        return samples

    assert await run() == await run()


def test_sampling_follows_the_distribution_without_filters() -> None:
    """F45, F46, F50: at the stated temperature, every id can come, log-probs agree with float64."""
    logits = torch.tensor([2.0, 0.0])[None]
    assert draw(logits, [0.5], [0.0])[1] == pytest.approx([-0.0181], abs=1e-4)
    ids, log_probs = draw(logits, [0.0], [0.99])
    assert ids == [0]
    assert log_probs == pytest.approx([-0.1269], abs=1e-4)
    probabilities = [0.6, 0.3, 0.1]
    rows = torch.tensor(probabilities).log().expand(1000, 3)
    ids, log_probs = draw(rows, [1.0] * 1000, [k / 1000 for k in range(1000)])
    assert [ids.count(id_) for id_ in range(3)] == pytest.approx([600, 300, 100], abs=1)
    assert log_probs[:1] + log_probs[-1:] == pytest.approx([math.log(0.6), math.log(0.1)], abs=1e-6)
    wide = torch.randn(16, 50_000, generator=torch.Generator().manual_seed(0)) * 4
    ids, log_probs = draw(wide, [0.7] * 16, [k / 16 for k in range(16)])
    exact = torch.log_softmax(wide.double() / 0.7, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert log_probs == pytest.approx(exact.tolist(), abs=TOLERANCE)


def test_ids_of_probability_zero_are_never_drawn() -> None:
    logits = torch.full((3, 5), float("-inf"))
    logits[:, 2:4] = 0.0
    assert draw(logits, [1.0] * 3, [0.0, 0.5, math.nextafter(1, 0)])[0] == [2, 3, 3]


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.7])
async def test_log_probs_are_those_of_the_temperature(temperature: float) -> None:
    engine, ids = engine_of(), prompt(25, 2)
    sample = await engine.sample(ids, params(temperature=temperature, max_tokens=12), "s")
    assert_exact(ids, sample, temperature=temperature or 1.0)
    if temperature == 0:
        with torch.inference_mode():
            logits = MODEL(torch.tensor([ids + sample.ids])).logits[0]
        assert sample.ids == logits.argmax(-1)[len(ids) - 1 : -1].tolist()
    await engine.close()


async def test_stop_reasons_are_kept_apart() -> None:
    engine, ids = engine_of(context=40), prompt(30, 2)
    free = await engine.sample(ids, params(max_tokens=9), "s")
    unseen = next(id_ for id_ in range(VOCAB) if id_ not in free.ids)
    stop_at = free.ids[4]
    stopped = await engine.sample(ids, params(max_tokens=9, stop_ids=(unseen, stop_at)), "t")
    assert stopped.stop is StopReason.STOP
    assert stopped.ids == free.ids[: free.ids.index(stop_at) + 1]  # the stop id is included
    full = await engine.sample(ids, params(max_tokens=99), "u")
    assert (full.stop, len(full.ids)) == (StopReason.CONTEXT_FULL, 10)
    assert_exact(ids, full)
    too_long = await engine.sample(prompt(40, 1), params(), "v")
    assert too_long == Sample([], [], [], StopReason.CONTEXT_FULL)
    assert free.stop is StopReason.LENGTH
    await engine.close()


async def test_no_key_of_old_weights_survives_an_update() -> None:
    """F67: idle sessions, free slots and copies all start afresh."""
    engine, other, ids = engine_of(version=3), llama(seed=1), prompt(50, 1)
    before = await engine.sample(ids, params(), "s")
    assert before.versions == [3] * 8
    await engine.load_weights(other.state_dict(), version=4)
    assert engine.version == 4
    ids = [*ids, *before.ids]
    for session in ("s", "t"):
        after = await engine.sample(ids, params(), session)
        assert after.versions == [4] * 8
        assert_exact(ids, after, other)
    await engine.close()


async def test_requests_in_flight_go_on_with_the_new_weights() -> None:
    """F67: each token's log-prob is that of the version recorded beside it."""
    engine, other = engine_of(), llama(seed=1)
    prompts = [prompt(30 + k, k) for k in range(3)]
    calls = [
        asyncio.create_task(engine.sample(ids, params(k, max_tokens=60), f"s{k}")) for k, ids in enumerate(prompts)
    ]
    while engine.stats.sampled_tokens < 30:
        await asyncio.sleep(0)
    await engine.load_weights(other.state_dict(), version=1)
    for ids, sample in zip(prompts, await asyncio.gather(*calls), strict=True):
        assert sample.versions == sorted(sample.versions, key=lambda version: version or 0)
        assert set(sample.versions) == {0, 1}
        whole = [*ids, *sample.ids]
        by_version = [plain_log_probs(whole, 60, model) for model in (MODEL, other)]
        expected = [by_version[version or 0][at] for at, version in enumerate(sample.versions)]
        assert sample.log_probs == pytest.approx(expected, abs=TOLERANCE)
    await engine.close()


async def test_diverged_weights_leave_nothing_behind() -> None:
    """F67: masked keys are multiplied by zero, and zero times NaN would be NaN."""
    engine = engine_of()
    diverged = {name: torch.full_like(weight, float("nan")) for name, weight in MODEL.state_dict().items()}
    await engine.load_weights(diverged, version=1)
    await asyncio.gather(*(engine.sample(prompt(100, k), params(), f"s{k}") for k in range(4)))
    await engine.load_weights(MODEL.state_dict(), version=2)
    prompts = [prompt(20 + 9 * k, k) for k in range(4)]
    samples = await asyncio.gather(*(engine.sample(ids, params(), f"s{k}") for k, ids in enumerate(prompts)))
    for ids, sample in zip(prompts, samples, strict=True):
        assert_exact(ids, sample)
    await engine.close()


async def test_weights_that_do_not_fit_change_nothing() -> None:
    engine, ids = engine_of(), prompt(20, 1)
    state: dict[str, Tensor] = llama(seed=1).state_dict()
    name = "model.layers.2.mlp.down_proj.weight"
    for broken in (
        {k: v for k, v in state.items() if k != name},
        state | {name: torch.zeros(2, 2)},
        state | {"x": state[name]},
    ):
        with pytest.raises(UserError, match=r"down_proj|'x'"):
            await engine.load_weights(broken, version=9)
    assert engine.version == 0
    assert_exact(ids, await engine.sample(ids, params(), "s"))
    await engine.close()


async def test_a_reply_in_strides_is_the_reply_made_in_one_go() -> None:
    """Each further stride computes one token of context: the last one sampled."""
    engine, ids = engine_of(), prompt(20, 1)
    whole = await engine.sample(ids, params(temperature=0.0, max_tokens=40), "whole")
    strides: list[Sample] = []
    context = ids
    for size in (16, 16, 8):
        computed = engine.stats.prefill_tokens
        strides.append(await engine.sample(context, params(temperature=0.0, max_tokens=size), "strides"))
        assert not strides[1:] or engine.stats.prefill_tokens - computed == 1
        context = [*context, *strides[-1].ids]
    assert [id_ for part in strides for id_ in part.ids] == whole.ids
    assert [x for part in strides for x in part.log_probs] == pytest.approx(whole.log_probs, abs=TOLERANCE)
    await engine.close()


async def test_a_slot_released_while_its_request_runs() -> None:
    engine, ids = engine_of(slots=1), prompt(20, 1)
    running = asyncio.create_task(engine.sample(ids, params(max_tokens=30), "s"))
    while not engine.stats.prefill_tokens:
        await asyncio.sleep(0)
    await engine.release("s")
    assert_exact(ids, await running)
    assert_exact(ids, await engine.sample(ids, params(), "next"))
    assert engine.stats.evictions == 0
    await engine.close()


async def test_a_cancelled_request_frees_its_slot() -> None:
    engine, ids = engine_of(slots=1), prompt(20, 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await engine.sample(ids, params(max_tokens=170), "long")
    sample = await engine.sample(ids, params(), "next")
    assert_exact(ids, sample)
    assert engine.stats.cancelled == 1
    waiting = asyncio.create_task(engine.sample(ids, params(max_tokens=100), "running"))
    queued = asyncio.create_task(engine.sample(ids, params(), "queued"))
    await asyncio.sleep(0.01)
    queued.cancel()
    assert len((await waiting).ids) == 100
    assert engine.stats.sampled_tokens < 8 + 100 + 170
    await engine.close()


async def test_requests_of_one_session_run_one_after_the_other() -> None:
    engine, ids = engine_of(), prompt(30, 1)
    samples = await asyncio.gather(*(engine.sample(ids, params(seed), "s") for seed in range(3)))
    for sample in samples:
        assert_exact(ids, sample)
    assert engine.stats.prefill_tokens == 30 + 1 + 1
    await engine.close()


async def test_close_answers_what_is_open() -> None:
    engine = engine_of(slots=1)
    calls = [asyncio.create_task(engine.sample(prompt(9, k), params(max_tokens=190), f"s{k}")) for k in range(2)]
    while engine.stats.sampled_tokens < 3:
        await asyncio.sleep(0)
    await engine.close()
    running, queued = await asyncio.gather(*calls)
    assert running.stop is queued.stop is StopReason.CANCELLED
    assert len(running.ids) >= 3
    assert queued.ids == []
    with pytest.raises(EngineError, match="closed"):
        await engine.sample([1], params(), "s")
    with pytest.raises(EngineError, match="closed"):
        await engine.load_weights(MODEL.state_dict(), version=1)


async def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ids = engine_of(), prompt(20, 1)
    with monkeypatch.context() as patch:
        patch.setattr("treadle.engine.slots.draw", lambda *_: 1 / 0)
        results = await asyncio.gather(
            *(engine.sample(ids, params(), f"s{k}") for k in range(6)), return_exceptions=True
        )
    assert [type(result) for result in results] == [EngineError] * 6
    assert_exact(ids, await engine.sample(ids, params(), "s0"))
    await engine.close()


def test_one_engine_serves_several_event_loops() -> None:
    engine, ids = engine_of(), prompt(20, 1)

    async def abandon() -> None:
        asyncio.get_running_loop().create_task(engine.sample(ids, params(max_tokens=150), "abandoned"))
        await asyncio.sleep(0.01)

    first = asyncio.run(engine.sample(ids, params(), "s"))
    asyncio.run(abandon())
    assert asyncio.run(engine.sample(ids, params(), "s")).ids == first.ids
    assert engine.stats.reused_tokens == 19
    asyncio.run(engine.close())


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False, "num_key_value_heads": 6},
        {"head_dim": 10, "rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
)
async def test_variants_of_the_architecture(changes: dict[str, Any]) -> None:
    model, ids = llama(**changes), prompt(70, 1)
    engine = engine_of(model)
    assert_exact(ids, await engine.sample(ids, params(), "s"), model)
    await engine.close()


async def test_bfloat16_stays_near_the_float32_model() -> None:
    """k3 = r - 1 - log r of sampled tokens, r = p_float32 / p_bfloat16: the gap a trainer would see."""
    model = llama(initializer_range=0.05)
    engine, ids = engine_of(model, dtype="bfloat16"), prompt(40, 1)
    sample = await engine.sample(ids, params(max_tokens=64), "s")
    expected = plain_log_probs([*ids, *sample.ids], 64, model)
    logs = [e - (s or 0.0) for e, s in zip(expected, sample.log_probs, strict=True)]
    assert sum(math.expm1(log) - log for log in logs) / 64 < 1e-3
    await engine.close()


async def test_a_saved_folder_gives_the_same_engine(tmp_path: Path) -> None:
    MODEL.save_pretrained(tmp_path)
    engine, ids = SlotEngine.from_folder(tmp_path, slots=2, context=64, dtype="float32", threads=1), prompt(20, 1)
    assert_exact(ids, await engine.sample(ids, params(), "s"))
    await engine.close()


def test_models_it_cannot_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        SlotEngine.from_folder(tmp_path)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=12, n_layer=1, n_head=2))
    gpt2.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="'gpt2'"):
        SlotEngine.from_folder(tmp_path)
    with pytest.raises(UserError, match="'gpt2'"):
        SlotEngine.from_model(gpt2)
    with pytest.raises(UserError, match="rope scaling 'dynamic'"):
        engine_of(llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}))
    with pytest.raises(UserError, match="biases"):
        engine_of(llama(attention_bias=True))
    with pytest.raises(UserError, match="512 positions"):
        engine_of(context=513)
    with pytest.raises(UserError, match="unknown dtype 'float16'"):
        engine_of(dtype="float16")


@pytest.mark.parametrize(
    ("ids", "changes", "message"),
    [
        ([], {}, "empty prompt"),
        ([VOCAB], {}, "outside 0..96"),
        ([-1], {}, "outside 0..96"),
        ([1], {"temperature": -0.5}, "temperature -0.5"),
        ([1], {"temperature": math.nan}, "temperature nan"),
        ([1], {"max_tokens": 0}, "max_tokens 0"),
    ],
)
async def test_bad_requests_say_what_is_wrong(ids: list[int], changes: dict[str, Any], message: str) -> None:
    engine = engine_of()
    with pytest.raises(UserError, match=message):
        await engine.sample(ids, params(**changes), "s")
    await engine.close()
