"""Engines without a model: a script, or a list of fixed replies, stands in for the policy.

A script has probability one for what it does, so the log-prob of each of its tokens is truly 0.0.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from treadle.engine.base import Sample
from treadle.errors import EngineError
from treadle.render.base import Renderer
from treadle.types import Message, SamplingParams, StopReason

Reply = str | Message
Script = Callable[[str], Reply | Awaitable[Reply]]
"""From the whole context as text, special tokens visible, to the reply. May be asynchronous."""


class ScriptedEngine:
    """An Engine whose replies come from Python. `script(session)` is called once for each session's own Script."""

    stride: int | None = None

    def __init__(
        self, renderer: Renderer, script: Callable[[str], Script], version: int = 0, context: int = 8192
    ) -> None:
        self.context = context
        self._renderer = renderer
        self._make = script
        self._version = version
        self._scripts: dict[str, Script] = {}

    @property
    def version(self) -> int:
        return self._version

    async def sample(self, ids: Sequence[int], params: SamplingParams, session: str) -> Sample:
        """Temperature and seed change nothing: the script decides."""
        if session not in self._scripts:
            self._scripts[session] = self._make(session)
        reply = self._scripts[session](self._renderer.decode(ids))
        if inspect.isawaitable(reply):
            reply = await reply
        text = reply if isinstance(reply, str) else self._renderer.text(reply)
        written = [*self._renderer.encode(text), self._renderer.stop_ids[0]]
        return limited(written, params, room=self.context - len(ids), version=self._version)

    async def release(self, session: str) -> None:
        self._scripts.pop(session, None)

    async def load_weights(self, state: Mapping[str, Any], version: int) -> None:
        """A script has no weights; the version is taken on, so that staleness can be rehearsed."""
        self._version = version

    async def close(self) -> None:
        self._scripts.clear()


class FixedEngine:
    """An Engine that gives each session the replies listed for it, one a request, and keeps the contexts it was asked.

    A reply is a list of ids, sampled with log-prob 0.0 and cut as a model's would be, or a Sample returned as it is.
    Raises EngineError when a session has no reply left.
    """

    def __init__(
        self,
        replies: Mapping[str, Sequence[Sequence[int] | Sample]],
        version: int = 0,
        context: int = 8192,
        stride: int | None = None,
    ) -> None:
        self.context = context
        self.stride = stride
        self.seen: dict[str, list[list[int]]] = {}  # contexts, by session, in the order asked
        self._replies = replies
        self._version = version

    @property
    def version(self) -> int:
        return self._version

    async def sample(self, ids: Sequence[int], params: SamplingParams, session: str) -> Sample:
        replies, seen = self._replies.get(session, ()), self.seen.setdefault(session, [])
        if len(seen) >= len(replies):
            raise EngineError(f"session {session!r} has {len(replies)} fixed replies; request {len(seen) + 1} has none")
        reply = replies[len(seen)]
        seen.append(list(ids))
        if isinstance(reply, Sample):
            return reply
        return limited(reply, params, room=self.context - len(ids), version=self._version)

    async def release(self, session: str) -> None:
        """Nothing is cached; what was asked stays readable in `seen`."""

    async def load_weights(self, state: Mapping[str, Any], version: int) -> None:
        self._version = version

    async def close(self) -> None:
        """Nothing is held."""


def limited(written: Sequence[int], params: SamplingParams, room: int, version: int) -> Sample:
    """What a request yields of `written`: up to its first stop id, its `max_tokens`, or the `room` left in the context.

    `written` is a finished reply, so when nothing cuts it the stop reason is STOP, whatever its last id.
    """
    stop_at = next((i + 1 for i, id_ in enumerate(written) if id_ in params.stop_ids), len(written))
    limit = max(0, min(params.max_tokens, room))
    ids = list(written[: min(stop_at, limit)])
    stop = StopReason.STOP
    if stop_at > limit:
        stop = StopReason.LENGTH if params.max_tokens <= room else StopReason.CONTEXT_FULL
    return Sample(ids=ids, log_probs=[0.0] * len(ids), versions=[version] * len(ids), stop=stop)
