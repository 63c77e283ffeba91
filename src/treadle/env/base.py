"""Environments: what a policy acts in. One session per episode; a session shares nothing with another."""

from __future__ import annotations

from typing import Protocol

import msgspec

from treadle.types import Contract, Outcome, Task, ToolCall, Trajectory


class ToolResult(msgspec.Struct, frozen=True):
    """What the policy reads after a call. `failure` is one of the tool's declared codes; `ends` stops the episode.

    `seconds` is what the call itself took, where that is less than the caller waited: others may use the same sandbox.
    """

    content: str
    failure: str | None = None
    ends: bool = False
    seconds: float | None = None


class Session(Protocol):
    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call whose name and arguments were already validated against the contract.

        Raises SandboxDead or InfrastructureError when it is not the policy's fault.
        """

    async def state(self) -> str:
        """Fingerprint of the environment's state; equal states give equal text. No history, counters or clocks."""

    async def grade(self, trajectory: Trajectory) -> Outcome:
        """Judge the finished episode. `trajectory.outcome.end` is set; the result keeps it."""

    async def close(self) -> None: ...


class Environment(Protocol):
    name: str

    def contract(self) -> Contract: ...

    async def start(self, task: Task) -> Session: ...

    async def close(self) -> None: ...
