"""A decoder for Llama-architecture models over a static key-value cache, for the slot engine.

Tokens of all sequences are packed into one row dimension, so that prefill and decode share one forward and nothing is
padded but the keys that neighbouring slots read together.

Dimensions: N packed tokens, S sequences, H query heads, K key-value heads, G = H / K, D head size, L keys read,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.errors import UserError, unknown

BUCKET = 64  # keys read by neighbouring slots are rounded up to this, so that few shapes occur
BLOCK_COST = 64  # what one more attention call costs, in keys read
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose frequencies do not depend on the length seen


@dataclass(frozen=True)
class Segment:
    """`count` tokens of one sequence, to be written to `slot` from position `start` on."""

    slot: int
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class _Block:
    """Packed rows that attend together: one token for each of neighbouring slots, or many tokens of one slot."""

    rows: slice
    slots: slice
    length: int
    mask: Tensor | None
    causal: bool
    shared: int = 0  # the first keys, alike in all the slots: read once, out of the first slot


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class LlamaDecoder:
    """Fused weights and the cache `keys`, `values` [layers, slots, K, context, D]. Not thread-safe."""

    def __init__(self, config: Any, slots: int, context: int, dtype: torch.dtype, device: str) -> None:
        _check(config, context)
        self.dtype, self.device, self.context = dtype, torch.device(device), context
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = config.head_dim or config.hidden_size // self.heads
        self.vocab: int = config.vocab_size
        self.eps: float = config.rms_norm_eps
        self.tied: bool = config.tie_word_embeddings
        self._shapes = _expected_shapes(config, self.head_dim)
        self._cos, self._sin = self._rope_tables(config)
        self._written = [0] * slots  # end of what was ever written to each slot
        cache = (self.layers, slots, self.kv_heads, context, self.head_dim)
        with torch.inference_mode():
            self.keys = torch.zeros(cache, dtype=dtype, device=self.device)
            self.values = torch.zeros(cache, dtype=dtype, device=self.device)
            empty = {name: torch.empty(shape, dtype=dtype) for name, shape in self._shapes.items()}
            self._fuse(empty)

    def _rope_tables(self, config: Any) -> tuple[Tensor, Tensor]:
        """cos and sign-carrying sin [context, 1, D]: rotate(x) = x cos + roll(x, D/2) sin."""
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(self.context)[None])
        sign = torch.ones(self.head_dim)
        sign[: self.head_dim // 2] = -1
        tables = (cos[0, :, None], (sin[0] * sign)[:, None])
        return tables[0].to(self.device, self.dtype), tables[1].to(self.device, self.dtype)

    # ------------------------------------------------------------ weights

    @torch.inference_mode()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy Hugging Face weights in place. Nothing changes if a name or a shape does not fit (UserError)."""
        extra = sorted(set(state) - set(self._shapes) - {"lm_head.weight"})
        missing = sorted(set(self._shapes) - set(state))
        if extra or missing:
            raise UserError(f"weights do not fit the model: missing {missing[:3]}, unexpected {extra[:3]}")
        for name, shape in self._shapes.items():
            if tuple(state[name].shape) != shape:
                raise UserError(f"weights do not fit the model: {name} is {tuple(state[name].shape)}, not {shape}")
        for name, parts in self._targets.items():
            parts.copy_(state[name])
        # Keys of padding are masked, but 0 × NaN is NaN: what diverged weights left must not reach healthy ones.
        for slot, end in enumerate(self._written):
            self.keys[:, slot, :, :end].zero_()
            self.values[:, slot, :, :end].zero_()
        self._written = [0] * len(self._written)

    def _fuse(self, state: Mapping[str, Tensor]) -> None:
        """Allocate the fused matrices and remember which of their rows hold which named weight."""
        self._targets: dict[str, Tensor] = {}

        def fused(*names: str) -> Tensor:
            whole = torch.cat([state[f"{name}.weight"] for name in names]).to(self.device)
            rows = torch.split(whole, [state[f"{name}.weight"].shape[0] for name in names])
            self._targets.update((f"{name}.weight", part) for name, part in zip(names, rows, strict=True))
            return whole

        self._layers = []
        for at in range(self.layers):
            layer, attention, mlp = (f"model.layers.{at}{part}" for part in ("", ".self_attn", ".mlp"))
            self._layers.append(
                _Layer(
                    attention_norm=fused(f"{layer}.input_layernorm"),
                    qkv=fused(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
                    out=fused(f"{attention}.o_proj"),
                    mlp_norm=fused(f"{layer}.post_attention_layernorm"),
                    gate_up=fused(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                    down=fused(f"{mlp}.down_proj"),
                )
            )
        self._embedding = fused("model.embed_tokens")
        self._norm = fused("model.norm")
        self._head = self._embedding if self.tied else fused("lm_head")

    # ------------------------------------------------------------ cache and forward

    @torch.inference_mode()
    def copy(self, source: int, target: int, begin: int, end: int) -> None:
        """Copy the cache of positions [begin, end) between slots."""
        for cache in (self.keys, self.values):
            cache[:, target, :, begin:end].copy_(cache[:, source, :, begin:end])
        self._written[target] = max(self._written[target], end)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int],
        segments: Sequence[Segment],
        wanted: Sequence[int],
        shared: Callable[[slice], int] = lambda slots: 0,
    ) -> Tensor:
        """Write the segments' packed `tokens` to the cache; float32 logits [len(wanted), V] after the last token of
        each segment whose index is in `wanted`. Single-token segments should come first, in slot order.
        `shared(slots)` tells how many of the first keys held are the same in all those slots.
        """
        positions = [p for segment in segments for p in range(segment.start, segment.end)]
        slots = [segment.slot for segment in segments for _ in range(segment.count)]
        position_N, slot_N, token_N = (torch.tensor(x, device=self.device) for x in (positions, slots, tokens))
        rope = (self._cos[position_N], self._sin[position_N])
        blocks = self._blocks(segments, shared)
        for segment in segments:
            self._written[segment.slot] = max(self._written[segment.slot], segment.end)
        x = F.embedding(token_N, self._embedding)
        for at, layer in enumerate(self._layers):
            normed = F.rms_norm(x, x.shape[-1:], layer.attention_norm, self.eps)
            qkv = F.linear(normed, layer.qkv).view(len(tokens), -1, self.head_dim)
            x = x + F.linear(self._attend(at, qkv, rope, slot_N, position_N, blocks), layer.out)
            normed = F.rms_norm(x, x.shape[-1:], layer.mlp_norm, self.eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate).mul_(up), layer.down)
        ends = torch.tensor([segment.count for segment in segments]).cumsum(0)[list(wanted)] - 1
        last = F.rms_norm(x[ends.to(self.device)], x.shape[-1:], self._norm, self.eps)
        return F.linear(last, self._head).float()

    def _attend(
        self,
        at: int,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        slot_N: Tensor,
        position_N: Tensor,
        blocks: list[_Block],
    ) -> Tensor:
        """Rotate, store this layer's keys and values, and attend: [N, H + 2K, D] -> [N, H × D]."""
        cos, sin = rope
        qk, value = torch.split(qkv, [self.heads + self.kv_heads, self.kv_heads], dim=1)
        qk = (qk * cos).addcmul_(qk.roll(self.head_dim // 2, -1), sin)
        query, key = torch.split(qk, [self.heads, self.kv_heads], dim=1)
        self.keys[at, slot_N, :, position_N] = key
        self.values[at, slot_N, :, position_N] = value
        out = torch.empty_like(query)
        for block in blocks:
            out[block.rows] = self._attend_block(query[block.rows], self.keys[at], self.values[at], block)
        return out.flatten(1)

    def _attend_block(self, query: Tensor, keys: Tensor, values: Tensor, block: _Block) -> Tensor:
        """[n, H, D] -> [n, H, D]. The G query heads of a key-value head read it without repeating it."""
        grouped = query.reshape(len(query), self.kv_heads, -1, self.head_dim)  # [n, K, G, D]
        key, value = keys[block.slots, :, : block.length], values[block.slots, :, : block.length]
        if block.shared:
            return _attend_shared(grouped, key, value, block).flatten(1, 2)
        if not block.causal:
            return F.scaled_dot_product_attention(grouped, key, value, attn_mask=block.mask).flatten(1, 2)
        shape = (-1, grouped.shape[2], -1, -1)
        key, value = key[0, :, None].expand(shape), value[0, :, None].expand(shape)
        q = grouped.permute(1, 2, 0, 3)  # [K, G, n, D]
        out = F.scaled_dot_product_attention(q, key, value, attn_mask=block.mask, is_causal=block.mask is None)
        return out.permute(2, 0, 1, 3).flatten(1, 2)

    def _blocks(self, segments: Sequence[Segment], shared: Callable[[slice], int]) -> list[_Block]:
        """Join neighbouring slots while that reads fewer keys than reading them apart."""
        blocks, row, at = [], 0, 0
        while at < len(segments):
            chosen, prefix, stop = [segments[at]], 0, at + 1
            while stop < len(segments) and _follows(chosen[-1], segments[stop]):
                longer = [*chosen, segments[stop]]
                alike = shared(_slots(longer)) if self.device.type == "cpu" else 0
                alike = alike if alike >= BUCKET else 0
                apart = _keys_read(chosen, prefix) + segments[stop].end + BLOCK_COST
                if _keys_read(longer, alike) > apart:
                    break
                chosen, prefix, stop = longer, alike, stop + 1
            single = chosen[0].count == 1
            blocks.append(self._neighbours(chosen, row, prefix) if single else self._run(chosen[0], row))
            row, at = row + sum(segment.count for segment in chosen), stop
        return blocks

    def _neighbours(self, segments: Sequence[Segment], row: int, shared: int) -> _Block:
        ends = [segment.end for segment in segments]
        rows, slots = slice(row, row + len(segments)), _slots(segments)
        if min(ends) == max(ends):
            return _Block(rows, slots, ends[0], None, causal=False, shared=shared)
        length = min(-(-max(ends) // BUCKET) * BUCKET, self.context)
        visible = torch.arange(shared, length) < torch.tensor(ends)[:, None]
        mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))[:, None, None]
        mask = mask.to(self.device, self.dtype).expand(-1, self.kv_heads, self.heads // self.kv_heads, -1)
        return _Block(rows, slots, length, mask, causal=False, shared=shared)

    def _run(self, segment: Segment, row: int) -> _Block:
        rows, slots = slice(row, row + segment.count), slice(segment.slot, segment.slot + 1)
        mask = None
        if segment.start:
            visible = torch.arange(segment.end) <= torch.arange(segment.start, segment.end)[:, None]
            mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf")).to(self.device, self.dtype)
        return _Block(rows, slots, segment.end, mask, causal=True)


def draw(logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """Sample one id a row: (ids, natural log-probs of log-softmax(logits / temperature)), in float32, no filter.

    logits [S, V] float32; `uniforms` in [0, 1) are each row's only randomness (inverse of the cumulative distribution,
    summed in float64). Temperature 0: the most likely id, with its log-prob at temperature 1.
    """
    greedy = [temperature == 0 for temperature in temperatures]
    scale = torch.tensor([t or 1.0 for t in temperatures], device=logits.device)[:, None]
    log_probs = torch.log_softmax(logits / scale, dim=-1)
    cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)
    wanted = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, wanted, right=True).clamp_(max=logits.shape[-1] - 1)
    ids = torch.where(torch.tensor(greedy, device=logits.device)[:, None], logits.argmax(-1, keepdim=True), ids)
    return ids[:, 0].tolist(), log_probs.gather(1, ids)[:, 0].tolist()


def _attend_shared(query: Tensor, key: Tensor, value: Tensor, block: _Block) -> Tensor:
    """[n, K, G, D] over keys [n, K, L, D] whose first `shared` are alike: those are read once for all n sequences.

    The two parts are merged by their log-sum-exp (a softmax over a union is the weighted mean of the softmaxes).
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    count, heads, group, size = query.shape
    together = query.transpose(0, 1).reshape(1, heads, count * group, size)
    common, common_weight = attend(together, key[:1, :, : block.shared], value[:1, :, : block.shared])
    own, own_weight = attend(query, key[:, :, block.shared :], value[:, :, block.shared :], attn_mask=block.mask)
    common = common.reshape(heads, count, group, size).transpose(0, 1)
    common_weight = common_weight.reshape(heads, count, group).transpose(0, 1)
    return torch.lerp(own, common, torch.sigmoid(common_weight - own_weight)[..., None].to(own.dtype))


def _follows(before: Segment, after: Segment) -> bool:
    return before.count == after.count == 1 and after.slot == before.slot + 1


def _slots(segments: Sequence[Segment]) -> slice:
    return slice(segments[0].slot, segments[-1].slot + 1)


def _keys_read(segments: Sequence[Segment], shared: int) -> int:
    return shared + len(segments) * (max(segment.end for segment in segments) - shared)


def _check(config: Any, context: int) -> None:
    if config.model_type != "llama":
        raise UserError(f"the slot engine runs 'llama' models, not {config.model_type!r}: choose another model.base")
    if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        raise UserError(
            "the slot engine runs Llama models without biases and with SiLU, and this one has "
            f"attention_bias = {config.attention_bias}, mlp_bias = {config.mlp_bias} and "
            f"hidden_act = {config.hidden_act!r}: choose another model.base"
        )
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise UserError(unknown("rope scaling", rope, ROPE_TYPES))
    if context > config.max_position_embeddings:
        raise UserError(
            f"context {context} is more than the model's {config.max_position_embeddings} positions: lower it"
        )


def _expected_shapes(config: Any, head_dim: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for at in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{at}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes
