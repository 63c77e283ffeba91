"""The embedded engine: continuous batching over slots that keep a session's keys and values between turns.

Each step reads admit -> plan -> forward -> sample -> finish. Prefill and decode are one thing: every running request
has some ids whose keys are not in its slot yet, one while it decodes and many when it is new, when its session's
context grew by a tool result, or after new weights emptied the cache.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treadle.engine.base import SMALLEST_TEMPERATURE, Sample
from treadle.engine.llama import LlamaDecoder, Segment, draw
from treadle.errors import EngineError, UserError
from treadle.models import load_model, product_dtype
from treadle.types import SamplingParams, StopReason

PREFILL_TOKENS = 1024  # most context tokens computed a step, so that decoding requests are not held up for long
TICKS = 4  # of the event loop between two steps: a request over HTTP needs several to get here
STRIDE = 16  # short beside an episode, long beside what a round costs
MIN_SHARED = 16  # shorter shared prefixes are cheaper to compute again than to wait for


class SlotStats(msgspec.Struct):
    """Counts since the engine was made."""

    prefill_tokens: int = 0  # context tokens computed
    reused_tokens: int = 0  # context tokens found in the request's own slot
    copied_tokens: int = 0  # context tokens copied from another slot
    decode_steps: int = 0
    sampled_tokens: int = 0
    evictions: int = 0  # idle sessions that lost their slot
    cancelled: int = 0
    seconds: float = 0.0  # spent in steps


@dataclass(eq=False)
class _Request:
    ids: list[int]  # prompt, then what was sampled
    params: SamplingParams
    session: str
    future: asyncio.Future[Sample]
    noise: random.Random
    log_probs: list[float | None] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    stop: StopReason | None = None
    slot: int = -1

    def sample(self, stop: StopReason) -> Sample:
        count = len(self.versions)
        return Sample(self.ids[len(self.ids) - count :], self.log_probs, self.versions, stop)


class SlotEngine:
    """Samples from a Llama-architecture model held in this process; implements `treadle.engine.base.Engine`.

    `slots` sessions of at most `context` tokens are kept; more wait, or take the place of the idle session used least
    recently. `dtype` "auto" is bfloat16 where the hardware multiplies it fast and float32 elsewhere. `threads` sets
    torch's thread count for the process. The sampled ids depend on the request's seed, not on the requests beside it.
    All calls come from one thread, whose event loop waits while a step runs.
    """

    def __init__(
        self,
        config: Any,
        state: Mapping[str, Tensor],
        *,
        slots: int = 64,
        context: int = 1024,
        dtype: str = "auto",
        device: str = "cpu",
        version: int = 0,
        threads: int | None = None,
    ) -> None:
        if slots < 1 or context < 2:
            raise UserError(f"slots {slots} and context {context} must be at least 1 and 2")
        if threads:
            torch.set_num_threads(threads)
        self.context = context
        self.stride: int | None = STRIDE
        self.stats = SlotStats()
        self._version = version
        self._decoder = LlamaDecoder(config, slots, context, product_dtype(dtype, device), device)
        self._decoder.load(state)
        self._tokens: npt.NDArray[np.int64] = np.full((slots, context), -1)  # ids whose keys a slot holds or will hold
        self._held = np.zeros(slots, dtype=np.int64)  # how many of them it holds
        self._planned = np.zeros(slots, dtype=np.int64)  # how many it will hold
        self._used = [0] * slots
        self._clock = 0
        self._sessions: dict[str, int] = {}
        self._queue: list[_Request] = []
        self._active: list[_Request] = []
        self._inbox: list[_Request] = []
        self._open: set[_Request] = set()
        self._driver: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    def from_model(cls, model: Any, **options: Any) -> Self:
        """From a `transformers` model; its weights are copied."""
        return cls(model.config, model.state_dict(), **options)

    @classmethod
    def from_folder(cls, folder: str | Path, **options: Any) -> Self:
        """From a saved Hugging Face folder."""
        return cls.from_model(load_model(Path(folder)), **options)

    @property
    def version(self) -> int:
        return self._version

    # ------------------------------------------------------------ requests

    async def sample(self, ids: Sequence[int], params: SamplingParams, session: str) -> Sample:
        """Continue `ids`. One request of a session runs at a time. A prompt that fills the context gives no ids."""
        if self._closed:
            raise EngineError("the engine is closed")
        _check_request(ids, params, self._decoder.vocab)
        if len(ids) >= self.context:
            return Sample([], [], [], StopReason.CONTEXT_FULL)
        loop = asyncio.get_running_loop()
        noise = random.Random(None if params.seed is None else f"{params.seed}")
        request = _Request(list(ids), params, session, loop.create_future(), noise)
        self._inbox.append(request)
        self._open.add(request)
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            self._driver = loop.create_task(self._drive())
            self._driver.add_done_callback(self._driver_ended)
        try:
            return await request.future
        except asyncio.CancelledError:
            request.stop = StopReason.CANCELLED
            raise
        finally:
            self._open.discard(request)

    async def release(self, session: str) -> None:
        """Free the session's slot; what it holds stays of use to later prompts that begin alike."""
        self._sessions.pop(session, None)

    async def load_weights(self, state: Mapping[str, Any], version: int) -> None:
        """Replace the weights. Requests in flight go on with the new ones: their whole context is computed again, and
        each token keeps the version that sampled it.
        """
        if self._closed:
            raise EngineError("the engine is closed")
        self._load(state, version)

    async def close(self) -> None:
        """End what is running: its callers get what was sampled so far, with stop CANCELLED."""
        self._closed = True
        if self._driver and not self._driver.done():
            await self._driver

    async def _drive(self) -> None:
        """Step while there is work. Requests of one tick of the event loop are admitted together, in order.

        Steps run in the event loop's own thread. A second thread that uses torch has a second pool of OpenMP threads,
        and libgomp lets both pools sleep at every barrier once they hold more threads than there are processors.
        """
        while self._open:
            arrived, self._inbox = self._inbox, []
            for request, sample in self._step(arrived):
                if not request.future.done():
                    request.future.set_result(sample)
            for _ in range(TICKS):  # callers just answered may ask for their next turn, and new ones be heard
                await asyncio.sleep(0)

    def _driver_ended(self, driver: asyncio.Task[None]) -> None:
        """A failed step fails all that was asked for, so that nothing waits for ever."""
        error = None if driver.cancelled() else driver.exception()
        if error is None and not driver.cancelled():
            return
        for request in self._open:
            request.stop = StopReason.CANCELLED
            if not request.future.done():
                request.future.set_exception(EngineError(f"sampling stopped: {error!r}"))
        if error is not None:
            self._forget()

    # ------------------------------------------------------------ one step

    def _step(self, arrived: list[_Request]) -> list[tuple[_Request, Sample]]:
        started = time.perf_counter()
        self._queue += arrived
        finished = self._finish()  # those cancelled since the last step
        self._admit()
        planned = self._plan()
        if planned:
            self._sample(*self._forward(planned))
        finished += self._finish()
        self.stats.seconds += time.perf_counter() - started
        return finished

    def _admit(self) -> None:
        """Give slots to waiting requests, first come first served; one whose session is busy waits without blocking."""
        waiting = []
        for at, request in enumerate(self._queue):
            if any(other.session == request.session for other in self._active):
                waiting.append(request)
                continue
            slot = self._slot_for(request.session)
            if slot is None:
                waiting += self._queue[at:]
                break
            self._place(request, slot)
        self._queue = waiting

    def _slot_for(self, session: str) -> int | None:
        """The session's own slot, or the first free one, or that of the idle session used least recently."""
        if session in self._sessions:
            return self._sessions[session]
        running = {request.slot for request in self._active}
        taken = running.union(self._sessions.values())
        free = [slot for slot in range(len(self._used)) if slot not in taken]
        if free:
            return free[0]  # the lowest, so that active slots stay neighbours
        idle = [(self._used[slot], slot, name) for name, slot in self._sessions.items() if slot not in running]
        if not idle:
            return None
        _, slot, evicted = min(idle)
        del self._sessions[evicted]
        self.stats.evictions += 1
        return slot

    def _place(self, request: _Request, slot: int) -> None:
        """Start a request on a slot, keeping what the slot already holds of its context."""
        length = len(request.ids)
        kept = min(int(self._common(request.ids, self._held)[slot]), length - 1)
        self._tokens[slot, :length] = request.ids
        self._held[slot], self._planned[slot] = kept, length
        self._sessions[request.session] = request.slot = slot
        self._active.append(request)
        self.stats.reused_tokens += kept

    def _common(self, ids: list[int], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """For each slot, how many of its first `lengths` ids are the first of `ids`."""
        differs = self._tokens[:, : len(ids)] != np.array(ids)
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), len(ids))
        return np.minimum(first, lengths)

    def _plan(self) -> list[tuple[_Request, Segment]]:
        """What to compute in this step: the next token of each decoding request, and context up to PREFILL_TOKENS."""
        planned, budget = [], PREFILL_TOKENS
        for at, request in enumerate(self._active):
            self._adopt(request)
            held = int(self._held[request.slot])
            missing = len(request.ids) - held
            if missing > 1 and self._shared_soon(request, self._active[:at]):
                continue
            count = missing if missing == 1 else min(missing, budget)
            if count:
                planned.append((request, Segment(request.slot, held, count)))
                budget -= count if missing > 1 else 0
        return sorted(planned, key=lambda item: (item[1].count > 1, item[1].slot))

    def _adopt(self, request: _Request) -> None:
        """Copy keys of a longer shared prefix from the slot that holds it."""
        held, last = int(self._held[request.slot]), len(request.ids) - 1
        if last - held < MIN_SHARED:
            return
        common = self._common(request.ids, self._held)
        source = int(common.argmax())
        shared = min(int(common[source]), last)
        if shared - held >= MIN_SHARED:
            self._decoder.copy(source, request.slot, held, shared)
            self._held[request.slot] = shared
            self.stats.copied_tokens += shared - held

    def _shared_soon(self, request: _Request, earlier: list[_Request]) -> bool:
        """Whether an earlier request will compute a prefix this one can copy: a group's prompt is computed once."""
        held = int(self._held[request.slot])
        common = self._common(request.ids, self._planned)
        return any(min(common[other.slot], len(request.ids) - 1) - held >= MIN_SHARED for other in earlier)

    def _forward(self, planned: list[tuple[_Request, Segment]]) -> tuple[list[_Request], Tensor]:
        """The requests whose whole context is now held, and their logits."""
        tokens, ready, decoding = [], [], 0
        for at, (request, segment) in enumerate(planned):
            tokens += request.ids[segment.start : segment.end]
            decoding += segment.count == 1 and bool(request.versions)
            if segment.end == len(request.ids):
                ready.append(at)
        logits = self._decoder.forward(tokens, [segment for _, segment in planned], ready, self._alike)
        for _, segment in planned:
            self._held[segment.slot] = segment.end
        self.stats.prefill_tokens += len(tokens) - decoding
        self.stats.decode_steps += decoding > 0
        return [planned[at][0] for at in ready], logits

    def _alike(self, slots: slice) -> int:
        """How many of the first ids held are the same in all these slots."""
        ids = self._tokens[slots, : self._held[slots].min()]
        differs = (ids != ids[0]).any(axis=0)
        return int(differs.argmax()) if differs.any() else len(differs)

    def _sample(self, requests: list[_Request], logits: Tensor) -> None:
        if not requests:
            return
        uniforms = [request.noise.random() for request in requests]
        ids, log_probs = draw(logits, [request.params.temperature for request in requests], uniforms)
        for request, token, log_prob in zip(requests, ids, log_probs, strict=True):
            self._tokens[request.slot, len(request.ids)] = token
            request.ids.append(token)
            request.log_probs.append(log_prob)
            request.versions.append(self._version)
            self._planned[request.slot] = len(request.ids)
            request.stop = request.stop or self._stop_reason(request)
        self.stats.sampled_tokens += len(requests)

    def _stop_reason(self, request: _Request) -> StopReason | None:
        if request.ids[-1] in request.params.stop_ids:
            return StopReason.STOP
        if len(request.versions) >= request.params.max_tokens:
            return StopReason.LENGTH
        return StopReason.CONTEXT_FULL if len(request.ids) >= self.context else None

    def _finish(self) -> list[tuple[_Request, Sample]]:
        """Take out the requests that ended; their slots stay with their sessions."""
        finished = []
        for request in (*self._active, *self._queue):
            stop = StopReason.CANCELLED if self._closed else request.stop
            if stop is None:
                continue
            if request.slot >= 0:
                self._clock += 1
                self._used[request.slot] = self._clock
                self._planned[request.slot] = self._held[request.slot]
            self.stats.cancelled += stop is StopReason.CANCELLED
            finished.append((request, request.sample(stop)))
        gone = {request for request, _ in finished}
        self._active = [request for request in self._active if request not in gone]
        self._queue = [request for request in self._queue if request not in gone]
        return finished

    def _load(self, state: Mapping[str, Any], version: int) -> None:
        self._decoder.load(state)
        self._version = version
        self._held[:] = 0  # keys of the old weights must never meet the new ones

    def _forget(self) -> None:
        """After a failed step: no request and no cache survives."""
        self._active, self._queue = [], []
        self._sessions.clear()
        self._held[:] = self._planned[:] = 0


def _check_request(ids: Sequence[int], params: SamplingParams, vocab: int) -> None:
    if not ids:
        raise UserError("an empty prompt can't be continued: give at least one id")
    if min(ids) < 0 or max(ids) >= vocab:
        raise UserError(f"the prompt holds an id outside 0..{vocab - 1}: {min(ids)}..{max(ids)}; wrong tokenizer?")
    if not (
        math.isfinite(params.temperature) and (params.temperature == 0 or params.temperature >= SMALLEST_TEMPERATURE)
    ):
        raise UserError(f"temperature {params.temperature} must be 0 (greedy) or from {SMALLEST_TEMPERATURE:g} upwards")
    if params.max_tokens < 1:
        raise UserError(f"max_tokens {params.max_tokens} must be at least 1")
