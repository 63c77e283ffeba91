"""What a run leaves behind: lines that are only added, one table, one figure."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from treadle.config import Config, load
from treadle.errors import DataError
from treadle.metrics import Summary, rate
from treadle.report import Run, StageRow, curves, gather, read_metrics, stage_table
from treadle.types import to_builtins, to_json


def summary(solved: int, repeats: tuple[int, int] = (8, 16), **other: Any) -> dict[str, Any]:
    found = Summary(
        asked=64,
        left_out={},
        ends={"submitted": 64},
        success=rate(solved, 64),
        success_of_asked=rate(solved, 64),
        boundary=rate(1, 4),
        by_level={},
        by_kind={},
        recovery=rate(3, 10),
        repeats=rate(*repeats),
        invalid_calls=rate(20, 100),
        valid_json=rate(98, 100),
        tokens_per_solved=449.4 if solved else None,
        tokens_per_episode=120.0,
    )
    return {**to_builtins(found), "seconds": 125.0, **other}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "runs" / "turn-1", Config())


def printed(rows: list[StageRow]) -> str:
    out = io.StringIO()
    Console(file=out, width=180).print(stage_table(rows))
    return out.getvalue()


# ---------------------------------------------------------------- the folder


def test_a_run_says_what_ran(run: Run) -> None:
    assert load(run.path / "config.toml") == Config()
    (first,) = read_metrics(run.metrics)
    assert first["stage"] == "open" and first["config"]["rl"]["steps"] == Config().rl.steps
    assert "revision" in first and "version" in first


def test_lines_are_only_added(run: Run) -> None:
    run.log("rl", step=0, reward=np.float64(0.5), loss=math.nan, count=np.int64(3))
    before = run.metrics.read_bytes()
    Run(run.path, Config(seed=1)).log("rl", step=1)
    assert run.metrics.read_bytes().startswith(before)
    entries = read_metrics(run.metrics)
    assert [entry["stage"] for entry in entries] == ["open", "rl", "open", "rl"]
    assert (entries[1]["reward"], entries[1]["loss"], entries[1]["count"]) == (0.5, None, 3.0)
    assert entries[2]["config"]["seed"] == 1


def test_a_line_torn_by_a_kill_costs_that_line_alone(run: Run) -> None:
    run.log("rl", step=0)
    with run.metrics.open("ab") as file:
        file.write(b'{"stage": "rl", "st')
    assert [entry["stage"] for entry in read_metrics(run.metrics)] == ["open", "rl"]
    Run(run.path, Config()).log("rl", step=1)
    assert [entry["stage"] for entry in read_metrics(run.metrics)] == ["open", "rl", "open", "rl"]


def test_a_first_line_that_is_torn_stops_no_later_run(run: Run) -> None:
    run.metrics.write_bytes(b'{"stage": "open", "ti')
    Run(run.path, Config()).log("rl", step=1)
    assert [entry["stage"] for entry in read_metrics(run.metrics)] == ["open", "rl"]


@pytest.mark.parametrize(
    ("text", "says"), [(None, "no run at"), (b"{}\nnot json\n{}\n", "line 2"), (b"[]\n{}\n", "line 1")]
)
def test_files_that_are_no_metrics_say_so(tmp_path: Path, text: bytes | None, says: str) -> None:
    path = tmp_path / "metrics.jsonl"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(DataError, match=says):
        read_metrics(path)


# ---------------------------------------------------------------- the table


def test_rows_are_kept_in_order_and_told_once(run: Run) -> None:
    """A resumed turn logs its rows again: the later one holds, in the first one's place."""
    run.row("base", summary(0))
    run.row("sft", summary(20))
    again = Run(run.path, Config())
    again.row("base", summary(8))
    assert [(row.stage, row.summary.success.hits) for row in again.rows()] == [("base", 8), ("sft", 20)]


def test_table_shows_gaps_as_gaps_and_zeros_as_zeros(run: Run) -> None:
    """None is not zero: what was not measured is a dash, what was measured as zero is 0 %."""
    left_out = {"infrastructure: tool": 3}
    base_row = run.row("base", summary(0, repeats=(0, 0), seconds=None, left_out=left_out))
    text = printed([base_row, run.row("rl", summary(29, repeats=(0, 16)))])
    base, rl = (line for line in text.splitlines() if line.startswith(("│ base", "│ rl")))
    assert [cell.strip() for cell in base.split("│")[1:-1]] == [
        *("base", "0 % (0–6) of 64", "30 %", "–", "25 %", "20 %", "98 %", "–", "–"),
    ]
    assert [cell.strip() for cell in rl.split("│")[1:-1]] == [
        *("rl", "45 % (34–57) of 64", "30 %", "0 %", "25 %", "20 %", "98 %", "449", "2:05 min"),
    ]
    assert "left out of the rates: base: 3 × infrastructure: tool" in text


def test_a_summary_that_lacks_success_is_no_row(run: Run) -> None:
    with pytest.raises(ValueError, match="missing required field"):
        run.row("base", {"seconds": 1.0})


# ---------------------------------------------------------------- the figure


def fill(run: Run) -> None:
    for label, solved, repeats in (
        ("base", 0, (0, 0)),
        ("sft", 19, (24, 40)),
        ("rl", 31, (2, 40)),
        ("distill", 29, (1, 40)),
    ):
        run.row(label, summary(solved, repeats))
    for step in range(8):
        run.log("rl", step=step, reward=0.4 + 0.04 * step, invalid_calls=0.2 - 0.02 * step, repeats=0.6 / (step + 1))
    run.log("sft", loss=1.0)


def test_figure_is_drawn_from_the_lines_alone(run: Run, tmp_path: Path) -> None:
    fill(run)
    out = tmp_path / "curves.png"
    curves(gather([run.path]), out)
    pixels = np.asarray(Image.open(out).convert("RGB"))
    height, width, _ = pixels.shape
    assert width > 1000 and height > 700
    for top, left in ((0, 0), (0, 1), (1, 0), (1, 1)):
        panel = pixels[top * height // 2 :, left * width // 2 :][: height // 2, : width // 2]
        assert (panel.max(axis=2).astype(int) - panel.min(axis=2) > 60).sum() > 200, "something coloured is drawn"


@pytest.mark.parametrize("stage", ["eval", "rl"])
def test_figure_of_half_a_turn(run: Run, tmp_path: Path, stage: str) -> None:
    if stage == "eval":
        run.row("base", summary(0, repeats=(0, 0)))
    else:
        run.log("rl", step=0, reward=0.5)
    curves(gather([run.path]), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_runs_of_one_plan_stand_side_by_side(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "other", Config(seed=1))
    for each in (run, other):
        fill(each)
        each.log("stage", name="eval", seconds=2.0)
        each.log("stage", name="eval", seconds=3.0)
        for _ in range(2):  # a kill may have a verdict told twice
            each.log("stage", name="release", seconds=1.0, candidate="c", incumbent="i", released=False, criteria=[])
    first, second = gather([run.path, other.path])
    assert (first["config"]["seed"], second["config"]["seed"]) == (0, 1)
    assert [row["stage"] for row in first["stages"]] == ["base", "sft", "rl", "distill"]
    assert [step["step"] for step in second["rl"]] == list(range(8))
    assert first["releases"] == [
        {"seconds": 1.0, "candidate": "c", "incumbent": "i", "released": False, "criteria": []}
    ]
    assert first["seconds"] == {"eval": 5.0, "release": 2.0}
    for name, runs in (("one", [run]), ("two", [run, other])):
        curves(gather([each.path for each in runs]), tmp_path / f"{name}.png")
    one, two = (np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB")) for name in ("one", "two"))
    assert one.shape == two.shape and (one != two).any()


def test_earlier_results_stand_beside_new_ones(run: Run, tmp_path: Path) -> None:
    """Seeds may be run on several machines; what is given twice is told once, and two turns of one plan are two."""
    fill(run)
    results = tmp_path / "results.json"
    results.write_bytes(to_json(gather([run.path])))
    other = Run(tmp_path / "other", Config(seed=1))
    fill(other)
    assert gather([results, other.path, run.path]) == gather([run.path, other.path])
    second = Run(run.path.with_name("turn-2"), Config())
    second.row("start", summary(40))
    assert [len(each["stages"]) for each in gather([results, second.path])] == [4, 1]
    for text in ("[{}]", '[{"stages": []}]', "{", "[1]"):
        results.write_text(text)
        with pytest.raises(DataError, match="another version"):
            gather([results])
    with pytest.raises(DataError, match="no results at"):
        gather([tmp_path / "nowhere.json"])


def test_a_folder_of_two_runs_shows_the_last(run: Run) -> None:
    """A stage run by hand again, with other settings, writes to the same file."""
    for checkpoint, rewards in (("a", [0.1, 0.2, 0.3, 0.4]), ("b", [0.5, 0.6])):
        for step, reward in enumerate(rewards):
            run.log("rl", checkpoint=checkpoint, step=step, reward=reward)
    (found,) = gather([run.path])
    assert [step["reward"] for step in found["rl"]] == [0.5, 0.6]


@pytest.mark.parametrize("line", ['{"stage": "eval", "label": "base"}', '{"stage": "stage"}'])
def test_metrics_of_another_version_are_named(run: Run, line: str) -> None:
    run.metrics.write_bytes(run.metrics.read_bytes() + line.encode() + b"\n")
    with pytest.raises(DataError, match=r"turn-1 was written by another version"):
        gather([run.path])


def test_nothing_measured_is_nothing_to_draw(run: Run, tmp_path: Path) -> None:
    run.log("sft", loss=1.0)
    with pytest.raises(DataError, match="nothing to draw"):
        curves(gather([run.path]), tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_every_line_is_json(run: Run) -> None:
    fill(run)
    assert all(isinstance(json.loads(line), dict) for line in run.metrics.read_text().splitlines())
