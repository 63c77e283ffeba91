"""Which tests call which functions: one traced run of each test module on the pristine package."""

from __future__ import annotations

import asyncio
import hashlib
import random
from functools import lru_cache
from pathlib import PurePosixPath

import msgspec

from treadle.env.repair.bench import Job, Run, TestBench, Verdict
from treadle.env.repair.mutate import Function, functions
from treadle.env.repair.packages import PackageSource
from treadle.env.repair.session import Scene
from treadle.types import Record, Split

SLOW = 0.25  # seconds, traced: a slower test is no use to an episode
MANY = 30.0  # seconds for a whole test module
KEPT = 8  # tests of a function, at most


class Target(Record, frozen=True):
    """A function and the tests that call it, most telling first; all of them pass thrice on the pristine package."""

    package: str
    path: str
    function: Function
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.package}/{self.path}:{self.function.qualified}"

    def hidden(self, named: tuple[str, ...]) -> tuple[str, ...]:
        """Other tests of the named ones' module."""
        module = named[0].split("::")[0]
        return tuple(t for t in self.tests if t not in named and t.split("::")[0] == module)


NOT_MOVED = 1 / 3  # share of the functions whose module starts at its first line
FARTHEST = 9_000  # lines
SHARES = {"train": 0.75, "validation": 0.08}  # of the functions; the rest is held out


def split_of(target: Target, held_out: bool) -> Split:
    """By function, so that no function is in two splits; a package held out is so whole."""
    at = int(hashlib.sha256(target.key.encode()).hexdigest()[:8], 16) / 0xFFFFFFFF
    if held_out or at > sum(SHARES.values()):
        return Split.HELD_OUT
    return Split.TRAIN if at < SHARES["train"] else Split.VALIDATION


def shown_name(source: PackageSource, target: Target) -> str:
    """What a training task calls the function's module: like some other function, so that a policy learns to copy a
    file's name rather than to know it. "" for a package held out: its modules keep their names.
    """
    if source.package.held_out:
        return ""
    return random.Random(target.key).choice(_free_names(source))


def lines_above(source: PackageSource, target: Target) -> int:
    """How far down a training task moves the function's module, for the same reason: line numbers have to be read.

    0 for a package held out. Without this, what has seen three digits alone leaves out the fourth.
    """
    rng = random.Random(f"{target.key} above")
    return 0 if source.package.held_out or rng.random() < NOT_MOVED else rng.randrange(1, FARTHEST)


def scene_about(source: PackageSource, target: Target) -> Scene:
    """Where an episode about the function begins: its module, under the name and in the place that tasks give it."""
    above, function = lines_above(source, target), target.function
    return Scene(
        package=source.package.name,
        version=source.package.version,
        path=target.path,
        function=function.name,
        lines=(above + function.start, above + function.end),
        shown=shown_name(source, target),
        above=above,
    )


@lru_cache(maxsize=16)
def _free_names(source: PackageSource) -> tuple[str, ...]:
    defined = {f"{f.name}.py" for path in source.modules for f, _ in functions(source.text(path))}
    return tuple(sorted(defined - {PurePosixPath(path).name for path in source.short})) or ("",)


async def survey(bench: TestBench, package: str) -> list[Target]:
    """Trace each test module once; then prove the tests that are of use, thrice."""
    source = bench.sources[package]
    callers: dict[tuple[str, int], list[tuple[int, str]]] = {}
    traces = await _runs(bench, package, [Job(files={}, tests=[path], trace=True) for path in source.tests])
    for _, (run,) in traces:
        for test, verdict in _usable(run).items():
            for at in verdict.calls:
                callers.setdefault(at, []).append((len(verdict.calls), test))
    found = []
    for path in source.modules:
        for function, _ in functions(source.text(path)):
            tests = callers.get((path, function.first), [])
            order = sorted(tests, key=lambda t: (_plain(function.name) not in _plain(t[1]), *t))
            if order:
                names = tuple(test for _, test in order[:KEPT])
                found.append(Target(package=package, path=path, function=function, tests=names))
    steady = await _steady(bench, package, {test for target in found for test in target.tests})
    kept = [(target, tuple(test for test in target.tests if test in steady)) for target in found]
    return [msgspec.structs.replace(target, tests=tests) for target, tests in kept if tests]


def _plain(name: str) -> str:
    """For names that say the same in their own ways: `TakeTests` is about `take`."""
    return name.lower().replace("_", "")


async def _runs(bench: TestBench, package: str, jobs: list[Job]) -> list[tuple[Job, list[Run]]]:
    """Half of the jobs in one sandbox, half in another."""
    halves = [half for half in (jobs[::2], jobs[1::2]) if half]
    answers = await asyncio.gather(*(bench.batch(package, half, MANY) for half in halves))
    return [pair for half, runs in zip(halves, answers, strict=True) for pair in zip(half, runs, strict=True)]


def _usable(run: Run) -> dict[str, Verdict]:
    """Tests that passed, quickly and under one name (parametrised ones are left out)."""
    right = {test: v for test, v in run.records.items() if v.passed and v.seconds < SLOW and "[" not in test}
    return right if run.closed else {}


async def _steady(bench: TestBench, package: str, tests: set[str]) -> set[str]:
    """Those that pass three times more; their verdicts are kept for the episodes."""
    modules: dict[str, list[str]] = {}
    for test in sorted(tests):
        modules.setdefault(test.split("::")[0], []).append(test)
    jobs = [Job(files={}, tests=wanted, repeat=3) for wanted in modules.values()]
    proved = set()
    for job, runs in await _runs(bench, package, jobs):
        if bench.proved(package, job, runs):
            proved |= {test for test in job.tests if runs[0].verdict(test).passed}
    return proved
