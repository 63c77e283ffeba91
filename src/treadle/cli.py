"""The command line: verbs are stages. A stage, and what it imports, is loaded only when it is chosen."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import io
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from treadle import __version__, config
from treadle.errors import TreadleError, UserError
from treadle.types import Checkpoint, to_builtins, to_json

if TYPE_CHECKING:
    from treadle.report import Run
    from treadle.store import Store
    from treadle.workspace import Workspace

app = typer.Typer(
    name="treadle",
    help="Turn an LLM agent's history into its next, better and cheaper, version: again and again.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    epilog="Start with: treadle init my-agent, then treadle turn -w my-agent",
)

Folder = Annotated[Path, typer.Option("--workspace", "-w", help="Folder with treadle.toml; everything is kept in it.")]
Override = Annotated[list[str] | None, typer.Option("--set", "-s", help="Override a setting: --set rl.steps=4")]
CheckpointId = Annotated[str, typer.Argument(help="A checkpoint's id (`treadle status` lists them), or base.")]
HERE = Path()
T = TypeVar("T")


def main() -> None:
    """Entry point: a UserError is one clear line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # logs hold what some terminals can't show
    try:
        app()
    except UserError as error:
        sys.exit(_say(error, 2))
    except TreadleError as error:
        sys.exit(_say(error, 1))
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        sys.exit(_say(f"{error.name} is not installed: pip install 'treadle[{EXTRAS[error.name]}]'", 2))
    except OSError as error:
        if error.errno is None:  # a timeout, say: nothing that a path could mend
            raise
        where = error.filename or "a file"
        sys.exit(_say(f"can't use {where} ({error.strerror or error}): make room, or give another path", 2))


EXTRAS = {"torch": "train", "transformers": "train", "safetensors": "train", "matplotlib": "train", "gguf": "smollm2"}


def _say(error: object, code: int) -> int:
    print(f"treadle: {error}", file=sys.stderr)
    return code


def _run(folder: Path, overrides: list[str] | None, work: Callable[[Workspace], Awaitable[T]], alone: bool = True) -> T:
    """Open the workspace, do the work, close it whatever happens. `alone`: no other such verb may work there."""
    settings = config.load(folder / "treadle.toml", overrides or ())
    from treadle.workspace import Workspace

    async def whole() -> T:
        ws = await Workspace.open(folder, settings)
        try:
            return await work(ws)
        finally:
            await ws.close()

    with _database(folder), _lock(folder) if alone else nullcontext():
        return asyncio.run(whole())


@contextmanager
def _database(folder: Path) -> Iterator[None]:
    """What SQLite says of a full disk, a damaged or a locked file, as one line."""
    from sqlalchemy.exc import DBAPIError

    try:
        yield
    except DBAPIError as error:
        path = folder / "treadle.db"
        raise UserError(
            f"{path} can't be used ({error.orig}): make room, close what holds it, or restore a backup"
        ) from error


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Held until the work is done, or the process killed."""
    held = os.open(folder, os.O_RDONLY)  # the folder itself: editors replace files as they save them
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another treadle is at work in {folder}: wait for it, or use another workspace") from None
        yield
    finally:
        os.close(held)


def _stored(folder: Path, work: Callable[[Store], T], alone: bool = False) -> T:
    """Open the store alone: no model, no sandbox."""
    config.load(folder / "treadle.toml")  # a folder without settings is no workspace
    from treadle.store import Store

    with _database(folder), _lock(folder) if alone else nullcontext():
        store = Store(folder / "treadle.db")
        try:
            return work(store)
        finally:
            store.close()


@app.command()
def init(folder: Annotated[Path, typer.Argument(help="The workspace to make.")], overrides: Override = None) -> None:
    """Make a workspace: a folder with a treadle.toml that holds every setting and its default."""
    path = folder / "treadle.toml"
    if path.exists():
        raise UserError(f"{path} is there already: edit it, or choose another folder")
    text = config.dump(config.load(None, overrides or ())).encode("utf-8", "backslashreplace")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    print(f"wrote {path}; next: treadle turn -w {folder}")


@app.command()
def turn(folder: Folder = HERE, overrides: Override = None) -> None:
    """Run the whole wheel once, from logs to a served agent. Run it again to resume, or to start the next turn."""

    async def work(ws: Workspace) -> None:
        from treadle.stages.turn import turn

        await turn(ws)

    _run(folder, overrides, work)


# ---------------------------------------------------------------- data


@app.command()
def check(folder: Folder = HERE, overrides: Override = None) -> None:
    """Make tasks, and admit those whose verifier can be trusted: fix passes, broken fails, thrice the same."""

    async def work(ws: Workspace) -> None:
        from treadle.stages.check import check

        _tell(await check(ws))

    _run(folder, overrides, work)


@app.command()
def collect(folder: Folder = HERE, overrides: Override = None) -> None:
    """Let a scripted solver work on training tasks and write its logs as OpenAI chat JSONL."""

    async def work(ws: Workspace) -> None:
        from treadle.stages.collect import collect

        _tell(await collect(ws))

    _run(folder, overrides, work)


@app.command()
def ingest(
    paths: Annotated[list[Path], typer.Argument(help="Files or folders of logs.")],
    folder: Folder = HERE,
) -> None:
    """Read raw logs into the store: calls paired with results, secrets scrubbed, broken records set aside."""
    from treadle.pool.ingest import ingest

    _tell(dict(to_builtins(_stored(folder, lambda store: ingest(paths, store), alone=True))))


@app.command()
def curate(folder: Folder = HERE) -> None:
    """Give every record its use, and the reason: train, boundary, preference, evaluate, hold out, quarantine, drop."""
    from treadle.pool.curate import curate

    _tell(dict(to_builtins(_stored(folder, curate, alone=True))))


# ---------------------------------------------------------------- training


@app.command()
def sft(parent: CheckpointId = "base", folder: Folder = HERE, overrides: Override = None) -> None:
    """Imitate the admitted trajectories: checkpoint in, checkpoint out."""

    async def work(ws: Workspace, run: Run) -> Checkpoint:
        from treadle.stages.sft import sft

        return await sft(ws, ws.checkpoint(parent), run)

    _train("sft", work, folder, overrides)


@app.command()
def shape(parent: CheckpointId, folder: Folder = HERE, overrides: Override = None) -> None:
    """Rejection sampling and preference pairs, both proven by the verifier."""

    async def work(ws: Workspace, run: Run) -> Checkpoint:
        from treadle.stages.shape import shape

        return await shape(ws, ws.checkpoint(parent), run)

    _train("shape", work, folder, overrides)


@app.command()
def rl(parent: CheckpointId, folder: Folder = HERE, overrides: Override = None) -> None:
    """Reinforcement learning in the environment, on tasks at the edge of ability. Resumes after its last step."""

    async def work(ws: Workspace, run: Run) -> Checkpoint:
        from treadle.stages.rl import rl

        return await rl(ws, ws.checkpoint(parent), run)

    _train("rl", work, folder, overrides)


@app.command()
def distill(teacher: CheckpointId, folder: Folder = HERE, overrides: Override = None) -> None:
    """Teach a student of fewer layers what the teacher does."""

    async def work(ws: Workspace, run: Run) -> Checkpoint:
        from treadle.stages.distill import distill

        return await distill(ws, ws.checkpoint(teacher), run)

    _train("distill", work, folder, overrides)


# ---------------------------------------------------------------- judging and serving


@app.command("eval")
def evaluate(checkpoint: CheckpointId, folder: Folder = HERE, overrides: Override = None) -> None:
    """Play the held-out tasks and print one row: success with its interval, recovery, repeats, cost."""

    async def work(ws: Workspace) -> None:
        from treadle.report import StageRow, stage_table
        from treadle.stages.eval import evaluate

        chosen = ws.checkpoint(checkpoint)
        ws.console.print(stage_table([StageRow(chosen.stage, await evaluate(ws, chosen))]))

    _run(folder, overrides, work)


@app.command()
def release(
    candidate: CheckpointId,
    incumbent: Annotated[str, typer.Argument(help="The checkpoint it must not be worse than.")],
    folder: Folder = HERE,
    overrides: Override = None,
) -> None:
    """Judge whether a candidate may replace the incumbent; exit code 1 when it is refused."""

    async def work(ws: Workspace) -> bool:
        from treadle.stages.release import release

        verdict = await release(ws, ws.checkpoint(candidate), ws.checkpoint(incumbent))
        _tell(dict(to_builtins(verdict)))
        return verdict.released

    if not _run(folder, overrides, work):
        raise typer.Exit(1)


@app.command()
def serve(checkpoint: CheckpointId, folder: Folder = HERE, overrides: Override = None) -> None:
    """Serve a checkpoint as an OpenAI-compatible endpoint that records its sessions."""

    async def work(ws: Workspace) -> None:
        from treadle.stages.serve import serve

        await serve(ws, ws.checkpoint(checkpoint))

    _run(folder, overrides, work, alone=False)


@app.command()
def show(
    trajectory: Annotated[str, typer.Argument(help="A trajectory's id.")],
    folder: Folder = HERE,
    tokens: Annotated[bool, typer.Option(help="Show every token, sampled ones marked.")] = False,
) -> None:
    """Print a trajectory: messages, calls, failures, signals, and which tokens the policy wrote."""
    from rich.console import Console

    from treadle.show import print_trajectory

    found = _stored(folder, lambda store: store.trajectory(trajectory))
    if found is None:
        raise UserError(f"no trajectory {trajectory!r}: `treadle status --policy CHECKPOINT` lists a checkpoint's")
    renderer = None
    if tokens:
        from treadle.workspace import renderer_of

        renderer = renderer_of(_base(folder))
    print_trajectory(Console(), found, renderer)


@app.command()
def status(
    folder: Folder = HERE,
    policy: Annotated[str | None, typer.Option(help="List the trajectories of this checkpoint.")] = None,
) -> None:
    """List the workspace's checkpoints, or one checkpoint's trajectories."""

    def tell(store: Store) -> None:
        if policy is not None:
            name = _base(folder).id if policy == "base" else policy
            known = policy == "base" or store.checkpoint(policy) is not None
            for t in store.trajectories(policy=name):
                known = True
                print(f"{t.id}  {t.outcome.end}  reward {t.outcome.reward}  {t.sampled_tokens()} tokens")
            if not known:
                raise UserError(f"no checkpoint and no trajectories of {policy!r}: `treadle status` lists checkpoints")
            return
        print("base")
        for checkpoint in store.checkpoints():
            print(f"{checkpoint.id}  from {checkpoint.parent}  {checkpoint.updates} updates")

    _stored(folder, tell)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders: WORKSPACE/runs/turn-1; or an earlier results.json.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for results.json and results.png.")] = HERE,
) -> None:
    """Put runs side by side, such as one plan with several seeds: what each measured as JSON, and a figure."""
    from treadle.report import curves, gather

    gathered = gather(runs)
    out.mkdir(parents=True, exist_ok=True)
    curves(gathered, out / "results.png")
    (out / "results.json").write_bytes(msgspec.json.format(to_json(gathered)) + b"\n")
    print(f"wrote {out / 'results.json'} and {out / 'results.png'}")


@app.command()
def doctor() -> None:
    """Say what this machine can do: versions, and what its sandbox holds against (found by attacking it)."""
    from treadle.sandbox.bwrap import probe

    print(f"treadle {__version__}, Python {sys.version.split()[0]}")
    for name, extra in EXTRAS.items():
        found = importlib.util.find_spec(name) is not None
        print(f"{name}: {metadata.version(name) if found else f'missing: install treadle[{extra}]'}")
    guarantees = asyncio.run(probe())
    print(f"sandbox: {guarantees.backend} holds against {', '.join(guarantees.held)}")
    for gap in guarantees.unbounded:
        print(f"sandbox: not bounded: {gap}")


def _train(
    name: str,
    stage: Callable[[Workspace, Run], Awaitable[Checkpoint]],
    folder: Path,
    overrides: list[str] | None,
) -> None:
    async def work(ws: Workspace) -> str:
        from treadle.report import Run

        return (await stage(ws, Run(folder / "runs" / name, ws.config))).id

    print(_run(folder, overrides, work))


def _base(folder: Path) -> Checkpoint:
    from treadle.workspace import base_checkpoint

    return base_checkpoint(config.load(folder / "treadle.toml").model.base)


def _tell(result: dict[str, Any]) -> None:
    print(to_json(result).decode())
