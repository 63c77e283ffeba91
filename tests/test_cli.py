"""The command line as a user meets it: bad input is one clear line, exit code 2, and leaves nothing half-written."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TREADLE = Path(sys.executable).with_name("treadle")


def treadle(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ if path is None else {**os.environ, "PATH": path}
    command = [str(TREADLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "ws"
    assert treadle("init", str(made), "--set", "model.base=tiny", "--set", 'tasks.packages=["toolz"]').returncode == 0
    return made


def refused(done: subprocess.CompletedProcess[str], *says: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("treadle: "), done.stderr
    for words in says:
        assert words in done.stderr


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_bad_settings_and_paths_are_named_with_their_remedy(folder: Path, tmp_path: Path) -> None:
    w = ["-w", str(folder)]
    refused(treadle("turn", *w, "--set", "rl.stepz=1"), "rl.stepz", "did you mean 'rl.steps'")
    refused(treadle("turn", "-w", str(tmp_path / "nowhere")), "treadle init")
    refused(treadle("sft", *w, "--set", f"model.base={tmp_path}"), str(tmp_path), "config.json")
    refused(treadle("check", *w, "--set", 'tasks.packages=["tools"]'), "did you mean 'toolz'")
    assert left(folder) == ["treadle.toml"]
    refused(treadle("init", str(folder)), "is there already")


def test_a_missing_log_is_refused_and_a_broken_line_set_aside(folder: Path, tmp_path: Path) -> None:
    refused(treadle("ingest", str(tmp_path / "none.jsonl"), "-w", str(folder)), "none.jsonl")
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    logs = tmp_path / "logs.jsonl"
    logs.write_text(json.dumps(row) + '\n{"messages": [\n')
    done = treadle("ingest", str(logs), "-w", str(folder))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["trajectories"] == 1
    assert sum(report["quarantined"].values()) == 1


def test_a_stage_without_what_it_needs_names_the_stage_before(folder: Path) -> None:
    w = ["-w", str(folder)]
    refused(treadle("sft", *w), "treadle ingest", "treadle curate")
    refused(treadle("rl", "base", *w), "treadle check")
    refused(treadle("shape", "nothing", *w), "unknown checkpoint 'nothing'")
    refused(treadle("show", "nothing", *w), "nothing")


def test_no_sandbox_is_refused_with_the_remedy(folder: Path, tmp_path: Path) -> None:
    """Where namespaces are off there is no quiet fall back to running untrusted code without isolation."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    (tools / "bwrap").chmod(0o755)
    refused(treadle("check", "-w", str(folder), path=f"{tools}:{os.environ['PATH']}"), "no sandbox", "bubblewrap")
    assert left(folder) == ["treadle.toml"]
    for reading in (("status",), ("status", "--policy", "base"), ("curate",)):
        assert treadle(*reading, "-w", str(folder), path=f"{tools}:{os.environ['PATH']}").returncode == 0


def test_two_at_work_in_one_workspace(folder: Path) -> None:
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    settings = (folder / "treadle.toml").read_text()
    (folder / "new").write_text(settings)
    (folder / "new").replace(folder / "treadle.toml")  # as an editor saves it
    try:
        for verb in (("sft",), ("curate",), ("ingest", str(folder))):
            refused(treadle(*verb, "-w", str(folder)), "another treadle", str(folder))
        assert treadle("status", "-w", str(folder)).returncode == 0
    finally:
        os.close(held)
    refused(treadle("sft", "-w", str(folder)), "treadle ingest")
    refused(treadle("status", "-w", str(folder / "treadle.toml")), "workspace's folder")
    refused(treadle("init", str(folder / "treadle.toml")), "can't use", "another path")


def test_where_nothing_can_be_written(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    refused(treadle("init", str(file / "ws")), "can't use", "another path")
    (folder / "runs").touch()
    refused(treadle("sft", "-w", str(folder)), "runs", "another path")
    (folder / "runs").unlink()
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").mkdir()
    refused(treadle("compare", str(run)), "Is a directory", "metrics.jsonl")
    refused(treadle("status", "-w", str(folder), "--policy", "nope"), "'nope'", "treadle status")


def test_a_damaged_store_is_named(folder: Path) -> None:
    assert treadle("curate", "-w", str(folder)).returncode == 0
    database = folder / "treadle.db"
    whole = bytearray(database.read_bytes())
    for page in range(2 * 4096, len(whole), 4096):
        whole[page : page + 200] = b"\xff" * 200
    database.write_bytes(whole)
    refused(treadle("curate", "-w", str(folder)), str(database), "restore a backup")


def test_runs_that_cannot_be_compared_are_named(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(treadle("compare", str(folder), "--out", str(out)), f"no run at {folder}", "metrics.jsonl")
    refused(treadle("compare", str(folder / "treadle.toml"), "--out", str(out)), "treadle.toml")
    lines = [b'{"stage":"open","version":"0","revision":"","config":{}}\n', b'{"stage":"check"}\n']
    (folder / "metrics.jsonl").write_bytes(lines[1])
    refused(treadle("compare", str(folder), "--out", str(out)), "what ran")
    assert not out.exists()
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    refused(treadle("compare", str(folder), "--out", str(folder / "treadle.toml")), "another path")
    refused(treadle("compare", str(folder), "--out", str(out)), "nothing to draw")
    assert left(out) == []


def test_help_teaches(tmp_path: Path) -> None:
    whole = treadle("--help").stdout
    for verb in ("init", "turn", "check", "collect", "ingest", "curate", "sft", "shape", "rl", "distill", "release"):
        assert verb in whole
    assert "treadle init" in whole
