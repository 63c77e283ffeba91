"""Admission: whether a task's verifier can be trusted, shown by playing scripted episodes through the environment.

The right answer gets 1, doing nothing 0, garbage 0, each thrice the same, and the answer is not in the prompt.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from treadle.env.base import Environment
from treadle.rollout import act_of, append
from treadle.types import (
    Contract,
    End,
    Message,
    Outcome,
    Record,
    Source,
    Task,
    ToolCall,
    Trajectory,
)


class Probe(msgspec.Struct, frozen=True):
    """A scripted episode and the reward it must get."""

    name: str
    replies: tuple[Message, ...]
    reward: float


class Admission(Record, frozen=True):
    """`reasons` is empty exactly when the task is admitted. `runs` counts the episodes played."""

    task_id: str
    admitted: bool
    reasons: tuple[str, ...]
    runs: int


async def admit(environment: Environment, task: Task, probes: Sequence[Probe], times: int = 3) -> Admission:
    """Play every probe `times` times, each in a session of its own. Infrastructure errors are raised, not judged.

    An environment that remembers equal runs repeats its memory here: give it one that doesn't for independent runs.
    """
    reasons = _leaks(task)
    for probe in probes:
        rewards = [(await play(environment, task, probe.replies)).outcome.reward for _ in range(times)]
        if len(set(rewards)) > 1:
            reasons.append(f"{probe.name} is not judged the same each time")
        elif rewards[0] is None:
            reasons.append(f"{probe.name} is left ungraded")
        elif rewards[0] != probe.reward:
            reasons.append(f"{probe.name} gets {rewards[0]:g}, not {probe.reward:g}")
    return Admission(task_id=task.id, admitted=not reasons, reasons=tuple(reasons), runs=times * len(probes))


async def admit_all(
    environment: Environment, cases: Iterable[tuple[Task, Sequence[Probe]]]
) -> tuple[list[Task], Counter[str]]:
    """The tasks that are admitted, and how many went out for which (first) reason."""
    admitted: list[Task] = []
    reasons: Counter[str] = Counter()
    for task, probes in cases:
        admission = await admit(environment, task, probes)
        if admission.admitted:
            admitted.append(task)
        else:
            reasons[admission.reasons[0]] += 1
    return admitted, reasons


async def play(environment: Environment, task: Task, replies: Sequence[Message]) -> Trajectory:
    """A graded episode of fixed replies, without tokens. When they run out the policy has merely answered."""
    session = await environment.start(task)
    trajectory = Trajectory(
        id=f"probe-{task.id}",
        task_id=task.id,
        environment=environment.name,
        contract=None,
        source=Source.ROLLOUT,
        policy="probe",
    )
    for message in task.messages:
        append(trajectory, message, [])
    end = End.ANSWERED
    try:
        for reply in replies:
            append(trajectory, reply, [])
            ended = await _act(environment.contract(), session, trajectory, reply)
            if ended is not None:
                end = ended
                break
        trajectory.outcome = Outcome(end=end)
        trajectory.outcome = await session.grade(trajectory)
    finally:
        await session.close()
    return trajectory


async def _act(contract: Contract, session: Any, trajectory: Trajectory, reply: Message) -> End | None:
    if not reply.tool_calls:
        return act_of(contract, reply.content)
    ends = {tool.name: tool.end for tool in contract.tools}
    for call in reply.tool_calls:
        result = await session.call(call)
        node = append(
            trajectory, Message(role="tool", content=result.content, tool_call_id=call.id, name=call.name), []
        )
        node.failure, node.state = result.failure, await session.state()
        if result.ends:
            return ends[call.name] or End.ANSWERED
    return None


def call_message(name: str, arguments: dict[str, Any], id: str = "call_0") -> Message:
    """A reply that makes one call."""
    return Message(role="assistant", tool_calls=(ToolCall(id=id, name=name, arguments=arguments),))


def _leaks(task: Task) -> list[str]:
    """Whether the prompt says the answer, as whole words: a misspelling that only adds a letter says nothing."""
    prompt = "\n".join(message.content for message in task.messages)
    answers = [text for text in _strings(task.private.get("answer")) if text.strip()]
    told = any(re.search(rf"(?<!\w){re.escape(text)}(?!\w)", prompt) for text in answers)
    return ["the prompt holds the answer"] if told else []


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
