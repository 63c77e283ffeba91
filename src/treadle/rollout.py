"""The one rollout loop: a policy meets an environment, and what happened becomes a trajectory.

The ids an engine sampled are the ids stored and the ids of the next prompt; nothing is decoded and encoded again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import jsonschema_rs
import msgspec

from treadle.engine.base import Engine, Sample
from treadle.env.base import Environment, Session, ToolResult
from treadle.errors import InfrastructureError, SandboxDead, unknown
from treadle.render.base import Renderer, contract_fingerprint
from treadle.types import (
    Contract,
    End,
    Failure,
    FailureKind,
    Message,
    Node,
    Outcome,
    SamplingParams,
    Source,
    StopReason,
    Task,
    Tool,
    ToolCall,
    Trajectory,
    to_json,
)

HUNG_SECONDS = 600.0  # environments keep their own limits; who gives no answer for so long never will
CLEAN_STOPS = {StopReason.STOP: None, StopReason.LENGTH: End.LENGTH, StopReason.CONTEXT_FULL: End.CONTEXT_FULL}


class Job(msgspec.Struct, frozen=True):
    """One rollout to make. Its id is derived by the caller, so that a resumed stage knows what it already has."""

    id: str
    task: Task
    seed: int
    group: str | None = None


def rollout_seed(run_seed: int, purpose: int | str, task_id: str, member: int) -> int:
    """Reproducible, and distinct for every purpose (a stage, its step, a turn) and every member of every group."""
    text = f"{run_seed}/{purpose}/{task_id}/{member}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:6], "big")


class Rounds:
    """Lets the live sessions sample only together and in a fixed order, so that the same seed gives the same batches.

    It also keeps tool runs and decoding apart, which matters where both want the same few cores. A round is a stride
    of the engine, not a whole reply: a long reply holds nobody up for longer than that.
    """

    def __init__(self, sessions: int) -> None:
        self._live = sessions
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    async def wait(self, order: int) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((order, future))
        self._release()
        await future

    def leave(self) -> None:
        self._live -= 1
        self._release()

    def _release(self) -> None:
        if len(self._waiting) < self._live:
            return
        waiting, self._waiting = sorted(self._waiting, key=lambda pair: pair[0]), []
        for _, future in waiting:
            if not future.done():
                future.set_result(None)


class Loop:
    """Runs episodes of one environment with one engine.

    `policy` names the checkpoint that acts; it is written on every trajectory.
    """

    def __init__(
        self, engine: Engine, renderer: Renderer, environment: Environment, params: SamplingParams, policy: str
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.environment = environment
        self.policy = policy
        self.contract = environment.contract()
        self.tools = {tool.name: tool for tool in self.contract.tools}
        self.params = msgspec.structs.replace(
            params, stop_ids=renderer.stop_ids, max_tokens=self.contract.budget.reply_tokens
        )
        self._fingerprint = contract_fingerprint(self.contract, renderer)

    async def collect(
        self, jobs: Sequence[Job], concurrency: int, on_done: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        """Run every job, at most `concurrency` at once; the result is in the order of the jobs.

        `on_done` is called as each trajectory finishes, so that it can be stored at once. An error that is not one of
        infrastructure (a task that this environment can't play, say) stops all of them, and is raised as it is.
        """
        queue = deque(enumerate(jobs))
        workers = min(concurrency, len(jobs))
        rounds = Rounds(workers)
        done: dict[int, Trajectory] = {}

        async def work() -> None:
            try:
                while queue:
                    order, job = queue.popleft()
                    done[order] = await self.rollout(job, rounds, order)
                    if on_done is not None:
                        on_done(done[order])
            finally:
                rounds.leave()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(work())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [done[order] for order in range(len(jobs))]

    async def rollout(self, job: Job, rounds: Rounds, order: int) -> Trajectory:
        """One episode. Infrastructure failures end it ungraded; they never count as the policy's."""
        started = time.monotonic()
        trajectory = Trajectory(
            id=job.id,
            task_id=job.task.id,
            environment=self.environment.name,
            contract=self._fingerprint,
            source=Source.ROLLOUT,
            policy=self.policy,
            sampling=msgspec.structs.replace(self.params, seed=job.seed),
            group=job.group,
            created=time.time(),
        )
        session: Session | None = None
        stage = "reset"
        try:
            session = await self.environment.start(job.task)
            self._open(trajectory, job.task)
            stage = "episode"
            end = await self._episode(trajectory, session, rounds, order, job.seed)
            trajectory.outcome = Outcome(end=end)
            stage = "grade"
            async with asyncio.timeout(HUNG_SECONDS):
                trajectory.outcome = await session.grade(trajectory)
        except (InfrastructureError, TimeoutError) as error:
            trajectory.outcome = _infrastructure(error, stage, trajectory.outcome.end)
        finally:
            await self.engine.release(job.id)
            if session is not None:
                await session.close()
        trajectory.seconds = time.monotonic() - started
        return trajectory

    async def _episode(self, trajectory: Trajectory, session: Session, rounds: Rounds, order: int, seed: int) -> End:
        budget = self.contract.budget
        for turn in range(budget.turns):
            # What tools took: how long other sessions make this one wait is no fault of the policy's.
            if sum(node.seconds or 0.0 for node in trajectory.nodes if node.message.role == "tool") > budget.seconds:
                return End.TIME_LIMIT
            node, stop = await self._reply(trajectory, rounds, order, seed, turn)
            stopped = CLEAN_STOPS.get(stop, End.INTERRUPTED)
            if stopped is not None:
                return stopped
            if not node.message.tool_calls:
                return act_of(self.contract, node.message.content)
            for call in node.message.tool_calls:
                end = await self._call(trajectory, session, call)
                if end is not None:
                    return end
        return End.TURN_LIMIT

    def _open(self, trajectory: Trajectory, task: Task) -> None:
        for i, message in enumerate(task.messages):
            ids = self.renderer.delta(message, first=i == 0, tools=self.contract.tools, acts=self.contract.acts)
            append(trajectory, message, ids)

    async def _reply(
        self, trajectory: Trajectory, rounds: Rounds, order: int, seed: int, turn: int
    ) -> tuple[Node, StopReason]:
        """Sample one reply, a stride at a time, and add it."""
        header = self.renderer.reply_header()
        context = [*trajectory.tokens(), *header]
        room = self.contract.budget.tokens - len(context)
        limit = min(self.params.max_tokens, room)
        sample = Sample(ids=[], log_probs=[], versions=[], stop=StopReason.LENGTH)
        seconds = 0.0
        while len(sample.ids) < limit:
            await rounds.wait(order)
            at = len(sample.ids)
            # From the job alone: two checkpoints at one task and seed are a pair, whatever their rollouts are called.
            params = msgspec.structs.replace(
                self.params,
                seed=rollout_seed(seed, turn, trajectory.task_id or "", at),
                max_tokens=min(limit - at, self.engine.stride or limit),
            )
            started = time.monotonic()
            part = await self.engine.sample([*context, *sample.ids], params, trajectory.id)
            seconds += time.monotonic() - started
            sample = Sample(
                ids=[*sample.ids, *part.ids],
                log_probs=[*sample.log_probs, *part.log_probs],
                versions=[*sample.versions, *part.versions],
                stop=part.stop,
            )
            if part.stop is not StopReason.LENGTH or len(part.ids) < params.max_tokens:
                break
        node = append_reply(trajectory, self.renderer.parse(sample.ids), header, sample)
        node.seconds = seconds
        stop = sample.stop
        if stop is StopReason.LENGTH and room < self.params.max_tokens:
            stop = node.stop = StopReason.CONTEXT_FULL
        return node, stop

    async def _call(self, trajectory: Trajectory, session: Session, call: ToolCall) -> End | None:
        """Run one call and add its result; returns how the episode ended, if it did."""
        started = time.monotonic()
        result = refuse(self.contract.tools, call)
        if result is None:
            try:
                async with asyncio.timeout(HUNG_SECONDS):
                    result = await session.call(call)
            except TimeoutError:
                raise SandboxDead(f"tool {call.name!r} gave no answer in {HUNG_SECONDS:g} s") from None
        message = Message(role="tool", content=result.content, tool_call_id=call.id, name=call.name)
        node = append(trajectory, message, self.renderer.delta(message, first=False))
        node.failure = result.failure
        node.state = await session.state()
        node.seconds = time.monotonic() - started if result.seconds is None else result.seconds
        if not result.ends:
            return None
        return self.tools[call.name].end or End.ANSWERED


def append(trajectory: Trajectory, message: Message, ids: list[int]) -> Node:
    """Add a message the policy did not write: none of its tokens is trained."""
    node = Node(
        id=len(trajectory.nodes),
        parent=len(trajectory.nodes) - 1 if trajectory.nodes else None,
        message=message,
        tokens=ids,
        mask=[0] * len(ids),
        log_probs=[None] * len(ids),
        versions=[None] * len(ids),
    )
    trajectory.nodes.append(node)
    return node


def append_reply(trajectory: Trajectory, message: Message, header: list[int], sample: Sample) -> Node:
    """Add a sampled reply: header untrained, every sampled id (the stop id too) trained."""
    node = append(trajectory, message, header)
    node.tokens = [*header, *sample.ids]
    node.mask += [1] * len(sample.ids)
    node.log_probs += sample.log_probs
    node.versions += sample.versions
    node.stop = sample.stop
    return node


def act_of(contract: Contract, text: str) -> End:
    """Which text-only act a reply is: the longest marker it begins with."""
    matching = [act for act in contract.acts if text.lstrip().startswith(act.marker)]
    return max(matching, key=lambda act: len(act.marker)).end if matching else End.ANSWERED


def refuse(tools: Sequence[Tool], call: ToolCall) -> ToolResult | None:
    """The error the policy reads when a call can't run: broken text, unknown tool, arguments against the schema."""
    if call.arguments is None:
        return ToolResult(content=f"error: broken call: {call.error}", failure="broken_call")
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        message = unknown("tool", call.name, [tool.name for tool in tools])
        return ToolResult(content=f"error: {message}", failure="unknown_tool")
    error = next(iter(_validator(to_json(tool.parameters)).iter_errors(call.arguments)), None)
    if error is None:
        return None
    return ToolResult(content=f"error: {tool.name}: {error.message}"[:200], failure="bad_arguments")


@lru_cache(maxsize=256)
def _validator(schema: bytes) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(schema.decode())


def _infrastructure(error: BaseException, stage: str, end: End) -> Outcome:
    """Ungraded. An episode that only its grader failed still ended as it ended."""
    message = f"{type(error).__name__}: {error}"
    if stage == "grade":
        return Outcome(end=end, failure=Failure(kind=FailureKind.GRADER, stage=stage, message=message))
    end = End.SANDBOX_DEAD if isinstance(error, SandboxDead) else End.ERROR
    return Outcome(end=end, failure=Failure(kind=FailureKind.INFRASTRUCTURE, stage=stage, message=message))
