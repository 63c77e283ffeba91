"""Admission, against an environment small enough to see through."""

from __future__ import annotations

from itertools import count

import pytest

from treadle.env.base import ToolResult
from treadle.env.check import Probe, admit, admit_all, call_message
from treadle.types import Act, Contract, Effect, End, Message, Outcome, Task, TaskKind, Tool, ToolCall, Trajectory


class GuessSession:
    """The reward is what the task's `private` says for what was guessed."""

    def __init__(self, task: Task, number: int) -> None:
        self.task, self.number, self.guess = task, number, ""

    async def call(self, call: ToolCall) -> ToolResult:
        self.guess = str((call.arguments or {}).get("text", ""))
        return ToolResult("noted", ends=True)

    async def state(self) -> str:
        return self.guess

    async def grade(self, trajectory: Trajectory) -> Outcome:
        end = trajectory.outcome.end
        match self.task.private.get("verifier", "sound"):
            case "flaky":
                return Outcome(end=end, reward=float(self.number % 2))
            case "lenient":
                return Outcome(end=end, reward=1.0)
            case "silent":
                return Outcome(end=end)
        return Outcome(end=end, reward=float(self.guess == self.task.private["answer"]))

    async def close(self) -> None:
        """Nothing is held."""


class Guess:
    name = "guess"

    def __init__(self) -> None:
        self.numbers = count()

    def contract(self) -> Contract:
        say = Tool(name="say", description="", parameters={}, effect=Effect.END, end=End.SUBMITTED)
        return Contract(environment="guess", version="1", tools=(say,), acts=(Act(end=End.ANSWERED, marker=""),))

    async def start(self, task: Task) -> GuessSession:
        return GuessSession(task, next(self.numbers))

    async def close(self) -> None:
        """Nothing is held."""


PROBES = [
    Probe("gold", (call_message("say", {"text": "blue"}),), 1.0),
    Probe("nothing", (), 0.0),
    Probe("garbage", (Message(role="assistant", content="?"),), 0.0),
]


def task(prompt: str = "Which colour?", **private: str) -> Task:
    return Task(
        id="t",
        environment="guess",
        kind=TaskKind.SOLVABLE,
        messages=(Message(role="user", content=prompt),),
        private={"answer": "blue", **private},
    )


async def test_a_sound_task_is_admitted_after_three_runs_of_each_probe() -> None:
    admission = await admit(Guess(), task(), PROBES)
    assert (admission.admitted, admission.reasons, admission.runs) == (True, (), 9)


@pytest.mark.parametrize(
    ("unsound", "reason"),
    [
        (task(verifier="flaky"), "gold is not judged the same each time"),
        (task(verifier="lenient"), "nothing gets 1, not 0"),
        (task(verifier="silent"), "gold is left ungraded"),
        (task(answer="red"), "gold gets 0, not 1"),
        (task(prompt="Which colour? (blue)"), "the prompt holds the answer"),
    ],
)
async def test_an_unsound_task_is_rejected_with_its_reason(unsound: Task, reason: str) -> None:
    admission = await admit(Guess(), unsound, PROBES)
    assert not admission.admitted
    assert reason in admission.reasons


async def test_every_rejection_is_counted() -> None:
    cases = [task(), task(verifier="lenient"), task(verifier="lenient"), task(answer="red")]
    admitted, reasons = await admit_all(Guess(), [(case, PROBES) for case in cases])
    assert admitted == [task()]
    assert sum(reasons.values()) == 3
    assert reasons["nothing gets 1, not 0"] == 2
