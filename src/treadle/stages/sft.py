"""sft: admitted trajectories → checkpoint. What the assistant wrote is trained; marked mistakes stay as context."""

from __future__ import annotations

from treadle.errors import DataError
from treadle.losses import cross_entropy
from treadle.report import Run
from treadle.training import demonstrations, fit, imitation
from treadle.types import Checkpoint
from treadle.workspace import Workspace


async def sft(ws: Workspace, parent: Checkpoint, run: Run) -> Checkpoint:
    """Raises DataError when no trajectory is admitted for SFT, or none that speaks the contract's tools."""
    settings = ws.config.sft
    rows, foreign = demonstrations(ws.store.training_trajectories("sft"), ws.renderer, ws.contract)
    if not rows and foreign:
        raise DataError(
            f"all {foreign} admitted trajectories call tools that the environment {ws.contract.environment!r} does not "
            "have, so none can be trained on: ingest logs of its own tools, or run `treadle collect`"
        )
    if not rows:
        raise DataError("no trajectory is admitted for SFT: run `treadle ingest` and `treadle curate` first")
    if foreign:
        ws.console.print(f"sft: {foreign} trajectories are of another contract: left out")
    learner = ws.learner(parent)
    with ws.progress("sft", len(rows) * settings.epochs) as advance:
        fit(
            learner,
            [imitation(row) for row in rows],
            cross_entropy(),
            rows=settings.rows,
            epochs=settings.epochs,
            learning_rate=settings.learning_rate,
            pack_tokens=ws.config.pack_tokens,
            seed=ws.config.seed,
            advance=advance,
            log=lambda metrics: run.log("sft", **metrics),
        )
    return ws.save(learner, "sft", parent, [row.id for row in rows])
