"""What is served becomes trajectories: requests are matched to the conversations they continue.

A conversation is matched message by message; where it matches, the ids that were sampled stand, and only what is new is
rendered. An episode is stored once, when it ends: with a reply that leaves the client no call to answer (before the
client gets it, so that no crash can lose it), or when the client has been silent too long, or when the server stops.
What a client says later opens a new episode with the old one's nodes as untrained context, so that every sampled token
is trained once.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Sequence

import msgspec

from treadle.engine.base import Engine, Sample
from treadle.errors import UserError
from treadle.pool.scrub import Scrubber
from treadle.render.base import Renderer, contract_fingerprint
from treadle.rollout import CLEAN_STOPS, act_of, append, append_reply, refuse
from treadle.serve.wire import Reply, Request, RequestError, as_sent, echoes
from treadle.store import Store
from treadle.types import (
    Contract,
    Effect,
    End,
    Message,
    Node,
    Outcome,
    SamplingParams,
    Source,
    StopReason,
    Tool,
    Trajectory,
    to_builtins,
)

KEPT = 256  # stored episodes a client may still go on from with the exact ids


class Served:
    """One episode with one client. `sent[i]` is node i's message as the client knows it."""

    def __init__(self, trajectory: Trajectory, tools: tuple[Tool, ...], contract: Contract | None) -> None:
        self.trajectory = trajectory
        self.tools = tools
        self.contract = contract  # whose tools these are
        self.acts = contract.acts if contract else ()
        self.sent: list[Message] = []
        self.lock = asyncio.Lock()  # one reply at a time
        self.waiting = 0  # requests that hold or want the lock
        self.touched = time.monotonic()
        self.end: End | None = None  # set by a final reply
        self.stored = False

    def match(self, messages: Sequence[Message]) -> int | None:
        """The node where the longest known beginning of `messages` ends. Of equals, one not yet answered."""
        nodes = self.trajectory.nodes
        at: set[int | None] = {None}
        for message in messages:
            found: set[int | None] = {n.id for n in nodes if n.parent in at and echoes(self.sent[n.id], message)}
            if not found:
                break
            at = found
        parents = {node.parent for node in nodes}
        return max((node for node in at if node is not None), key=lambda id: (id not in parents, id), default=None)

    def add(self, message: Message, sent: Message, ids: list[int], parent: int | None) -> Node:
        node = append(self.trajectory, message, ids)
        node.parent = parent
        self.sent.append(sent)
        return node

    def fork(self, id: str, leaf: int) -> Served:
        """A new episode that begins with a copy of one path. What was sampled there is trained there, not here."""
        old = self.trajectory
        fresh = msgspec.structs.replace(
            old,
            id=id,
            nodes=[],
            outcome=Outcome(end=End.UNKNOWN),
            signals=[],
            sampling=None,
            lineage=(*old.lineage, old.id),
            created=time.time(),
            seconds=None,
        )
        new = Served(fresh, self.tools, self.contract)
        for node in old.path(leaf):
            parent = len(new.sent) - 1 if new.sent else None
            copy = new.add(node.message, self.sent[node.id], list(node.tokens), parent)
            copy.stop = node.stop
            copy.extra = {"copied_from": f"{old.id}#{node.id}"}
        return new


class Sessions:
    """All conversations of one server. Not for use from several event loops."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        store: Store,
        model: str,
        contract: Contract | None = None,
        idle_seconds: float = 60.0,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.store = store
        self.model = model
        self.contract = contract
        self.idle_seconds = idle_seconds
        self.counts = {"replies": 0, "stored": 0, "not_stored": 0, "rewritten": 0}  # rewritten: replies we never gave
        self._known: dict[str, Served] = {}

    async def reply(self, request: Request) -> Reply:
        """Answer one request. Raises RequestError, or InfrastructureError of the engine; nothing is kept then."""
        messages = request.read_messages()
        tools = request.read_tools(self.contract.tools if self.contract else ())
        served = self._find(messages, tools) or self._new(request, tools)
        served.waiting += 1
        try:
            async with served.lock:
                reply = await self._answer(served, messages, request)
        finally:
            served.waiting -= 1
        if served.end is not None and served.waiting == 0:
            await self._try_to_store(served, served.end)
        return reply

    async def sweep(self) -> None:
        """Store what has gone silent, and forget the oldest of what is stored."""
        now = time.monotonic()
        for served in list(self._known.values()):
            if served.waiting == 0 and now - served.touched >= self.idle_seconds:
                await self._try_to_store(served, served.end or End.INTERRUPTED)
        stored = sorted((served for served in self._known.values() if served.stored), key=lambda served: served.touched)
        for served in stored[:-KEPT]:
            del self._known[served.trajectory.id]

    async def close(self) -> None:
        """Store everything, as the server stops."""
        self.idle_seconds = 0.0
        await self.sweep()

    def health(self) -> dict[str, object]:
        open_now = sum(not served.stored for served in self._known.values())
        return {"status": "ok", "model": self.model, "version": self.engine.version, "open": open_now, **self.counts}

    # ------------------------------------------------------------ which conversation

    def _find(self, messages: Sequence[Message], tools: tuple[Tool, ...]) -> Served | None:
        """The episode that holds the longest beginning of `messages` with at least one reply in it."""
        best: tuple[int, bool, float] = (0, False, 0.0)
        found: tuple[Served, int] | None = None
        for served in self._known.values():
            leaf = served.match(messages) if served.tools == tools else None
            if leaf is None:
                continue
            path = served.trajectory.path(leaf)
            rank = (len(path), leaf == len(served.sent) - 1, served.touched)
            if rank > best and any(node.message.role == "assistant" for node in path):
                best, found = rank, (served, leaf)
        if found is None:
            return None
        served, leaf = found
        return served.fork(uuid.uuid4().hex, leaf) if served.stored else served

    def _new(self, request: Request, tools: tuple[Tool, ...]) -> Served:
        contract = self.contract if self.contract and self.contract.tools == tools else None
        trajectory = Trajectory(
            id=uuid.uuid4().hex,
            task_id=None,
            environment=contract.environment if contract else None,
            contract=contract_fingerprint(contract, self.renderer) if contract else None,
            source=Source.SERVED,
            policy=self.model,
            labels=request.labels(),
            created=time.time(),
            extra={"tools": to_builtins(tools)} if tools else {},
        )
        return Served(trajectory, tools, contract)

    # ------------------------------------------------------------ one reply

    async def _answer(self, served: Served, messages: Sequence[Message], request: Request) -> Reply:
        started = time.monotonic()
        trajectory = served.trajectory
        leaf = served.match(messages)
        known = len(trajectory.path(leaf)) if leaf is not None else 0
        new = [(m, self._render(served, m, first=i == 0)) for i, m in enumerate(messages[known:], known)]
        header = self.renderer.reply_header()
        if leaf is not None and trajectory.nodes[leaf].stop not in (None, StopReason.STOP):
            new[0][1].insert(0, self.renderer.stop_ids[0])  # a reply that was cut short never closed its turn
        context = [*(trajectory.tokens(leaf) if known else ()), *(id for _, ids in new for id in ids), *header]
        params = self._params(request, served, len(context))
        sample = await self.engine.sample(context, params, trajectory.id)
        if sample.stop is StopReason.LENGTH and len(context) + len(sample.ids) >= self.engine.context:
            sample = msgspec.structs.replace(sample, stop=StopReason.CONTEXT_FULL)
        self.counts["replies"] += 1
        self.counts["rewritten"] += any(message.role == "assistant" for message, _ in new)
        for message, ids in new:
            leaf = served.add(message, message, ids, leaf).id
        message = _unique_ids(self.renderer.parse(sample.ids))
        sent = as_sent(message, self._written(sample))
        served.sent.append(sent)
        node = append_reply(trajectory, message, header, sample)
        node.parent = leaf
        node.seconds = time.monotonic() - started
        self._note_sampling(trajectory, node, params)
        served.end = self._final(served, message, sample)
        served.touched = time.monotonic()
        self._known[trajectory.id] = served
        return Reply(
            id=f"chatcmpl-{trajectory.id}-{node.id}",
            model=self.model,
            created=int(time.time()),
            session=trajectory.id,
            message=sent,
            sample=sample,
            prompt_tokens=len(context),
        )

    def _render(self, served: Served, message: Message, first: bool) -> list[int]:
        try:
            return self.renderer.delta(message, first=first, tools=served.tools, acts=served.acts)
        except UserError as error:
            raise RequestError(str(error), "messages") from None

    def _params(self, request: Request, served: Served, used: int) -> SamplingParams:
        room = self.engine.context - used
        if room < 1:
            message = f"the conversation has {used} tokens, the model's context holds {self.engine.context}: shorten it"
            raise RequestError(message, "messages", code="context_length_exceeded")
        promised = served.contract.budget.reply_tokens if served.contract else room
        wanted = request.max_completion_tokens or request.max_tokens or promised
        return SamplingParams(
            temperature=1.0 if request.temperature is None else request.temperature,
            max_tokens=min(wanted, room),
            stop_ids=self.renderer.stop_ids,
            seed=request.seed,
        )

    def _written(self, sample: Sample) -> str:
        ids = sample.ids[:-1] if sample.stop is StopReason.STOP else sample.ids
        return self.renderer.decode(ids)

    def _note_sampling(self, trajectory: Trajectory, node: Node, params: SamplingParams) -> None:
        """The first reply's parameters stand for all; a reply sampled otherwise says so itself."""
        if trajectory.sampling is None:
            trajectory.sampling = params
        elif trajectory.sampling != params:
            node.extra["sampling"] = to_builtins(params)

    # ------------------------------------------------------------ how it ended

    def _final(self, served: Served, message: Message, sample: Sample) -> End | None:
        """How a reply ends the episode, or None when the client has calls to run and to answer."""
        if sample.stop is not StopReason.STOP:
            return CLEAN_STOPS.get(sample.stop) or End.INTERRUPTED
        if not message.tool_calls:
            return act_of(served.contract, message.content) if served.contract else End.ANSWERED
        if any(call.arguments is None for call in message.tool_calls):
            return End.INTERRUPTED  # broken: the client has text, and nothing to run
        tools = {tool.name: tool for tool in served.tools}
        called = [tools[call.name] for call in message.tool_calls if refuse(served.tools, call) is None]
        return next((tool.end or End.ANSWERED for tool in called if tool.effect is Effect.END), None)

    async def _try_to_store(self, served: Served, end: End) -> None:
        """What can't be stored now is counted, told, and tried again after the next silence; it holds up no other."""
        try:
            await self._store(served, end)
        except Exception as error:  # whatever is wrong with one conversation, the others go on
            served.touched = time.monotonic()
            self.counts["not_stored"] += 1
            print(f"treadle: session {served.trajectory.id} could not be stored: {error}", file=sys.stderr)

    async def _store(self, served: Served, end: End) -> None:
        if served.stored:
            return
        trajectory = served.trajectory
        trajectory.outcome = Outcome(end=end)
        trajectory.seconds = time.time() - trajectory.created if trajectory.created is not None else None
        self.store.add_trajectory(Scrubber().trajectory(trajectory))  # a stored secret would come back in training
        served.stored = True
        self.counts["stored"] += 1
        await self.engine.release(trajectory.id)


def _unique_ids(message: Message) -> Message:
    """A parser numbers calls within one reply; on the wire an id names one call of one conversation."""
    calls = tuple(msgspec.structs.replace(call, id=f"call_{uuid.uuid4().hex[:24]}") for call in message.tool_calls)
    return msgspec.structs.replace(message, tool_calls=calls)
