"""Attention over a pack's prefix tries, stretch by stretch: each attends to its ancestors and, causally, to itself.

Nothing is computed between rows that don't see each other, so that a pack may hold many rows at no more than their own
cost. B = 1 pack · H query heads · K key heads · T tokens · D head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from treadle.batch import Pack

NAME = "treadle_runs"


class Stretch(NamedTuple):
    """Tokens start..stop of a pack; `spans` are the ancestors and the stretch itself, as ranges of tokens."""

    start: int
    stop: int
    spans: list[tuple[int, int]]
    mask: Tensor | None  # None: the stretch is a root, and plain causal attention will do


def plan(pack: Pack, dtype: torch.dtype, device: torch.device) -> list[Stretch]:
    """What each stretch attends to. Parents come before their children, and a child follows its parent's last token."""
    by_last_token: dict[int, list[tuple[int, int]]] = {-1: []}
    stretches = []
    for start, stop, parent in pack.runs_R3.tolist():
        before = by_last_token[parent]
        spans = [*before, (start, stop)]
        if before and before[-1][1] == start:
            spans = [*before[:-1], (before[-1][0], stop)]
        by_last_token[stop - 1] = spans
        mask = None
        if before:
            keys = sum(b - a for a, b in spans)
            allowed = torch.ones(stop - start, keys, dtype=torch.bool, device=device).tril(keys - (stop - start))
            mask = torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, float("-inf"))
        stretches.append(Stretch(start, stop, spans, mask))
    return stretches


def attend(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    stretches: list[Stretch] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Signature of transformers' attention interface; gives [B, T, H, D]. Without stretches: one causal sequence."""
    size = query_BHTD.shape[2]
    stretches = stretches or [Stretch(0, size, [(0, size)], None)]
    groups = query_BHTD.shape[1] // key_BKTD.shape[1]
    key_BHTD, value_BHTD = (x.repeat_interleave(groups, dim=1) for x in (key_BKTD, value_BKTD))
    pieces = [
        F.scaled_dot_product_attention(
            query_BHTD[:, :, stretch.start : stretch.stop],
            _gather(key_BHTD, stretch.spans),
            _gather(value_BHTD, stretch.spans),
            attn_mask=stretch.mask,
            is_causal=stretch.mask is None,
            scale=scaling,
        )
        for stretch in stretches
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None


def _gather(x_BHTD: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    parts = [x_BHTD[:, :, start:stop] for start, stop in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


AttentionInterface.register(NAME, attend)
