"""A workspace: what is tried again, and what does not belong together."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from test_rollout import Counter, CounterSession, task
from treadle import config
from treadle.engine.scripted import ScriptedEngine
from treadle.errors import InfrastructureError, SandboxDead, UserError
from treadle.models import tiny_llama
from treadle.rollout import Job
from treadle.types import Budget, Checkpoint, Task
from treadle.workspace import RETRIES, Workspace, base_checkpoint


class Outage(Counter):
    """The first `lost` sessions get no sandbox."""

    lost = 0

    async def start(self, task: Task) -> CounterSession:
        self.lost -= 1
        if self.lost >= 0:
            raise SandboxDead("no sandbox can be had")
        return await super().start(task)


@pytest.fixture
def environment() -> Outage:
    return Outage(Budget(turns=6, tokens=4000, reply_tokens=200))


@pytest.fixture
def ws(tmp_path: Path, environment: Outage) -> Iterator[Workspace]:
    settings = config.load(None, ["model.base=tiny"])
    opened = Workspace(tmp_path, settings, environment, Console(file=io.StringIO()))  # type: ignore[arg-type]
    yield opened
    opened.store.close()


def play(ws: Workspace, count: int = 4) -> list[float | None]:
    """Rewards of a policy that is done at once, which is right."""
    jobs = [Job(id=f"job{i}", task=task(want=0), seed=i) for i in range(count)]
    engine = ScriptedEngine(ws.renderer, lambda _: lambda context: "done")
    return [t.outcome.reward for t in asyncio.run(ws.play(engine, "p", jobs, 1.0, "test"))]


def test_what_is_lost_is_tried_again_and_what_is_not_is_kept(ws: Workspace, environment: Outage) -> None:
    environment.lost = 3
    assert play(ws) == [1.0] * 4
    stored = [t.id for t in ws.store.trajectories()]
    assert len(stored) == 4 + 3 and sum("-retry1" in name for name in stored) == 3
    environment.lost = 99
    assert play(ws) == [1.0] * 4, "nothing is played again"


def test_an_outage_stops_the_stage_and_is_over_when_it_is_over(ws: Workspace, environment: Outage) -> None:
    environment.lost = 99
    with pytest.raises(InfrastructureError, match=r"test: 4 of 4 episodes .* no sandbox can be had.*run this again"):
        play(ws)
    tries = 4 * (1 + RETRIES)
    assert 99 - environment.lost == len(list(ws.store.trajectories())) == tries
    environment.lost = 1
    assert play(ws) == [1.0] * 4
    assert len(list(ws.store.trajectories())) == tries + 4 + 1


def test_a_checkpoint_of_another_base_is_refused(ws: Workspace, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "checkpoints" / "other", layers=1, hidden=32, vocabulary=400, context=64)
    for name, folder in (("other", other), ("same", Path(ws.base.path))):
        ws.store.add_checkpoint(Checkpoint(id=name, path=str(folder), parent=None, stage="sft"))
    assert ws.checkpoint("same").id == "same"
    with pytest.raises(UserError, match=r"checkpoint other has another tokenizer than model\.base = 'tiny'"):
        ws.checkpoint("other")


def test_a_checkpoint_whose_replacing_was_killed_is_put_back(ws: Workspace) -> None:
    made = tiny_llama(ws.path / "checkpoints" / "made", layers=1, hidden=32, vocabulary=400, context=64)
    ws.store.add_checkpoint(Checkpoint(id="made", path="checkpoints/made", parent=None, stage="sft"))
    made.rename(made.with_name("made.old"))
    with pytest.raises(UserError, match="another tokenizer"):  # it was found
        ws.checkpoint("made")
    assert made.is_dir()


def test_a_base_is_known_by_what_it_is(tmp_path: Path) -> None:
    one, other = (tiny_llama(tmp_path / str(seed), seed, 1, 32, 400, 64) for seed in (0, 1))
    named = base_checkpoint(str(one)).id
    assert named != base_checkpoint(str(other)).id
    moved = one.rename(tmp_path / "moved")
    assert named == base_checkpoint(str(moved)).id
    settings = (moved / "config.json").read_text()
    (moved / "config.json").write_text(settings.replace("1e-06", "1e-05"))
    assert settings != (moved / "config.json").read_text()
    assert named != base_checkpoint(str(moved)).id
    with pytest.raises(UserError, match="whole path"):
        base_checkpoint("~nobody-of-this-name/model")
