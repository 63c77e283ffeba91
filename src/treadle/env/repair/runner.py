"""Runs tests inside the sandbox. Sent as `python -c` text, never imported by Treadle: standard library and pytest only.

argv[1] is JSON: {"root", "modules", "nonce", "seconds", "jobs": [{"ids", "repeat", "trace"}]}. The files of job `n`
lie in `<root>/../.jobs/<n>`. For each job a forked child runs pytest, which forks once more for each repeat, and all
report through a pipe, line by line. The parent prints the nonce before the first job and JSON after the last:
"jobs" is a list of jobs of runs, each {"records": {id: {...}}, "closed", "broken", "timed_out"}.
"""

import contextlib
import importlib
import io
import json
import os
import re
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from _pytest.config import default_plugins

REPORT_LIMIT = 8 << 20
CANARY = "canary"
SLOWEST = 0.5  # seconds for a traced test


def too_slow(signum: int, frame: FrameType | None) -> None:
    raise AssertionError("too slow")


class Canary(pytest.Item):
    """A test that must fail: a patched reporter that passes everything gives itself away."""

    def runtest(self) -> None:
        raise AssertionError(CANARY)


class Reporter:
    """The pytest plugin that writes each test's outcome to the pipe."""

    def __init__(self, pipe: int, request: dict[str, Any], job: dict[str, Any]) -> None:
        self.pipe, self.nonce, self.trace = pipe, request["nonce"], job["trace"]
        self.repeat, self.run = job["repeat"], 0
        self.root = os.path.realpath(request["root"]) + "/"
        self.modules = {self.root + path for path in request["modules"]}
        self.why: dict[str, dict[str, Any]] = {}
        self.called: dict[str, list[tuple[str, int]]] = {}

    def send(self, **record: Any) -> None:
        os.write(self.pipe, (json.dumps({"nonce": self.nonce, "run": self.run, **record}) + "\n").encode())

    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        items.append(Canary.from_parent(session, name=CANARY))
        for item in items:  # pytest's own long report parses whole files, and nobody reads it
            item.repr_failure = lambda excinfo, style=None: "failed"  # type: ignore[method-assign]

    def pytest_runtestloop(self) -> None:
        """Each repeat but the last goes on in a process of its own; all share one import of the package."""
        while self.run < self.repeat - 1:
            process = os.fork()
            if process == 0:
                return
            os.waitpid(process, 0)
            self.run += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        if not self.trace:
            return (yield)
        calls: set[tuple[str, int]] = set()

        def seen(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename in self.modules:
                calls.add((frame.f_code.co_filename.removeprefix(self.root), frame.f_code.co_firstlineno))

        signal.signal(signal.SIGALRM, too_slow)
        signal.setitimer(signal.ITIMER_REAL, SLOWEST)
        sys.setprofile(seen)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.called[item.nodeid] = sorted(calls)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        report = yield
        if call.excinfo is not None:  # only now: pytest fills it in for unittest's tests on the way
            self.why[item.nodeid] = self.explain(call.excinfo.value)
        return report

    def pytest_exception_interact(self, node: pytest.Collector, call: Any) -> None:
        """Of a file that can't be collected; a test's own exception comes here too late."""
        self.why.setdefault(node.nodeid, self.explain(call.excinfo.value))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = CANARY if report.nodeid.endswith(f"::{CANARY}") else report.nodeid
        self.send(id=name, when=report.when, outcome=report.outcome, seconds=report.duration,
                  why=self.why.get(report.nodeid), calls=self.called.pop(report.nodeid, []))  # fmt: skip

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.send(broken=self.why.get(report.nodeid) or {"error": "the tests can't be collected"})

    def explain(self, error: BaseException) -> dict[str, Any]:
        """Where it happened (innermost frame in the package's modules, or else in a test) and Python's own message."""
        while error.__cause__ is not None and type(error).__name__ == "CollectError":
            error = error.__cause__
        if isinstance(error, SyntaxError):
            return {"file": self.short(error.filename or ""), "line": error.lineno, "function": "",
                    "code": (error.text or "").rstrip(), "error": f"{type(error).__name__}: {error.msg}"}  # fmt: skip
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(self.root)]
        inside = [f for f in frames if f.filename in self.modules] or frames
        where = {}
        if inside:
            at = inside[-1]
            where = {"file": self.short(at.filename), "line": at.lineno, "function": at.name, "code": at.line}
        return {**where, "error": spoken(error)}

    def short(self, path: str) -> str:
        return path.removeprefix(self.root)


def spoken(error: BaseException) -> str:
    """The message as the interpreter prints it: only its own printer adds "Did you mean ...?" (Python 3.11)."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    if len(lines) == 1 and isinstance(error, NameError | AttributeError):
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            sys.__excepthook__(type(error), error, error.__traceback__)
        lines = printed.getvalue().strip().splitlines()[-1:]
    first = lines[0] if lines else type(error).__name__
    return re.sub(r"0x[0-9a-f]{6,}", "0x", first)[:400]


def run_tests(pipe: int, request: dict[str, Any], job: dict[str, Any]) -> None:
    root = request["root"]
    reporter = Reporter(pipe, request, job)
    options = ["-c", "/dev/null", f"--rootdir={root}", "--import-mode=importlib", "--noconftest", "--capture=sys",
               "-p", "no:cacheprovider", "-p", "no:junitxml", "-p", "no:doctest", "-p", "no:faulthandler",
               "-p", "no:warnings", "-p", "no:unraisableexception", "-p", "no:threadexception", "-q"]  # fmt: skip
    code = pytest.main([*options, *(f"{root}/{id_}" for id_ in job["ids"])], plugins=[reporter])
    reporter.send(closing=int(code))


def child(pipe: int, void: int, request: dict[str, Any], job: dict[str, Any]) -> None:
    os.setsid()
    for descriptor in (0, 1, 2):
        os.dup2(void, descriptor)
    os.chdir(request["root"])
    sys.argv = ["pytest"]
    run_tests(pipe, request, job)


def fork(work: Any, seconds: float) -> tuple[bytes, bool]:
    """Run `work(pipe)` in a child; give what it wrote and whether it had to be stopped."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        try:
            work(writing)
        finally:
            os._exit(0)
    os.close(writing)
    heard, deadline = b"", time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0 and len(heard) < REPORT_LIMIT:
        ready, _, _ = select.select([reading], [], [], left)
        chunk = os.read(reading, 65536) if ready else b""
        if ready and not chunk:
            break
        heard += chunk
    timed_out = time.monotonic() >= deadline
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    os.close(reading)
    return heard, timed_out


def read_reports(heard: bytes, nonce: str, runs: int) -> list[dict[str, Any]]:
    """One report a run. An id counts as passed only if its one call passed and no other phase of it failed."""
    reports: list[dict[str, Any]] = [{"records": {}, "closed": False, "broken": None} for _ in range(runs)]
    canaries = [""] * runs
    for line in heard.decode("utf-8", "replace").splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if not isinstance(said, dict) or said.pop("nonce", None) != nonce:
            continue
        report = reports[run := said.pop("run")]
        if "closing" in said:
            report["closed"] = True
        elif "broken" in said:
            report["broken"] = said["broken"]
        elif said["id"] != CANARY:
            fold(report["records"], said)
        elif said["when"] == "call":
            canaries[run] = said["outcome"]
    if reports[0]["broken"]:  # nothing was collected, so nothing was run
        return [{**reports[0], "records": {}}] * runs
    for report, canary in zip(reports, canaries, strict=True):
        report["closed"] = report["closed"] and canary == "failed"
    return reports


def fold(records: dict[str, dict[str, Any]], said: dict[str, Any]) -> None:
    record = records.setdefault(said["id"], {"status": "missing", "seconds": 0.0, "why": None, "calls": []})
    record["seconds"] += said["seconds"]
    doubled = said["when"] == "call" and record["status"] != "missing"
    if doubled or said["outcome"] != "passed":
        record["status"] = "failed" if doubled else said["outcome"]
        record["why"] = record["why"] or said["why"]
    elif said["when"] == "call":
        record["status"] = "passed"
    record["calls"] = record["calls"] or said.get("calls", [])


@contextlib.contextmanager
def laid(files: Path, root: Path, restore: bool) -> Iterator[None]:
    """Lay a job's files over the tree. No compiled copy of the file they replace stays in reach."""
    before: dict[Path, bytes] = {}
    for file in (f for f in files.rglob("*") if f.is_file()):
        target = root / file.relative_to(files)
        for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
            before[compiled] = compiled.read_bytes() if restore else b""
            compiled.unlink()
        if restore and target.exists():
            before[target] = target.read_bytes()
        shutil.copyfile(file, target)
    shutil.rmtree(files, ignore_errors=True)
    yield
    for target, data in before.items() if restore else ():
        target.write_bytes(data)


def one_job(request: dict[str, Any], number: int, void: int) -> list[dict[str, Any]]:
    job, root = request["jobs"][number], Path(request["root"])
    with laid(root.parent / ".jobs" / str(number), root, restore=number + 1 < len(request["jobs"])):
        heard, timed_out = fork(lambda pipe: child(pipe, void, request, job), request["seconds"] * job["repeat"])
    return [{**report, "timed_out": timed_out} for report in read_reports(heard, request["nonce"], job["repeat"])]


def main() -> None:
    request = json.loads(sys.argv[1])
    request["root"] = os.path.realpath(request["root"])
    sys.path.append(request["root"])
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for plugin in default_plugins:  # here once, not in each child
        importlib.import_module(f"_pytest.{plugin}")
    void = os.open(os.devnull, os.O_RDWR)
    print(request["nonce"], flush=True)  # all that tests need is there; what goes wrong from here on is theirs
    answer = [one_job(request, number, void) for number in range(len(request["jobs"]))]
    sys.stdout.write(json.dumps({"nonce": request["nonce"], "jobs": answer}))


if __name__ == "__main__":
    main()
