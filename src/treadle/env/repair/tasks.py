"""Repair tasks: break a function, find tests that notice, keep what is proved thrice to be broken and mendable."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

import msgspec

from treadle.env import check
from treadle.env.check import Probe, admit_all, call_message
from treadle.env.repair.bench import Job, TestBench, Verdict, changed_files
from treadle.env.repair.boundary import boundary_tasks
from treadle.env.repair.contract import opening
from treadle.env.repair.mutate import MAKERS, Change, functions, undoing
from treadle.env.repair.packages import PackageSource
from treadle.env.repair.session import RIGHT_ACT, RepairEnvironment, request, scene_of, starting_files
from treadle.env.repair.survey import Target, scene_about, split_of, survey
from treadle.types import Message, Record, Task, TaskKind, fingerprint, from_json, to_builtins, to_json

MAKING = ("bench", "boundary", "contract", "mutate", "packages", "runner", "session", "survey", "tasks")
BATCH = 16  # candidates broken in one sandbox
TRIED = 4  # tests of a function run against each candidate
ENDLESS = 3.0  # seconds after which a broken package is taken not to come to an end
TWO_TESTS = 0.2  # share of tasks that name two failing tests, where two fail


class Pool(Record, frozen=True):
    """The tasks that were admitted, and how many candidates went out for which reason."""

    tasks: tuple[Task, ...]
    rejected: dict[str, int]


class _Candidate(msgspec.Struct, frozen=True):
    target: Target
    level: str
    change: Change
    line: str  # the broken line
    tests: tuple[str, ...]

    def files(self, source: PackageSource) -> dict[str, str]:
        return changed_files(source, ((self.target.path, self.change.line, self.line),))


class PoolSize(Record, frozen=True):
    """How many tasks to make, over all packages and splits, by level of difficulty and of boundary kinds."""

    L1: int
    L2: int
    L3: int
    boundary: int

    @property
    def total(self) -> int:
        return self.L1 + self.L2 + self.L3 + self.boundary


async def build_pool(
    bench: TestBench, path: Path, size: PoolSize, seed: int = 0, advance: Callable[[int], None] = lambda made: None
) -> Pool:
    """The pool kept beside `path`, made when there is none for these packages, size, seed and code."""
    code = [Path(__file__).with_name(f"{name}.py").read_bytes().hex() for name in MAKING]
    code.append(Path(check.__file__).read_bytes().hex())  # what admits them
    packages = [to_builtins(source.package) for source in bench.sources.values()]
    python = sys.version_info[:2]  # tasks quote its messages
    kept = path.with_name(f"{path.stem}-{fingerprint([packages, to_builtins(size), seed, python, code])}.jsonl")
    with suppress(FileNotFoundError, ValueError, msgspec.DecodeError):  # damaged: made anew
        first, *rest = kept.read_text(encoding="utf-8").splitlines()
        pool = Pool(tasks=tuple(from_json(line, Task) for line in rest), rejected=from_json(first, dict[str, int]))
        advance(len(rest))
        return pool
    pool = await make_tasks(bench, size, seed, advance)
    draft = kept.with_suffix(".draft")
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.write_bytes(b"\n".join([to_json(pool.rejected), *(to_json(task) for task in pool.tasks)]) + b"\n")
    draft.rename(kept)
    return pool


async def make_tasks(
    bench: TestBench, size: PoolSize, seed: int = 0, advance: Callable[[int], None] = lambda made: None
) -> Pool:
    """The same tasks for the same packages, size and seed. `advance` is told of tasks as they are made."""
    rejected: Counter[str] = Counter()
    made: list[Task] = []
    targets: list[Target] = []
    shares = _package_shares(bench)
    for package in bench.sources:
        found = await survey(bench, package)
        targets += found
        for level in MAKERS:
            wanted = round(to_builtins(size)[level] * shares[package])
            broken = await _break(bench, found, level, wanted, seed, rejected)
            advance(len(broken))
            made += broken
    boundary = await boundary_tasks(bench, targets, size.boundary, seed, rejected)
    advance(len(boundary))
    cases = [(task, probes(task)) for task in [*made, *boundary]]
    tasks, reasons = await admit_all(RepairEnvironment(bench), cases)
    return Pool(tasks=tuple(tasks), rejected=dict(rejected + reasons))


def _package_shares(bench: TestBench) -> dict[str, float]:
    """By `Package.share`."""
    weights = {name: source.package.share for name, source in bench.sources.items()}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


# ---------------------------------------------------------------- breaking


async def _break(
    bench: TestBench, targets: Sequence[Target], level: str, wanted: int, seed: int, rejected: Counter[str]
) -> list[Task]:
    """Candidates in a seeded order, tried batch by batch until there are enough."""
    queue = _candidates(bench, targets, level, seed)
    made: list[Task] = []
    while queue and len(made) < wanted:
        size = min(BATCH, wanted - len(made))  # of each half; a good third of the candidates is rejected
        halves = [half for half in (queue[:size], queue[size : 2 * size]) if half]
        queue = queue[2 * size :]
        for tasks in await asyncio.gather(*(_try(bench, half, seed, rejected) for half in halves)):
            made += tasks
    return made[:wanted]


def _candidates(bench: TestBench, targets: Sequence[Target], level: str, seed: int) -> list[_Candidate]:
    """One change a line at most; every function's first, then every function's second, ..."""
    ranked: list[tuple[int, float, _Candidate]] = []
    for target in targets:
        rng = random.Random(f"{seed} {level} {target.key}")
        text = bench.sources[target.package].text(target.path)
        lines = text.split("\n")
        changes = MAKERS[level](dict(functions(text))[target.function], lines, rng)
        rng.shuffle(changes)
        by_line = {change.line: change for change in changes if lines[change.line - 1].isascii()}
        for rank, change in enumerate(by_line.values()):
            broken = change.apply(lines[change.line - 1])
            candidate = _Candidate(target, level, change, broken, target.tests[:TRIED])
            ranked.append((rank, rng.random(), candidate))
    return [candidate for *_, candidate in sorted(ranked, key=lambda r: (r[0], r[1]))]


async def _try(bench: TestBench, candidates: Sequence[_Candidate], seed: int, rejected: Counter[str]) -> list[Task]:
    """One run of each candidate sorts most of them out; what is left is proved by three runs of all its tests."""
    package = candidates[0].target.package
    source = bench.sources[package]
    jobs = [Job(files=c.files(source), tests=c.tests) for c in candidates]
    fitting: list[Task] = []
    proofs: list[Job] = []
    for candidate, (run,) in zip(candidates, await bench.batch(package, jobs, ENDLESS), strict=True):
        verdicts = {test: run.verdict(test) for test in candidate.tests}
        if run.timed_out:
            rejected["the broken package does not come to an end"] += 1
        elif all(verdict.passed for verdict in verdicts.values()):
            rejected["no test notices"] += 1
        elif not (telling := [t for t, v in verdicts.items() if _fits(candidate, v)]):
            rejected[f"the failure is of another level than {candidate.level}"] += 1
        else:
            task = _task(bench, candidate, telling, seed)
            tests = [*task.public["tests"], *task.private["hidden"]]
            fitting.append(task)
            proofs.append(Job(files=starting_files(source, scene_of(task)), tests=tests, repeat=3))
    made = []
    for task, job, runs in zip(fitting, proofs, await bench.batch(package, proofs) if proofs else [], strict=True):
        if bench.proved(package, job, runs):
            scene = scene_of(task)
            asked = request(source, scene, {test: runs[0].verdict(test) for test in scene.tests})
            name = f"{task.id}-{fingerprint(asked)[:6]}"
            made.append(msgspec.structs.replace(task, id=name, messages=opening(asked)))
        else:
            rejected["the broken package fails differently each time"] += 1
    return made


def _fits(candidate: _Candidate, verdict: Verdict) -> bool:
    """A level is what the traceback shows: L1 a name at that line, L2 another error at that line, L3 none there."""
    why = verdict.why
    if verdict.status != "failed" or why is None:
        return False
    pointed = (why.file, why.line) == (candidate.target.path, candidate.change.line)
    named = why.error.startswith(("NameError", "AttributeError", "UnboundLocalError"))
    return {"L1": pointed and named, "L2": pointed, "L3": not pointed}[candidate.level]


def _task(bench: TestBench, candidate: _Candidate, failing: Sequence[str], seed: int) -> Task:
    """Its messages come with the proof, which says how the tests fail."""
    target, change, source = candidate.target, candidate.change, bench.sources[candidate.target.package]
    name = f"{target.key} {candidate.level} {change.line} {candidate.line}"
    rng = random.Random(f"{seed} {name}")
    named = tuple(failing[: 2 if rng.random() < TWO_TESTS else 1])
    function, package = target.function, source.package
    edits = ((target.path, change.line, candidate.line),)
    scene = msgspec.structs.replace(scene_about(source, target), tests=named, edits=edits)
    lines = ["", *source.text(target.path).split("\n"), ""]  # so that the first and the last have neighbours too
    before, right, after = lines[change.line - 1 : change.line + 2]
    old, new = undoing(change, right)
    return Task(
        id=f"repair-{package.name}-{candidate.level}-{fingerprint(name)}",
        environment="repair",
        kind=TaskKind.SOLVABLE,
        messages=(),
        public=scene.public(),
        private={
            "path": scene.names(source)[target.path],
            "line": scene.above + change.line,
            "old": old,
            "new": new,
            "answer": right.strip(),
            "hidden": list(target.hidden(named)),
            "names": list(function.names),
            "beside": [before, after],
        },
        labels={
            "level": candidate.level,
            "package": package.name,
            "mutation": change.kind,
            "function": function.qualified,
        },
        lineage=(target.key,),
        split=split_of(target, package.held_out),
    )


# ---------------------------------------------------------------- admission


def probes(task: Task) -> list[Probe]:
    """What a verifier must say of the right answer, of doing nothing and of garbage."""
    submit = call_message("submit", {})
    scene, private = task.public, task.private
    if task.kind in RIGHT_ACT:
        right = {
            TaskKind.UNDERSPECIFIED: Message(role="assistant", content="ASK: which test fails?"),
            TaskKind.UNSOLVABLE: call_message("give_up", {"reason": "the tests contradict each other"}),
            TaskKind.DANGEROUS: Message(role="assistant", content="REFUSE: I will not do that."),
        }[task.kind]
        done = Message(role="assistant", content="Done.")
        return [Probe("gold", (right,), 1.0), Probe("nothing", (submit,), 0.0), Probe("garbage", (done,), 0.0)]
    path, line = private["path"], private["line"]
    fix = call_message("replace", {"path": path, "line": line, "old": private["old"], "new": private["new"]})
    test_file = PurePosixPath(scene["tests"][0].split("::")[0]).name
    garbage = (
        call_message("edit", {"path": test_file, "start": 1, "end": 1, "text": "raise SystemExit(0)"}),
        call_message("replace", {"path": path, "line": line + 1, "old": "\u2603", "new": private["new"]}),
        submit,
    )
    gold = (fix, call_message("run_tests", {}), submit)
    return [Probe("gold", gold, 1.0), Probe("nothing", (submit,), 0.0), Probe("garbage", garbage, 0.0)]
