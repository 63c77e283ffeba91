"""ingest: raw logs → trajectories in the store, scrubbed, each with what it is good for and what it lacks.

Ids follow from content, so reading the same log again, or going on after a crash, does nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from treadle.errors import DataError
from treadle.pool import formats
from treadle.pool.formats.base import Quarantine
from treadle.pool.scrub import Scrubber
from treadle.store import Store
from treadle.types import Trajectory

STAGE = "ingest"
PURPOSES = ("sft", "preference", "rl")
LOG_ENDINGS = {".jsonl", ".ndjson"}  # what is looked for inside a folder


class IngestReport(msgspec.Struct, kw_only=True):
    """Counts over all records read. `trajectories + repeated + sum(quarantined) == records`."""

    files: int = 0
    skipped: dict[str, int] = {}  # files inside folders, by an ending that no log has
    records: int = 0
    trajectories: int = 0  # newly stored
    repeated: int = 0  # stored before, or the same record twice
    calls: int = 0
    results: int = 0
    interrupted: int = 0
    mended: dict[str, int] = {}  # what readers had to repair or leave out
    quarantined: dict[str, int] = {}
    secrets: dict[str, int] = {}
    good_for: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(PURPOSES, 0))
    missing: dict[str, int] = {}  # "rl: no token ids" -> trajectories


def ingest(paths: Iterable[str | Path], store: Store) -> IngestReport:
    """Read log files (and the `*.jsonl` and `*.ndjson` of folders) into the store, one commit a trajectory.

    Raises DataError, before anything is stored, when a path is missing, a pipe, or of no known format.
    """
    report = IngestReport()
    scrubber = Scrubber()
    for path, name in [(path, _format_of(path)) for path in _files(paths, report.skipped)]:
        report.files += 1
        for record in formats.load(name).read(path) if name else ():
            report.records += 1
            if isinstance(record, Quarantine):
                _set_aside(record, scrubber, store, report)
            elif store.has_trajectory(record.id):
                report.repeated += 1
            else:
                _take(record, scrubber, store, report)
    report.secrets = dict(scrubber.counts)
    return report


def _files(paths: Iterable[str | Path], skipped: dict[str, int]) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file())
            logs = [p for p in inside if p.suffix.lower() in LOG_ENDINGS]
            if not logs:
                raise DataError(f"no {' or '.join(sorted(LOG_ENDINGS))} files in {path}: name the log files themselves")
            for other in set(inside) - set(logs):
                _count(skipped, other.suffix or "no ending")
            yield from logs
        elif path.is_file():
            yield path
        elif path.exists():
            raise DataError(f"{path} is no regular file, and a log is read twice: write it to a file first")
        else:
            raise DataError(f"no such file: {path}")


def _format_of(path: Path) -> str | None:
    """None for an empty file: it has no records to read."""
    name = formats.detect(path)
    if name is None:
        with path.open("rb") as file:
            if any(line.strip() for line in file):
                raise DataError(f"{path} is of no known log format (known: {', '.join(formats.FORMATS)})")
    return name


def _set_aside(record: Quarantine, scrubber: Scrubber, store: Store, report: IngestReport) -> None:
    where = record.where().encode("utf-8", "backslashreplace").decode()  # file names may be no text
    store.dispose(where, STAGE, "quarantine", scrubber.text(f"{record.code}: {record.reason}"))
    _count(report.quarantined, record.code)


def _take(raw: Trajectory, scrubber: Scrubber, store: Store, report: IngestReport) -> None:
    trajectory = scrubber.trajectory(raw)
    for purpose, lacks in lacking(trajectory).items():
        report.good_for[purpose] += not lacks
        for what in lacks:
            _count(report.missing, f"{purpose}: {what}")
    store.add_trajectory(trajectory)
    report.trajectories += 1
    report.calls += sum(len(node.message.tool_calls) for node in trajectory.nodes)
    report.results += sum(node.message.role == "tool" for node in trajectory.nodes)
    report.interrupted += "interrupted" in trajectory.extra
    for what, n in trajectory.extra.get("counts", {}).items():
        _count(report.mended, what, n)


def _count(counts: dict[str, int], name: str, n: int = 1) -> None:
    counts[name] = counts.get(name, 0) + n


def lacking(trajectory: Trajectory) -> dict[str, list[str]]:
    """What keeps a trajectory from each use; an empty list means it can be used."""
    replies = [node for node in trajectory.nodes if node.message.role == "assistant"]
    text: list[str] = []
    if unanswered := trajectory.extra.get("interrupted"):
        text.append(f"tool results missing ({unanswered})")
    if any(node.extra.get("parts") for node in trajectory.nodes):
        text.append("parts without text (images) are not supported")
    if not any(node.message.content or node.message.tool_calls for node in replies):
        text.append("no reply with content")
    graded = [] if trajectory.outcome.reward is not None else ["no reward"]
    known = [] if trajectory.task_id is not None else ["no task id"]
    sampled = [node for node in replies if any(node.mask)]
    tokens = [] if sampled else ["no token ids"]
    if any(p is None for node in sampled for p, own in zip(node.log_probs, node.mask, strict=True) if own):
        tokens.append("no log-probs of sampled tokens")
    return {"sft": text, "preference": [*text, *graded, *known], "rl": [*text, *graded, *known, *tokens]}
