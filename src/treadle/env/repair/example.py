"""One scripted episode, as text: what the policy reads and writes."""

from __future__ import annotations

from treadle.env.base import Environment
from treadle.env.check import play
from treadle.env.repair.solver import Solver
from treadle.render.hermes import write_reply
from treadle.types import Task, Trajectory


async def example(environment: Environment, task: Task, seed: int = 0) -> tuple[Trajectory, str]:
    """The solver's episode on a task; in the text a `!` marks what it does wrong on purpose."""
    solver = Solver(task, seed)
    trajectory = await play(environment, task, solver.replies)
    wrong = {id(solver.replies[index]) for index in solver.mistakes}
    lines = []
    for node in trajectory.nodes:
        message = node.message
        text = write_reply(message) if message.role == "assistant" else message.content
        lines.append(f"[{message.role}{' !' * (id(message) in wrong)}] {text}")
    return trajectory, "\n".join([*lines, f"[{trajectory.outcome.end}] reward {trajectory.outcome.reward}"])
