"""What a run leaves behind: a folder that explains itself, one table of its stages, and a figure of its curves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table
from rich.text import Text

from treadle import __version__
from treadle.config import Config, dump
from treadle.errors import DataError
from treadle.metrics import Rate, Summary
from treadle.types import fingerprint, to_builtins
from treadle.workspace import revision

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEGEND = (
    "success: of tasks to be solved; intervals that overlap show no difference · recovery: solved after a failed try",
    "repeats: calls after a failure that try again what failed · boundary: rightly asked, refused or gave up",
    "invalid: calls that were turned down · tokens/solved: sampled for each solved task · –: nothing to measure",
)
GREEN, BLUE, ORANGE, PINK = "#1b9e77", "#3366aa", "#d95f02", "#cc3377"
GREY = "#777777"


class StageRow(msgspec.Struct, frozen=True):
    """One line of the table: how a checkpoint did on the held-out tasks, and how long that took."""

    stage: str
    summary: Summary
    seconds: float | None = None


# ---------------------------------------------------------------- the run folder


class Run:
    """`config.toml` as resolved, and `metrics.jsonl`, to which lines are only added, the first saying what code ran.

    Opening a run again (a resumed turn) adds another such line; where a step or row is told twice, the later holds.
    """

    def __init__(self, path: Path, config: Config) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.toml").write_text(dump(config), encoding="utf-8")
        self.metrics = path / "metrics.jsonl"
        if self.metrics.exists() and not self.metrics.read_bytes().endswith(b"\n"):
            self._write(b"\n")  # a kill in mid-line: what comes next starts on its own line
        self.log("open", version=__version__, revision=revision(), config=msgspec.to_builtins(config))

    def log(self, stage: str, **values: object) -> None:
        """Add one line: the stage, the time, and what was measured. NaN and infinity are written as null."""
        line = {"stage": stage, "time": round(time.time(), 3), **values}
        self._write(msgspec.json.encode(line, enc_hook=float) + b"\n")

    def row(self, label: str, result: dict[str, Any]) -> StageRow:
        """Log one line of the table; `result` is a Summary as plain values, with `seconds` if known."""
        self.log("eval", **{**result, "label": label})
        return _row(label, result)

    def rows(self) -> list[StageRow]:
        return rows(read_metrics(self.metrics))

    def _write(self, data: bytes) -> None:
        with self.metrics.open("ab") as file:
            file.write(data)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`. A line torn by a kill is left out; a file that is none is a DataError."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        why = f"{path.name}: {error.strerror}"
        raise DataError(f"no run at {path.parent} ({why}): give run folders such as WORKSPACE/runs/turn-1") from None
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError as error:
            if number == len(lines) or b'"open"' in lines[number]:
                continue  # the process that wrote it was killed, and the next one opened the run anew
            raise DataError(f"{path}, line {number} is not a JSON object: {error}") from None
    return found


def rows(metrics: Sequence[dict[str, Any]]) -> list[StageRow]:
    """The table's lines, in the order their labels first appeared."""
    latest = {entry["label"]: entry for entry in metrics if entry.get("stage") == "eval"}
    return [_row(label, entry) for label, entry in latest.items()]


def _row(label: str, result: dict[str, Any]) -> StageRow:
    return StageRow(label, msgspec.convert(result, Summary), result.get("seconds"))


# ---------------------------------------------------------------- the table


def stage_table(rows: Sequence[StageRow]) -> Table:
    """One line a stage. Success has its 95 % interval; "–" is not measured; what left the rates is counted below."""
    left_out = [f"{row.stage}: {n} × {why}" for row in rows for why, n in row.summary.left_out.items()]
    table = Table(title="Held-out tasks", title_justify="left", caption_justify="left")
    table.caption = "\n".join([*LEGEND, *([f"left out of the rates: {', '.join(left_out)}"] if left_out else [])])
    table.add_column("stage", style="bold")
    names = ("success (95 %)", "recovery", "repeats", "boundary", "invalid", "valid JSON", "tokens/solved", "eval time")
    for name in names:
        table.add_column(name, justify="right")
    best = max((row.summary.success.value or 0.0 for row in rows), default=0.0)
    for row in rows:
        summary = row.summary
        success = Text(_interval(summary.success), style="green" if best and summary.success.value == best else "")
        shares = (summary.recovery, summary.repeats, summary.boundary, summary.invalid_calls, summary.valid_json)
        tokens = "–" if summary.tokens_per_solved is None else f"{summary.tokens_per_solved:.0f}"
        table.add_row(row.stage, success, *(_share(share) for share in shares), tokens, _duration(row.seconds))
    return table


def _share(share: Rate) -> str:
    return "–" if share.value is None else f"{100 * share.value:.0f} %"


def _interval(share: Rate) -> str:
    if share.value is None or share.low is None or share.high is None:
        return "–"
    return f"{100 * share.value:.0f} % ({100 * share.low:.0f}–{100 * share.high:.0f}) of {share.n}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.0f} s" if seconds < 60 else f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


# ---------------------------------------------------------------- several runs of one plan


def gather(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """What each run measured, as plain values: what ran, its table, RL steps, verdicts, seconds a stage.

    A path is a run's folder, or a JSON file of runs that were gathered before; a run that is given twice is told once.
    Seconds are those of the processes that finished a stage; what a killed one had spent on it is not known.
    """
    gathered: dict[str, dict[str, Any]] = {}
    for path in paths:
        try:
            runs = _gathered_before(path) if path.suffix == ".json" else [_measured(path / "metrics.jsonl")]
        except (KeyError, TypeError, msgspec.DecodeError) as error:  # a ValidationError is a DecodeError
            raise DataError(f"{path} was written by another version ({error}): compare runs of one version") from None
        gathered |= {fingerprint(run): run for run in runs}
    return list(gathered.values())


def _gathered_before(path: Path) -> list[dict[str, Any]]:
    try:
        runs = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except OSError as error:
        raise DataError(f"no results at {path} ({error.strerror})") from None
    return [run | {"stages": to_builtins(_table_of(run)), "rl": [*run["rl"]]} for run in runs]


def _table_of(run: dict[str, Any]) -> list[StageRow]:
    return msgspec.convert(run["stages"], list[StageRow])


def _measured(path: Path) -> dict[str, Any]:
    metrics = read_metrics(path)
    opened = [entry for entry in metrics if entry.get("stage") == "open"]
    if not opened:
        raise DataError(f"{path} does not say what ran: it is no run's metrics.jsonl")
    stages = [entry for entry in metrics if entry.get("stage") == "stage"]
    verdicts = {(entry["candidate"], entry["incumbent"]): entry for entry in stages if "released" in entry}
    seconds: dict[str, float] = {}
    for entry in stages:
        seconds[entry["name"]] = seconds.get(entry["name"], 0.0) + entry["seconds"]
    return {
        "version": opened[-1]["version"],
        "revisions": list(dict.fromkeys(entry["revision"] for entry in opened)),
        "config": opened[-1]["config"],
        "stages": to_builtins(rows(metrics)),
        "rl": _rl_steps(metrics),
        "releases": [_without(entry, "stage", "time", "name") for entry in verdicts.values()],
        "seconds": seconds,
    }


def _without(entry: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in names}


def _rl_steps(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that were told of last: there are more where settings were changed."""
    told = [entry for entry in metrics if entry.get("stage") == "rl" and "step" in entry]
    steps = {entry["step"]: entry for entry in told if entry.get("checkpoint") == told[-1].get("checkpoint")}
    return [_without(steps[step], "stage", "time") for step in sorted(steps)]


# ---------------------------------------------------------------- the figure


def curves(runs: Sequence[dict[str, Any]], out_png: Path) -> None:
    """Write a PNG of what `gather` gives: held-out success and faults per stage, and what RL did step by step.

    Raises DataError when nothing has been measured yet.
    """
    from matplotlib.figure import Figure

    tables = [table for run in runs if (table := _table_of(run))]
    trained = [run["rl"] for run in runs if run["rl"]]
    if not tables and not trained:
        raise DataError("no evaluation and no RL step yet, so there is nothing to draw")
    tall = bool(tables) + bool(trained)
    figure = Figure(figsize=(10, 3.6 * tall), dpi=130, layout="constrained")
    axes = figure.subplots(tall, 2, squeeze=False)
    if tables:
        _success(axes[0][0], tables)
        _conduct(axes[0][1], tables)
    if trained:
        reward = {"reward": ("mean of the batch", GREEN)}
        _line(axes[-1][0], trained, reward, "RL: reward", share=False)
        faults = {"invalid_calls": ("invalid calls", ORANGE), "repeats": ("repeats after a failure", PINK)}
        _line(axes[-1][1], trained, faults, "RL: faults in the batch", share=True)
    figure.savefig(out_png)


def _labels(tables: Sequence[Sequence[StageRow]]) -> dict[str, int]:
    """Where each stage stands on the axis: the stages of every run, in the order they first appear."""
    names = dict.fromkeys(row.stage for table in tables for row in table)
    return {name: at for at, name in enumerate(names)}


def _success(axes: Axes, tables: Sequence[Sequence[StageRow]]) -> None:
    """A bar a run and stage, with its interval; runs in the order given."""
    places, width = _labels(tables), 0.7 / len(tables)
    for run, table in enumerate(tables):
        for row in table:
            rate, at = row.summary.success, places[row.stage] + (run - (len(tables) - 1) / 2) * width
            if rate.value is None or rate.low is None or rate.high is None:
                continue
            axes.bar(at, 100 * rate.value, width=0.9 * width, color=GREEN, alpha=0.85)
            axes.vlines(at, 100 * rate.low, 100 * rate.high, color="black", linewidth=1.4)
            told, above = f"{100 * rate.value:.0f}", (at, 100 * rate.high)
            axes.annotate(told, above, (0, 3), textcoords="offset points", ha="center", fontsize=8)
    _frame(axes, "Held-out success, 95 % intervals", "% of tasks")
    axes.set_xticks(list(places.values()), list(places))
    axes.set_ylim(0, 108)


def _conduct(axes: Axes, tables: Sequence[Sequence[StageRow]]) -> None:
    places = _labels(tables)
    for run, table in enumerate(tables):
        kinds = [
            ("invalid calls", ORANGE, [row.summary.invalid_calls for row in table]),
            ("repeats after a failure", PINK, [row.summary.repeats for row in table]),
            ("recovery after a failed run", BLUE, [row.summary.recovery for row in table]),
        ]
        for label, color, shares in kinds:
            told = zip(table, shares, strict=True)
            points = [(places[row.stage], 100 * share.value) for row, share in told if share.value is not None]
            axes.plot(*_unzipped(points), "o-", color=color, label=None if run else label, markersize=5)
    _frame(axes, "Conduct on held-out tasks", "%")
    axes.set_xticks(list(places.values()), list(places))
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_ylim(-4, 108)
    axes.legend(frameon=False, fontsize=8)


def _line(
    axes: Axes,
    runs: Sequence[list[dict[str, Any]]],
    drawn: dict[str, tuple[str, str]],
    title: str,
    share: bool,
) -> None:
    scale = 100 if share else 1
    for key, (label, color) in drawn.items():
        for n, steps in enumerate(runs):
            points = [(entry["step"] + 1, scale * entry[key]) for entry in steps if entry.get(key) is not None]
            axes.plot(*_unzipped(points), "o-", color=color, label=None if n else label, markersize=4)
    _frame(axes, title, "%" if share else "")
    axes.set_ylim(bottom=0, top=None if share else 1.05)
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False, fontsize=8)


def _unzipped(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _frame(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GREY, alpha=0.2)
    axes.set_axisbelow(True)
