"""Around the sandbox: the system-call filter, templates, virtual environments, refusals, leftovers (F53)."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.errors import SandboxUnavailable, UserError
from treadle.sandbox import bwrap, seccomp
from treadle.sandbox.bwrap import open_sandbox, prepare_template, sandbox_venv, sweep
from treadle.sandbox.places import CACHE_VARIABLE, owner_label, shared_folder
from treadle.sandbox.seccomp import seccomp_program


@pytest.fixture(autouse=True, scope="module")
def cache() -> Iterator[Path]:
    """A folder that other users can enter, unlike pytest's own."""
    place = Path(tempfile.mkdtemp(dir="/var/tmp"))
    place.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(place))
        yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def template(cache: Path) -> Path:
    source = cache / "source"
    (source / "package").mkdir(parents=True)
    (source / "a.txt").write_text("first\n")
    (source / "package/b.txt").write_text("second\n")
    return prepare_template(source, "example")


def test_a_folder_that_sandboxes_cannot_see_is_refused() -> None:
    for place in ("/tmp/treadle", "/dev/shm/treadle"):
        with pytest.raises(UserError, match=f"{place} can't be seen there: set {CACHE_VARIABLE}"):
            shared_folder(Path(place))
        assert not Path(place).exists()


# ---------------------------------------------------------------- the system-call filter


def decide(program: bytes, machine: str, number: int, argument: int = 0) -> int:
    """What the kernel would answer: the few BPF operations that the filter is made of."""
    steps = list(struct.iter_unpack("=HBBI", program))
    data = {seccomp.NUMBER: number, seccomp.ARCH: seccomp.AUDIT_ARCH[machine], seccomp.FIRST_ARGUMENT: argument}
    at, loaded = 0, 0
    while True:
        code, then, otherwise, value = steps[at]
        if code == seccomp.RETURN:
            return int(value)
        if code == seccomp.LOAD:
            loaded, at = data[value], at + 1
            continue
        test = {
            seccomp.EQUAL: loaded == value,
            seccomp.AT_LEAST: loaded >= value,
            seccomp.ANY_BIT: bool(loaded & value),
        }
        at += 1 + (then if test[code] else otherwise)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_refuses_what_it_lists_and_nothing_else(machine: str) -> None:
    program, column = seccomp_program(machine), list(seccomp.AUDIT_ARCH).index(machine)
    refused = {numbers[column] for numbers in seccomp.REFUSED.values()}
    special = {numbers[column] for numbers in (seccomp.CLONE, seccomp.CLONE3, seccomp.SOCKET)}
    for number in range(500):
        if number not in special:
            want = 0x50000 | errno.EPERM if number in refused else seccomp.ALLOW
            assert decide(program, machine, number) == want, number
    clone, clone3, sockets = seccomp.CLONE[column], seccomp.CLONE3[column], seccomp.SOCKET[column]
    assert decide(program, machine, clone, 0x01200011) == seccomp.ALLOW  # fork
    assert decide(program, machine, clone, 0x003D0F00) == seccomp.ALLOW  # a thread
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(program, machine, clone, flag | 17) == 0x50000 | errno.EPERM
    assert decide(program, machine, clone3) == 0x50000 | errno.ENOSYS
    for family in range(50):
        want = seccomp.ALLOW if family in (1, 2, 10) else 0x50000 | errno.EAFNOSUPPORT
        assert decide(program, machine, sockets, family) == want


def test_filter_has_no_other_way_in() -> None:
    other = decide(seccomp_program("x86_64"), "aarch64", 0)
    assert other == seccomp.KILL
    assert decide(seccomp_program("x86_64"), "x86_64", 0x40000000) == 0x50000 | errno.EPERM  # the x32 numbers
    with pytest.raises(SandboxUnavailable, match="riscv64"):
        seccomp_program("riscv64")


# ---------------------------------------------------------------- places


def test_sweep_takes_the_drafts_of_the_dead_alone(cache: Path, template: Path) -> None:
    dead, reused = template.parent / "draft-999999999.1-x", template.parent / f"draft-{os.getpid()}.1-x"
    alive = template.parent / f"draft-{owner_label()}-x"
    for draft in (dead, reused, alive):
        draft.mkdir()
    assert sweep() == 2
    assert alive.exists() and not dead.exists() and not reused.exists()
    alive.rmdir()


def test_templates_are_made_once_per_content_and_name(cache: Path, template: Path) -> None:
    source = cache / "source2"
    shutil.copytree(cache / "source", source)
    assert prepare_template(source, "example") == template
    (source / "a.txt").write_text("other")
    assert prepare_template(source, "example") != template
    assert template.stat().st_uid != 0
    os.mkfifo(source / "pipe")
    with pytest.raises(UserError, match="pipe"):
        prepare_template(source, "example")
    with pytest.raises(UserError, match="not a folder"):
        prepare_template(cache / "missing", "example")
    with pytest.raises(UserError, match="letters"):
        prepare_template(source, "../up")


async def test_any_folder_can_be_opened(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("here")
    sandbox = await open_sandbox(tmp_path)
    await sandbox.write({"x": "there"})
    await sandbox.close()
    assert (tmp_path / "x").read_text() == "here"


async def test_venv_is_built_once_and_runs_inside(cache: Path, template: Path) -> None:
    venv = sandbox_venv(())
    assert sandbox_venv(()) == venv
    sandbox = await open_sandbox(template, venv / "bin/python")
    await sandbox.write({"test_it.py": "def test_it():\n    assert True\n"})
    run = await sandbox.exec(["python", "-I", "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider"], timeout=60)
    assert run.code == 0 and "1 passed" in run.output
    assert (await sandbox.exec(["sh", "-c", f"touch {venv}/x"])).code != 0
    await sandbox.close()


def test_venv_that_cannot_be_built_says_why(cache: Path) -> None:
    with pytest.raises(UserError, match=r"no-such==0\.0"):
        sandbox_venv(("./no-such==0.0",))


async def test_python_that_would_show_a_home_is_refused(cache: Path, template: Path) -> None:
    (cache / "home/bin").mkdir(parents=True)
    (cache / "home/bin/python").symlink_to("/usr/bin/python3")
    with pytest.raises(UserError, match="no Python's own folder"):
        await open_sandbox(template, cache / "home/bin/python")


def test_a_missing_tool_is_named_with_its_remedy() -> None:
    with pytest.raises(SandboxUnavailable, match=r"no-such-tool .*apt-get install bubblewrap"):
        bwrap._tool("no-such-tool")


def test_where_isolation_cannot_hold_it_refuses(cache: Path) -> None:
    """No fallback to less: here, a root that has no other uid to give to a sandbox."""
    script = "import asyncio; from treadle.sandbox.bwrap import probe; asyncio.run(probe())"
    inside = ["unshare", "--user", "--map-root-user", sys.executable, "-c", script]
    environment = {**os.environ, CACHE_VARIABLE: f"{cache}/elsewhere"}
    done = subprocess.run(inside, capture_output=True, text=True, env=environment)
    assert "SandboxUnavailable: no sandbox on this machine" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only another user's sandbox can be kept out by folder modes")
def test_a_cache_in_a_private_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=CACHE_VARIABLE):
        sandbox_venv((), cache=tmp_path / "cache")
