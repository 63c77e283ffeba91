"""The seam to sampling: an engine turns token ids into sampled token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from treadle.types import SamplingParams, StopReason

SMALLEST_TEMPERATURE = 1e-4  # below it, logits / temperature may overflow; 0 is greedy


class Sample(msgspec.Struct, frozen=True):
    """What one request gave. The three lists have one entry a sampled id; a sampled stop id is included."""

    ids: list[int]
    log_probs: list[
        float | None
    ]  # natural log, log-softmax(logits / temperature); at temperature 0: of the unscaled logits
    versions: list[int | None]
    stop: StopReason


class Engine(Protocol):
    """`sample` is safe to call from many tasks at once; requests are batched inside."""

    context: int  # most tokens a session can hold
    stride: int | None  # tokens of a reply after which sessions that run together wait for each other; None: all

    @property
    def version(self) -> int:
        """Optimizer updates contained in the weights held now."""

    async def sample(self, ids: Sequence[int], params: SamplingParams, session: str) -> Sample:
        """Continue `ids` (the whole context). A session's earlier context is reused up to the longest common prefix."""

    async def release(self, session: str) -> None:
        """Forget a session's cache. Unknown sessions are ignored."""

    async def load_weights(self, state: Mapping[str, Any], version: int) -> None:
        """Replace the weights in place (Hugging Face names); no cache of the old weights survives."""

    async def close(self) -> None: ...
