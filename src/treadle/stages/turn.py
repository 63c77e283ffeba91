"""turn: the whole wheel, once. Each stage is journaled, and skipped when it was done for the same inputs.

The next turn starts from what this one released, and takes in what it served.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from treadle.config import Config
from treadle.errors import UserError
from treadle.models import model_config
from treadle.pool.curate import curate
from treadle.pool.ingest import ingest
from treadle.prune import check_layers
from treadle.report import Run, curves, gather, stage_table
from treadle.stages.check import check
from treadle.stages.collect import collect
from treadle.stages.distill import distill
from treadle.stages.eval import evaluate
from treadle.stages.release import Verdict, release
from treadle.stages.rl import rl
from treadle.stages.serve import serve_tasks
from treadle.stages.sft import sft
from treadle.stages.shape import shape
from treadle.types import Checkpoint, fingerprint, to_builtins
from treadle.workspace import Workspace

Result = dict[str, Any]


async def turn(ws: Workspace) -> Run:
    """Run every stage, from raw logs to a served agent; returns the run, whose folder holds the report."""
    number, start = _where(ws)
    _check_model(Path(ws.base.path), ws.config)  # refused now, not after all that comes before the student
    ws.console.print(f"turn {number}, from {start.id}")
    t = Turn(ws, number)
    await t.stage("check", lambda: check(ws), t.tasks)
    logs = await t.stage("collect", lambda: collect(ws, number), t.tasks)
    await t.stage("ingest", lambda: _ingest(ws, ws.path / logs["path"]), logs["digest"])
    await t.stage("curate", lambda: _curate(ws), logs["digest"])

    await t.evaluate(start, "base" if start == ws.base else "start")
    seeded = await t.train("sft", sft, start, logs["digest"])
    await t.evaluate(seeded)
    shaped = await t.train("shape", shape, seeded)
    await t.evaluate(shaped)
    teacher = await t.train("rl", rl, shaped)
    await t.evaluate(teacher)
    candidates = [(teacher, [start])]
    layers = ws.config.distill.layers
    if model_config(Path(teacher.path))["num_hidden_layers"] > layers:
        student = await t.train("distill", distill, teacher)
        await t.evaluate(student)
        candidates.append((student, [teacher, start]))
    else:
        ws.console.print(f"distill: {teacher.id} has no more layers than distill.layers = {layers}: no student")

    await t.release(start, teacher, "the gate's own test")  # what went in should be refused
    released = start
    for candidate, against in candidates:
        if all([await t.release(candidate, incumbent) for incumbent in against]):
            released = candidate
    await t.stage("serve", lambda: serve_tasks(ws, released, number), released.id)
    t.finish(released)
    return t.run


def _check_model(folder: Path, config: Config) -> None:
    model = model_config(folder)
    check_layers(model["num_hidden_layers"], config.distill.layers)
    context, positions = config.model.context, model.get("max_position_embeddings", 0)
    if context > positions:
        raise UserError(f"model.context is {context}, and the model in {folder} has {positions} positions: lower it")


class Turn:
    """One turn's journal: what was done, for which inputs, with which result."""

    def __init__(self, ws: Workspace, number: int) -> None:
        self.ws = ws
        self.number = number
        self.tasks = fingerprint(to_builtins(ws.config.tasks))
        self.run = Run(ws.path / "runs" / f"turn-{number}", ws.config)

    async def stage(self, name: str, work: Callable[[], Awaitable[Result]], *inputs: str) -> Result:
        """Do `work` unless the journal holds its result for the same settings and inputs."""
        key = fingerprint([self.number, self.ws.fingerprint, self.ws.stage_config(name), inputs])
        done = self.ws.store.done(name, key)
        if done is not None:
            self.ws.console.print(f"[dim]{name}: done before[/dim]")
            return done
        self.ws.store.begin(name, key)
        started = time.monotonic()
        result = await work()
        result["seconds"] = time.monotonic() - started
        self.run.log("stage", name=name, **result)  # first: a kill in between tells it twice, and never loses it
        self.ws.store.finish(name, key, result)
        return result

    async def train(
        self,
        name: str,
        work: Callable[[Workspace, Checkpoint, Run], Awaitable[Checkpoint]],
        parent: Checkpoint,
        *inputs: str,
    ) -> Checkpoint:
        """A stage that gives a checkpoint."""

        async def made() -> Result:
            return {"checkpoint": (await work(self.ws, parent, self.run)).id}

        result = await self.stage(name, made, parent.id, *inputs)
        return self.ws.checkpoint(result["checkpoint"])

    async def evaluate(self, checkpoint: Checkpoint, label: str = "") -> None:
        """One row of the table. A turn that starts from a released checkpoint also makes one of the same stage."""

        async def played() -> Result:
            return dict(to_builtins(await evaluate(self.ws, checkpoint)))

        row = self.run.row(label or checkpoint.stage, await self.stage("eval", played, checkpoint.id, self.tasks))
        self.ws.console.print(f"{row.stage}: held-out success {row.summary.success}")

    async def release(self, candidate: Checkpoint, incumbent: Checkpoint, title: str = "release") -> bool:
        async def judged() -> Result:
            return dict(to_builtins(await release(self.ws, candidate, incumbent)))

        played = fingerprint(self.ws.stage_config("eval"))
        result = await self.stage("release", judged, candidate.id, incumbent.id, self.tasks, played)
        verdict = msgspec.convert(result, Verdict)
        said = "not worse" if verdict.released else f"refused: {verdict.reasons()}"
        self.ws.console.print(f"{title}: {candidate.stage} against {incumbent.stage}: {said}")
        return verdict.released

    def finish(self, released: Checkpoint) -> None:
        """Table, figure, and the end of the journal."""
        table = stage_table(self.run.rows())
        self.ws.console.print(table)
        with (self.run.path / "table.txt").open("w", encoding="utf-8") as file:
            Console(file=file, width=120).print(table)
        curves(gather([self.run.path]), self.run.path / "curves.png")
        self.ws.console.print(f"released: {released.id}; figure, table and metrics in {self.run.path}")
        self.ws.console.print(
            f"serve it: treadle serve {released.id} -w {self.ws.path}; turn on: treadle turn -w {self.ws.path}"
        )
        self.ws.store.finish("turn", str(self.number), {"released": released.id})


def _where(ws: Workspace) -> tuple[int, Checkpoint]:
    """Number of the turn to run or resume, and the checkpoint it starts from: the base, or the last release."""
    number, start = 1, ws.base
    while (done := ws.store.done("turn", str(number))) is not None:
        number, start = number + 1, ws.checkpoint(done["released"])
    return number, start


async def _ingest(ws: Workspace, path: Path) -> Result:
    """The collected logs; what was served is in the store already, as the endpoint recorded it."""
    return dict(to_builtins(ingest([path], ws.store)))


async def _curate(ws: Workspace) -> Result:
    return dict(to_builtins(curate(ws.store)))
