"""sft: admitted trajectories → checkpoint. What the assistant wrote is trained; marked mistakes stay as context."""

from __future__ import annotations

from treadle.errors import DataError
from treadle.losses import cross_entropy
from treadle.report import Run
from treadle.training import fit, imitation, tokenised
from treadle.types import Checkpoint
from treadle.workspace import Workspace


async def sft(ws: Workspace, parent: Checkpoint, run: Run) -> Checkpoint:
    """Raises DataError when no trajectory is admitted for SFT."""
    settings = ws.config.sft
    rows = [tokenised(t, ws.renderer, ws.contract) for t in ws.store.training_trajectories("sft")]
    if not rows:
        raise DataError("no trajectory is admitted for SFT: run `treadle ingest` and `treadle curate` first")
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
