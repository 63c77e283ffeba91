"""eval: checkpoint × held-out tasks → one row of the table."""

from __future__ import annotations

from treadle.metrics import Summary, summarise
from treadle.types import Checkpoint
from treadle.workspace import Workspace


async def evaluate(ws: Workspace, checkpoint: Checkpoint) -> Summary:
    return summarise(await ws.play_held_out(checkpoint))
