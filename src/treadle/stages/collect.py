"""collect: tasks × a scripted solver → raw logs, as OpenAI chat JSONL.

The solver knows the answer and still takes wrong turns and recovers from them, so that the logs hold what a deployed
agent's logs hold. Its deliberate mistakes are marked: training may see them, never imitate them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from treadle.engine.scripted import ScriptedEngine
from treadle.env.repair.solver import Solver, solver_script
from treadle.pool.formats import openai_chat
from treadle.rollout import Job, Loop, rollout_seed
from treadle.types import SamplingParams, Task, TaskKind, Trajectory, fingerprint, is_solved, to_json
from treadle.workspace import Workspace


async def collect(ws: Workspace, turn: int = 1) -> dict[str, Any]:
    """Write `logs/collect-<turn>.jsonl`; returns its path and counts."""
    jobs = _jobs(ws, turn)
    by_id = {job.id: job for job in jobs}
    mistakes = {job.id: Solver(job.task, job.seed).mistakes for job in jobs}
    engine = ScriptedEngine(ws.renderer, lambda session: solver_script(by_id[session].task, by_id[session].seed))
    loop = Loop(engine, ws.renderer, ws.environment, SamplingParams(), policy="scripted-solver")
    with ws.progress("collect", len(jobs)) as advance:
        done = await loop.collect(jobs, concurrency=16, on_done=lambda _: advance(1))
    path = ws.path / "logs" / f"collect-{turn}.jsonl"
    rows = [_row(ws, trajectory, mistakes[trajectory.id]) for trajectory in done]
    _write(path, rows)
    return {
        "path": str(path.relative_to(ws.path)),
        "digest": fingerprint(rows),
        "trajectories": len(done),
        "solved": sum(is_solved(trajectory.outcome.reward) for trajectory in done),
        "with_mistakes": sum(map(bool, mistakes.values())),
    }


def _jobs(ws: Workspace, turn: int) -> list[Job]:
    settings = ws.config.collect
    tasks = ws.training_tasks()
    rng = np.random.default_rng([ws.config.seed, turn])
    kinds = sorted({task.kind for task in tasks} - {TaskKind.SOLVABLE})
    wanted = round(settings.boundary * settings.demonstrations) if kinds else 0
    chosen: list[Task] = []
    for i, kind in enumerate(kinds):  # as many of each: what is shown three times is not learnt
        alike = [task for task in tasks if task.kind is kind]
        chosen += _take(alike, (wanted + i) // len(kinds), rng)
    solvable = [task for task in tasks if task.kind is TaskKind.SOLVABLE]
    chosen += _take(solvable, settings.demonstrations - wanted, rng)
    return [
        Job(id=f"collect-{turn}-{i}", task=task, seed=rollout_seed(ws.config.seed, turn, task.id, i))
        for i, task in enumerate(chosen)
    ]


def _take(tasks: list[Task], count: int, rng: np.random.Generator) -> list[Task]:
    """`count` tasks in random order, each once before any twice."""
    if not tasks:
        return []
    rounds = [rng.permutation(len(tasks)) for _ in range(-(-count // len(tasks)))]
    return [tasks[i] for order in rounds for i in order][:count]


def _row(ws: Workspace, trajectory: Trajectory, mistakes: list[int]) -> dict[str, Any]:
    """A log row; `mistakes` are indexes of replies. Without times: the same seed gives the same log, to the byte."""
    replies = [node for node in trajectory.path() if node.message.role == "assistant"]
    for index in mistakes:
        if index < len(replies):
            replies[index].extra["untrained"] = True
    return openai_chat.to_row(msgspec.structs.replace(trajectory, created=None, seconds=None), ws.contract.tools)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    """All or nothing: a file that is there is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(b"".join(to_json(row) + b"\n" for row in rows))
    partial.replace(path)
