"""A workspace is a folder: `treadle.toml`, `treadle.db`, `checkpoints/`, `logs/`, `runs/`. Stages work through it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from treadle.config import Config
from treadle.engine.base import Engine
from treadle.env.repair.packages import PACKAGES, Package
from treadle.env.repair.session import RepairEnvironment
from treadle.errors import DataError, InfrastructureError, UserError, unknown
from treadle.models import load_tokenizer, model_config, recovered, smollm2, tiny_llama
from treadle.render.base import contract_fingerprint
from treadle.render.chatml import ChatML
from treadle.rollout import Job, Loop, rollout_seed
from treadle.store import Store
from treadle.types import Checkpoint, SamplingParams, Split, Task, Trajectory, fingerprint, to_builtins

if TYPE_CHECKING:
    from treadle.engine.slots import SlotEngine
    from treadle.learner import Learner


RETRIES = 2
SAMPLES = 16  # places of a weight file that a digest reads


class Workspace:
    """Opened by a verb, closed by it. One engine is kept, holding the weights that were asked for last."""

    def __init__(self, path: Path, config: Config, environment: RepairEnvironment, console: Console) -> None:
        self.path = path
        self.config = config
        self.console = console
        self.environment = environment
        self.contract = environment.contract()
        self.base = base_checkpoint(config.model.base)
        self.renderer = renderer_of(self.base)
        self.fingerprint = contract_fingerprint(self.contract, self.renderer)
        self.store = Store(path / "treadle.db")
        self._engine: SlotEngine | None = None
        self._holds = ""

    @classmethod
    async def open(cls, path: Path, config: Config) -> Workspace:
        """Raises UserError when the model, the environment's packages or a sandbox can't be had."""
        path = path.resolve()  # what is noted of it must hold wherever the next verb is run
        path.mkdir(parents=True, exist_ok=True)
        environment = await RepairEnvironment.open(packages=_packages(config))
        try:
            return cls(path, config, environment, console())
        except BaseException:
            await environment.close()
            raise

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()
        await self.environment.close()
        self.store.close()

    # ------------------------------------------------------------ models

    def learner(self, checkpoint: Checkpoint, trained_layers: int = 0) -> Learner:
        from treadle.learner import Learner

        path, threads = Path(checkpoint.path), self.config.model.threads
        return Learner(path, trained_layers=trained_layers, threads=threads)

    async def engine(self, checkpoint: Checkpoint) -> SlotEngine:
        """The sampling engine with this checkpoint's weights. Each call may replace what an earlier one returned."""
        from treadle.engine.slots import SlotEngine

        if self._engine is None or self._holds != checkpoint.id:
            if self._engine is not None:
                await self._engine.close()
            model = self.config.model
            self._engine = SlotEngine.from_folder(
                Path(checkpoint.path),
                slots=model.slots,
                context=model.context,
                dtype=model.dtype,
                version=checkpoint.updates,
                threads=model.threads,
            )
            self._holds = checkpoint.id
        return self._engine

    def checkpoint(self, checkpoint_id: str) -> Checkpoint:
        """Raises UserError naming the known ones, or if this one came from another base model."""
        if checkpoint_id == self.base.id or checkpoint_id == "base":
            return self.base
        found = self._located(self.store.checkpoint(checkpoint_id))
        if found is None:
            known = ["base", *(checkpoint.id for checkpoint in self.store.checkpoints())]
            raise UserError(unknown("checkpoint", checkpoint_id, known))
        ours, theirs = (Path(checkpoint.path) / "tokenizer.json" for checkpoint in (self.base, found))
        if theirs.is_file() and theirs.read_bytes() != ours.read_bytes():
            raise UserError(
                f"checkpoint {checkpoint_id} has another tokenizer than model.base = {self.config.model.base!r}: "
                "set model.base to the model it came from, or start a new workspace"
            )
        return found

    def _located(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """With the whole path. Stored is the one below the workspace, which may be moved and copied."""
        return checkpoint and msgspec.structs.replace(checkpoint, path=str(recovered(self.path / checkpoint.path)))

    def lineage(self, checkpoint: Checkpoint) -> list[str]:
        """Ids of the checkpoints on the way to this one, each made from the one before: the base's first."""
        found, at = [checkpoint.id], checkpoint.parent
        while at is not None:
            found.insert(0, at)
            at = parent.parent if (parent := self.store.checkpoint(at)) else None
        return found

    def now_holds(self, checkpoint: Checkpoint) -> None:
        """Say that the engine's weights were replaced in place and now are this checkpoint's."""
        self._holds = checkpoint.id

    def save(self, learner: Learner, stage: str, parent: Checkpoint, data: Sequence[str]) -> Checkpoint:
        """Write weights and manifest. The id follows from what went in, so a repeated stage finds it again."""
        name = self.checkpoint_id(stage, parent, data)
        folder = Path("checkpoints") / name
        learner.save(self.path / folder, resumable=False)
        checkpoint = Checkpoint(
            id=name,
            path=str(folder),
            parent=parent.id,
            stage=stage,
            updates=parent.updates + learner.updates,
            contracts=(self.fingerprint,),
            config=self.stage_config(stage),
            data=tuple(data),
            revision=revision(),
        )
        self.store.add_checkpoint(checkpoint)
        return self.checkpoint(name)

    def made(self, stage: str, parent: Checkpoint, data: Sequence[str]) -> Checkpoint | None:
        """What `save` has written for the same settings and inputs."""
        return self._located(self.store.checkpoint(self.checkpoint_id(stage, parent, data)))

    def checkpoint_id(self, stage: str, parent: Checkpoint, data: Sequence[str]) -> str:
        """What the stage's checkpoint will be called; RL names by it what it samples on the way there."""
        return f"{stage}-{fingerprint([self.stage_key(stage, parent), data])}"

    def stage_key(self, stage: str, parent: Checkpoint) -> str:
        """Changes when the stage would do something else: what it has half done under another key is not taken up."""
        return fingerprint([stage, parent.id, self.fingerprint, self.stage_config(stage)])

    def stage_config(self, stage: str) -> dict[str, Any]:
        """The seed, the stage's own section, how episodes are sampled, and what a row may hold.

        A part of a stage ("distill-start") has the section of the whole.
        """
        config = self.config
        sections = to_builtins(config)
        model = {"dtype": config.model.dtype, "context": config.model.context}
        own = stage.partition("-")[0]
        return {"seed": config.seed, "pack_tokens": config.pack_tokens, "model": model, own: sections.get(own)}

    # ------------------------------------------------------------ tasks and rollouts

    def training_tasks(self) -> list[Task]:
        """With their private halves, for graders and solvers. Raises DataError when there are none."""
        tasks = self.store.tasks(split=Split.TRAIN, with_private=True)
        if not tasks:
            raise DataError("no training tasks in the store: run `treadle check` first")
        return tasks

    def probes(self, checkpoint_id: str) -> str:
        """How the groups begin that shaping samples from a checkpoint; RL starts from what they say of the tasks."""
        return f"shape-{checkpoint_id}-{self.conditions()}-"

    def conditions(self) -> str:
        """What episodes of one checkpoint depend on, beside the task."""
        model = self.config.model
        return fingerprint([self.fingerprint, self.config.seed, model.dtype, model.context])

    async def play(
        self, engine: Engine, policy: str, jobs: Sequence[Job], temperature: float, title: str
    ) -> list[Trajectory]:
        """Roll the jobs out and store each as it finishes; what the store already holds is not done again.

        A rollout lost to the infrastructure is tried again, under an id of its own: RETRIES times, and as often when
        the verb is run again. Raises InfrastructureError when more than half stay lost.
        """
        tries = {job.id: self._tries(job.id) for job in jobs}
        loop = Loop(engine, self.renderer, self.environment, SamplingParams(temperature=temperature), policy)
        for attempt in range(1 + RETRIES):
            left = [job for job in jobs if not _usable(tries[job.id])]
            if not left:
                break
            again = [msgspec.structs.replace(job, id=_named(job.id, len(tries[job.id]))) for job in left]
            about = f"{title} again" if attempt else title
            with self.progress(about, len(jobs), done=len(jobs) - len(left)) as advance:

                def finished(trajectory: Trajectory, advance: Callable[[int], None] = advance) -> None:
                    self.store.add_trajectory(trajectory)
                    advance(1)

                played = await loop.collect(again, self.config.model.slots, finished)
            for job, trajectory in zip(left, played, strict=True):
                tries[job.id].append(trajectory)
        last = [tries[job.id][-1] for job in jobs]
        lost = [t.outcome.failure for t in last if t.outcome.failure is not None]
        if 2 * len(lost) > len(jobs):
            why = f"{lost[0].stage}: {lost[0].message}"
            raise InfrastructureError(
                f"{title}: {len(lost)} of {len(jobs)} episodes were lost to the infrastructure ({why}): "
                "mend it, and run this again"
            )
        return last

    async def play_groups(
        self, engine: Engine, policy: str, tasks: Sequence[Task], size: int, prefix: str, purpose: str, title: str
    ) -> list[list[Trajectory]]:
        """`size` rollouts of each task at temperature 1; ids and groups begin with `prefix`, seeds follow `purpose`."""
        jobs = [
            Job(
                id=f"{prefix}{task.id}-{member}",
                task=task,
                seed=rollout_seed(self.config.seed, purpose, task.id, member),
                group=f"{prefix}{task.id}",
            )
            for task in tasks
            for member in range(size)
        ]
        played = await self.play(engine, policy, jobs, 1.0, title)
        return [played[start : start + size] for start in range(0, len(played), size)]

    def _tries(self, job_id: str) -> list[Trajectory]:
        """What is stored of a job: tries that were lost, and perhaps one that was not."""
        found: list[Trajectory] = []
        while not _usable(found) and (stored := self.store.trajectory(_named(job_id, len(found)))) is not None:
            found.append(stored)
        return found

    async def play_held_out(self, checkpoint: Checkpoint) -> list[tuple[Task, Trajectory]]:
        """`eval.episodes` episodes over the held-out tasks in turn. The same checkpoint is never played twice."""
        held_out = self.store.tasks(split=Split.HELD_OUT, with_private=True)
        tasks = sorted(held_out, key=lambda task: fingerprint(task.id))  # any number of them is a fair sample
        if not tasks:
            raise DataError("no held-out tasks in the store: run `treadle check` first")
        settings = self.config.eval
        prefix = f"eval-{checkpoint.id}-{self.conditions()}-{settings.temperature:g}"
        jobs = []
        for i in range(settings.episodes):
            task, again = tasks[i % len(tasks)], i // len(tasks)
            seed = rollout_seed(self.config.seed, 0, task.id, again)
            jobs.append(Job(id=f"{prefix}-{task.id}-{again}", task=task, seed=seed))
        engine = await self.engine(checkpoint)
        played = await self.play(engine, checkpoint.id, jobs, settings.temperature, f"eval {checkpoint.stage}")
        return [(job.task, trajectory) for job, trajectory in zip(jobs, played, strict=True)]

    @contextmanager
    def progress(self, title: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
        """A bar with count, rate of progress and time left."""
        columns = (
            TextColumn("{task.description:<22}"),
            BarColumn(30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task(title, total=total, completed=done)
            yield lambda n: bar.update(task, advance=n)


def _usable(tries: Sequence[Trajectory]) -> bool:
    return bool(tries) and tries[-1].outcome.failure is None


def _named(job_id: str, attempt: int) -> str:
    return f"{job_id}-retry{attempt}" if attempt else job_id


def console() -> Console:
    """Where stages report: standard error. Not a terminal: wide enough for the table of stages."""
    found = Console(stderr=True)
    return found if found.is_terminal else Console(stderr=True, width=120)


def _packages(config: Config) -> tuple[Package, ...]:
    known = {package.name: package for package in PACKAGES}
    for name in config.tasks.packages:
        if name not in known:
            raise UserError(unknown("package in tasks.packages", name, known))
    return tuple(known[name] for name in config.tasks.packages)


def base_checkpoint(base: str) -> Checkpoint:
    """The model a workspace starts from: "smollm2", "tiny", or a Hugging Face folder, which may move, not change."""
    if base in ("smollm2", "tiny"):
        folder = smollm2() if base == "smollm2" else tiny_llama()
        name = folder.name
    else:
        try:
            folder = Path(base).expanduser().resolve()
        except RuntimeError as error:  # ~nobody
            raise UserError(f"model.base is {base!r}: {error}: give the folder's whole path") from None
        name = digest(folder)
    return Checkpoint(id=f"base-{fingerprint(name)}", path=str(folder), parent=None, stage="base")


def digest(folder: Path) -> str:
    """Changes when the model in the folder does: a hash of its settings, its tokenizer, and samples of its weights."""
    model_config(folder)
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name in ("config.json", "tokenizer.json"):
            found.update(path.read_bytes())
        elif path.suffix == ".safetensors":
            size = path.stat().st_size
            found.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                for part in range(SAMPLES):
                    file.seek(size * part // SAMPLES)
                    found.update(file.read(1 << 16))
    return found.hexdigest()[:16]


def renderer_of(checkpoint: Checkpoint) -> ChatML:
    return ChatML(load_tokenizer(Path(checkpoint.path)))


def revision() -> str:
    """The code's git revision, with "-dirty" where files were changed; "" without git or a checkout of its own."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
