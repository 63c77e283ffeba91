"""The test bench: a few sandboxes owned by the environment, each run in a fresh one, equal runs done once.

A test's verdict is a function of the files' contents, so verdicts are kept by (package, contents, test id). Nothing is
kept of a run that broke off.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from pathlib import Path

import msgspec

from treadle.env.repair.packages import PACKAGES, PYTEST, Package, PackageSource, compile_tree, package_sources
from treadle.errors import SandboxDead, TreadleError
from treadle.sandbox.base import Sandbox
from treadle.sandbox.bwrap import open_sandbox, prepare_template, sandbox_venv
from treadle.sandbox.places import shared_folder
from treadle.types import Record, fingerprint

RUNNER = (Path(__file__).parent / "runner.py").read_text(encoding="utf-8")
SECONDS = 6.0  # one run of one job


class Why(Record, frozen=True):
    """Where a test went wrong and Python's own message. `file` is "" when no frame lies in the package."""

    error: str
    file: str = ""
    line: int | None = None
    function: str = ""
    code: str | None = ""


class Verdict(Record, frozen=True):
    """One test's result. `missing`: it was asked for and did not report, which counts as failed."""

    status: str  # passed | failed | skipped | missing
    why: Why | None = None
    seconds: float = 0.0
    calls: tuple[tuple[str, int], ...] = ()  # (module, first line) of the package's functions it ran, when traced

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    def same(self, other: Verdict) -> bool:
        return (self.status, self.why) == (other.status, other.why)


class Run(Record, frozen=True):
    records: dict[str, Verdict]
    closed: bool
    timed_out: bool
    broken: Why | None = None  # why the tests could not be collected

    def verdict(self, test: str) -> Verdict:
        """Of a test, or of all its parameters. Absent counts as failed, and so does all of a report never closed."""
        ours = (v for id_, v in self.records.items() if id_ == test or id_.startswith(f"{test}["))
        cases = [v for v in ours if v.status != "missing"]
        found = next((v for v in cases if not v.passed), cases[0] if cases else None)
        if found is not None and (self.closed or not found.passed):
            return found
        if self.timed_out:
            return Verdict(status="missing", why=Why(error=f"timed out after {SECONDS:g} s"))
        return Verdict(status="missing", why=self.broken or Why(error="no result: the test process ended early"))


class Job(msgspec.Struct, frozen=True):
    """`files` maps paths below the package's root to the whole text that replaces theirs."""

    files: Mapping[str, str]
    tests: Sequence[str]
    repeat: int = 1
    trace: bool = False


class _Answer(msgspec.Struct, frozen=True):
    nonce: str
    jobs: list[list[Run]]


class TestBench:
    """`sandboxes` are open on a tree that holds each package under its own name; `python` is theirs.

    One that died is replaced by what `reopen` gives.
    """

    __test__ = False  # not a test, whatever pytest thinks of its name

    def __init__(
        self,
        sandboxes: Sequence[Sandbox],
        reopen: Callable[[], Awaitable[Sandbox]],
        sources: Mapping[str, PackageSource],
        python: str,
        memo: bool = True,
    ) -> None:
        self.sources = sources
        self.runs = 0  # runs that were really made
        self._sandboxes = list(sandboxes)
        self._reopen = reopen
        self._free: asyncio.Queue[Sandbox] = asyncio.Queue()
        for sandbox in sandboxes:
            self._free.put_nowait(sandbox)
        self._python = python
        self._memo: dict[str, Verdict] | None = {} if memo else None
        self._running: dict[str, asyncio.Lock] = {}

    async def verdicts(self, package: str, files: Mapping[str, str], tests: Sequence[str]) -> dict[str, Verdict]:
        """The verdict of each test with `files` in place. Equal requests at the same time are one run."""
        state = self._state(package, files)
        async with self._running.setdefault(state, asyncio.Lock()):
            known = {test: v for test in tests if (v := self._known(state, test)) is not None}
            if wanted := [test for test in dict.fromkeys(tests) if test not in known]:
                (runs,) = await self.batch(package, [Job(files=files, tests=wanted)])
                known |= {test: runs[0].verdict(test) for test in wanted}
                self._keep(state, runs[0], wanted)
        return {test: known[test] for test in tests}

    def proved(self, package: str, job: Job, runs: Sequence[Run]) -> bool:
        """Whether all runs of a job said the same of every test; if so the verdicts are kept."""
        first = runs[0]
        same = all(run.closed and run.verdict(t).same(first.verdict(t)) for run in runs for t in job.tests)
        if same:
            self._keep(self._state(package, job.files), first, job.tests)
        return same

    async def batch(self, package: str, jobs: Sequence[Job], seconds: float = SECONDS) -> list[list[Run]]:
        """Run several jobs in one fresh sandbox; one list of runs a job, each stopped after `seconds`.

        Raises SandboxDead when the sandbox fails.
        """
        self.runs += sum(job.repeat for job in jobs)
        nonce = secrets.token_hex(8)
        request = {
            "root": package,
            "modules": self.sources[package].modules,
            "nonce": nonce,
            "seconds": seconds,
            "jobs": [{"ids": list(job.tests), "repeat": job.repeat, "trace": job.trace} for job in jobs],
        }
        files = {f".jobs/{n}/{path}": text for n, job in enumerate(jobs) for path, text in job.files.items()}
        # `-I` would ignore PYTHONHASHSEED, and set order would change messages between equal states. The sandbox's
        # environment is empty otherwise, so -s -P without site hooks of the user isolate just as much.
        command = ["/usr/bin/env", "PYTHONHASHSEED=0", self._python, "-s", "-P", "-B", "-c", RUNNER]
        async with self._sandbox() as sandbox:
            try:
                await sandbox.write(files)
            except OSError as error:  # no room in it: the sandbox's fault, not the policy's
                raise SandboxDead(f"nothing can be written in the sandbox: {error}") from error
            limit = 10 + sum(job.repeat for job in jobs) * seconds
            done = await sandbox.exec([*command, msgspec.json.encode(request).decode()], limit, output_limit=1 << 26)
        return _answer(done.output, nonce, jobs)

    async def close(self) -> None:
        for sandbox in self._sandboxes:
            await sandbox.close()

    @asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[Sandbox]:
        sandbox = await self._free.get()
        try:
            await sandbox.reset()
            yield sandbox
        except SandboxDead:
            with suppress(TreadleError):  # where none can be had, the dead one says so again
                sandbox = await self._replaced(sandbox)
            raise
        finally:
            self._free.put_nowait(sandbox)

    async def _replaced(self, dead: Sandbox) -> Sandbox:
        await dead.close()
        fresh = await self._reopen()
        self._sandboxes[self._sandboxes.index(dead)] = fresh
        return fresh

    def _state(self, package: str, files: Mapping[str, str]) -> str:
        """Of the files that differ from the pristine package: a fix gives the same state as never breaking it."""
        source = self.sources[package]
        changed = {path: text for path, text in files.items() if text != source.text(path)}
        return fingerprint([source.package.requirement, changed])

    def _known(self, state: str, test: str) -> Verdict | None:
        return None if self._memo is None else self._memo.get(f"{state} {test}")

    def _keep(self, state: str, run: Run, tests: Sequence[str]) -> None:
        if self._memo is not None and run.closed:
            for test in tests:
                self._memo[f"{state} {test}"] = msgspec.structs.replace(run.verdict(test), calls=())


async def open_bench(
    packages: Sequence[Package] = PACKAGES, cache: Path | None = None, sandboxes: int = 2, memo: bool = True
) -> TestBench:
    """Fetch the packages into `cache` (default: beside the sandboxes' templates) and open that many sandboxes."""
    tree, sources = await asyncio.to_thread(package_sources, packages, cache or shared_folder() / "packages")
    python = await asyncio.to_thread(sandbox_venv, [PYTEST]) / "bin/python"
    await asyncio.to_thread(compile_tree, tree, sources.values(), python)
    template = await asyncio.to_thread(prepare_template, tree, "repair")

    async def opened() -> Sandbox:
        return await open_sandbox(template, python=python)

    return TestBench([await opened() for _ in range(sandboxes)], opened, sources, str(python), memo)


def _answer(output: str, nonce: str, jobs: Sequence[Job]) -> list[list[Run]]:
    """What the runner printed. An answer that can't be read counts as a run in which no test reported.

    A runner that never came so far as to start a test is the sandbox's failure: SandboxDead.
    """
    started, _, told = output.partition("\n")
    if started != nonce:
        raise SandboxDead(f"the test runner did not start: {output.strip()[-300:]}")
    try:
        answer = msgspec.json.decode(told, type=_Answer)
    except msgspec.DecodeError:
        answer = None
    if answer is None or answer.nonce != nonce or len(answer.jobs) != len(jobs):
        return [[Run(records={}, closed=False, timed_out=False)] * job.repeat for job in jobs]
    return answer.jobs


@lru_cache(maxsize=256)
def changed_files(source: PackageSource, edits: tuple[tuple[str, int, str], ...]) -> dict[str, str]:
    """The pristine files with whole lines replaced: (path, line from 1, text)."""
    lines: dict[str, list[str]] = {}
    for path, line, text in edits:
        lines.setdefault(path, source.text(path).split("\n"))[line - 1] = text
    return {path: "\n".join(parts) for path, parts in lines.items()}
