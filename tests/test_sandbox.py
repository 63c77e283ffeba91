"""The sandbox against real attacks (F53, F54, F59, F60 and their kind), shown to work on a bare process if simple."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from treadle.errors import SandboxDead
from treadle.sandbox import attacks
from treadle.sandbox.base import MIB, Limits
from treadle.sandbox.bwrap import BwrapSandbox, open_sandbox, prepare_template, probe
from treadle.sandbox.doctor import PROBE_LIMITS, baited
from treadle.sandbox.places import CACHE_VARIABLE, reachable_python

PYTHON = str(reachable_python())


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


@pytest.fixture
async def box(template: Path) -> AsyncIterator[BwrapSandbox]:
    sandbox = await open_sandbox(template, Path(PYTHON))
    yield sandbox
    await sandbox.close()


def new_tag() -> str:
    """A length of sleep that no other process has: finds it again from the host, whatever it became the child of."""
    return f"300.{random.randrange(10**9)}"


def survivors(tag: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and tag in (entry / "cmdline").read_text(errors="replace").split("\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended while we looked
    return found


async def eventually(condition: Callable[[], bool]) -> bool:
    for _ in range(300):
        if condition():
            return True
        await asyncio.sleep(0.05)
    return False


# ---------------------------------------------------------------- use


async def test_runs_reads_and_writes_in_the_work_tree(box: BwrapSandbox) -> None:
    await box.write({"a.txt": "changed\n", "new/deep/file.py": "print('made')\n"})
    result = await box.exec([PYTHON, "-I", "new/deep/file.py"])
    assert (result.code, result.output, result.truncated, result.timed_out) == (0, "made\n", False, False)
    assert result.backend == "bwrap"
    assert await box.read("a.txt") == "changed\n"
    assert await box.read("package/b.txt") == "second\n"


async def test_exit_codes(box: BwrapSandbox) -> None:
    assert (await box.exec(["sh", "-c", "exit 3"])).code == 3
    assert (await box.exec(["sh", "-c", "kill -SEGV $$"])).code is None
    missing = await box.exec(["no-such-command"])
    assert missing.code == 127 and "no-such-command" in missing.output


async def test_stdout_and_stderr_come_in_order_and_stdin_is_empty(box: BwrapSandbox) -> None:
    assert (await box.exec(["sh", "-c", "echo 1; echo 2 >&2; cat; echo 3"])).output == "1\n2\n3\n"


async def test_a_file_keeps_its_mode_when_rewritten(box: BwrapSandbox) -> None:
    await box.exec(["chmod", "750", "a.txt"])
    await box.write({"a.txt": "#!/bin/sh\necho ran\n"})
    assert (await box.exec(["./a.txt"])).output == "ran\n"


async def test_reset_gives_the_template_back(box: BwrapSandbox) -> None:
    script = "rm -r package; echo x > a.txt; echo y > /tmp/y; echo z > /dev/shm/z; mkdir -p d/d; chmod 000 d ."
    assert (await box.exec(["sh", "-c", script])).code == 0
    await box.reset()
    listing = await box.exec(["sh", "-c", "find . /tmp /dev/shm | sort; cat a.txt package/b.txt"])
    assert listing.output.split() == [
        ".", "./a.txt", "./package", "./package/b.txt", "/dev/shm", "/tmp", "first", "second",
    ]  # fmt: skip


async def test_reset_survives_a_tree_too_deep_to_walk(box: BwrapSandbox) -> None:
    dig = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
    assert (await box.exec([PYTHON, "-c", dig])).code == 0
    await box.reset()
    assert (await box.exec(["ls"])).output == "a.txt\npackage\n"


async def test_an_agent_cannot_lock_the_next_command_out(box: BwrapSandbox) -> None:
    await box.exec(["chmod", "000", ".", "/tmp", "/dev/shm"])
    assert (await box.exec(["cat", "a.txt"])).output == "first\n"


# ---------------------------------------------------------------- attacks


@pytest.mark.parametrize("attack", [attack.__name__ for attack in attacks.ATTACKS])
async def test_attack_fails_inside_and_works_on_a_bare_process(attack: str, template: Path, tmp_path: Path) -> None:
    sandbox = await open_sandbox(template, Path(PYTHON), PROBE_LIMITS)
    with baited(secret=tmp_path) as arguments:
        inside = await sandbox.exec([PYTHON, *arguments, attack])
        await sandbox.close()
        assert json.loads(inside.output) == {attack: False}
        if attack != "write_outside":  # on a bare process that would write into this machine
            bare = subprocess.run([PYTHON, *arguments, attack], cwd=tmp_path, capture_output=True, text=True)
            assert json.loads(bare.stdout) == {attack: True}


async def test_the_probe_tells_what_holds_and_what_is_not_bounded() -> None:
    guarantees = await probe()
    assert not guarantees.broken and guarantees.unbounded
    assert {"tcp", "host_files", "memory", "disk"} <= set(guarantees.held)


async def test_callers_environment_is_nowhere_to_be_read(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "a-secret-of-the-caller")
    look = ["sh", "-c", "cat /proc/*/environ; env"]
    bare = subprocess.run(look, capture_output=True, check=False)
    assert b"a-secret-of-the-caller" in bare.stdout
    sandbox = await open_sandbox(template)
    assert "a-secret" not in (await sandbox.exec(look, output_limit=100_000)).output
    await sandbox.close()


async def test_fork_bomb_is_bounded_and_leaves_nothing(template: Path) -> None:
    tag, sandbox = new_tag(), await open_sandbox(template, Path(PYTHON), Limits(processes=32))
    bomb = "import os, contextlib\nwhile True:\n with contextlib.suppress(OSError): os.fork()"
    running = asyncio.create_task(sandbox.exec([PYTHON, "-c", bomb, tag], timeout=2.0))
    assert await eventually(lambda: len(survivors(tag)) > 8)
    assert len(survivors(tag)) <= 32 + 4  # and bubblewrap's own
    assert (await running).timed_out
    assert survivors(tag) == []
    await sandbox.close()


async def test_memory_bomb_of_many_processes_is_killed(template: Path) -> None:
    """Each stays below its own cap; only the tree's sum is above."""
    sandbox = await open_sandbox(template, Path(PYTHON), Limits(memory=96 * MIB))
    bomb = (
        "import os, time\nfor _ in range(5): os.fork() == 0 and (x := bytearray(b'x') * (40 << 20)) and time.sleep(60)"
    )
    result = await sandbox.exec([PYTHON, "-c", bomb + "\ntime.sleep(60)"], timeout=60)
    assert result.code is None and not result.timed_out
    assert "out of memory" in result.output
    assert (await sandbox.exec(["echo", "well"])).output == "well\n"
    await sandbox.close()


@pytest.mark.parametrize("place", ["/repo", "/tmp", "/dev/shm"])
async def test_disk_fill_is_bounded_and_the_sandbox_goes_on(template: Path, place: str) -> None:
    sandbox = await open_sandbox(template, limits=Limits(disk=8 * MIB, inodes=500))
    filled = await sandbox.exec(
        ["sh", "-c", f"cd {place} && i=0; while head -c 1M /dev/zero > f$i; do i=$((i+1)); done"]
    )
    assert "No space" in filled.output
    with pytest.raises(OSError, match="No space"):
        await sandbox.write({"more": "x" * MIB})
    assert (await sandbox.exec(["echo", "well"])).output == "well\n"
    await sandbox.reset()
    await sandbox.write({"more": "x" * MIB})
    await sandbox.close()


async def test_daemon_does_not_outlive_its_command(box: BwrapSandbox) -> None:
    """F54: a double fork in a session of its own, its output held open."""
    tag = new_tag()
    daemon = ["sh", "-c", f"(setsid sh -c 'sleep {tag} & sleep {tag}' &) ; echo started"]
    with subprocess.Popen(daemon, stdout=subprocess.DEVNULL) as bare:
        bare.wait()
        assert await eventually(lambda: len(survivors(tag)) == 2)
        for pid in survivors(tag):
            os.kill(pid, signal.SIGKILL)
    assert await eventually(lambda: not survivors(tag))
    result = await box.exec(daemon, timeout=60)
    assert (result.code, result.output) == (0, "started\n")
    assert survivors(tag) == []


async def test_timeout_ends_the_whole_tree_at_once(box: BwrapSandbox) -> None:
    """F54: the waiting parent and the grandchild that holds the pipe."""
    tag = new_tag()
    result = await box.exec(["sh", "-c", f"echo before; sleep {tag} & wait"], timeout=0.3)
    assert result.timed_out and result.code is None
    assert result.output.startswith("before\n") and "timeout of 0.3 s" in result.output
    assert survivors(tag) == []


@pytest.mark.parametrize("flood", ["yes", "cat /dev/zero", "yes >&2"])
async def test_output_flood_is_cut_while_it_is_read(box: BwrapSandbox, flood: str) -> None:
    """F60: bounded memory, text within the cap, head and tail kept, and the cut named."""
    script = f"echo HEAD; timeout 0.5 {flood}; echo TAIL"
    result = await box.exec(["sh", "-c", script], output_limit=4096)
    assert result.truncated and len(result.output) <= 4096
    assert result.output.startswith("HEAD\n") and result.output.endswith("TAIL\n")
    assert "bytes cut" in result.output
    status = Path(f"/proc/{box._process.pid}/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak < 64 * 1024  # KiB; the flood is gigabytes


async def test_output_up_to_the_limit_is_whole(box: BwrapSandbox) -> None:
    whole = await box.exec(["sh", "-c", "head -c 976 /dev/zero | tr '\\0' x"], output_limit=1024)
    assert whole.output == "x" * 976 and not whole.truncated
    cut = await box.exec(["sh", "-c", "head -c 977 /dev/zero | tr '\\0' x"], output_limit=1024)
    assert cut.truncated and len(cut.output) <= 1024


# ---------------------------------------------------------------- links and paths


async def test_reads_and_writes_follow_no_planted_link(box: BwrapSandbox, cache: Path) -> None:
    """F34's kind: a write by the host that lands where the agent chose."""
    secret, folder = cache / "secret.txt", cache / "outside"
    secret.write_text("of the host")
    folder.mkdir()
    script = f"ln -s {secret} leak; ln -s {folder} way; ln -s a.txt inner; mkfifo pipe; ln -s .. up; ln -s . self"
    assert (await box.exec(["sh", "-c", script])).code == 0
    for path in ("leak", "way/x", "inner", "pipe", "up/etc/passwd", "self/a.txt", "package", "a.txt/x"):
        with pytest.raises(ValueError, match=path.split("/")[0]):
            await box.read(path)
    for path in ("way/planted", "up/planted", "self/a.txt", "package", "a.txt/x"):
        with pytest.raises(ValueError):
            await box.write({path: "planted"})
    await box.write({"leak": "ours", "inner": "ours", "pipe": "ours"})
    assert [await box.read(path) for path in ("leak", "inner", "pipe", "a.txt")] == ["ours", "ours", "ours", "first\n"]
    assert secret.read_text() == "of the host" and list(folder.iterdir()) == []


@pytest.mark.parametrize("path", ["", ".", "/etc/passwd", "../x", "a/../../x", "a/./b", "a//b", "a/", "a\0b"])
async def test_a_path_that_is_not_plain_is_refused(box: BwrapSandbox, path: str) -> None:
    with pytest.raises(ValueError, match="plain path"):
        await box.read(path)
    with pytest.raises(ValueError, match="plain path"):
        await box.write({path: "x"})


async def test_read_says_why_it_cannot(box: BwrapSandbox) -> None:
    await box.exec(["sh", "-c", "printf '\\377' > bytes; truncate -s 5M big"])
    with pytest.raises(FileNotFoundError, match="nothing"):
        await box.read("nothing.txt")
    with pytest.raises(ValueError, match="bytes: not UTF-8"):
        await box.read("bytes")
    with pytest.raises(ValueError, match="big: larger"):
        await box.read("big")


@pytest.mark.parametrize("command", ["ls", [], ["a\0b"]])
async def test_a_command_must_be_words(box: BwrapSandbox, command: list[str]) -> None:
    with pytest.raises(ValueError, match="list of words"):
        await box.exec(command)
    with pytest.raises(ValueError, match="at least"):
        await box.exec(["ls"], output_limit=10)


# ---------------------------------------------------------------- many, and ends


async def test_two_sandboxes_do_not_see_each_other(template: Path) -> None:
    tag = new_tag()
    one, two = await asyncio.gather(open_sandbox(template), open_sandbox(template))
    await one.write({"a.txt": "of one"})
    running = asyncio.create_task(one.exec(["sh", "-c", f"echo x > /tmp/x; sleep {tag}"], timeout=60))
    assert await eventually(lambda: bool(survivors(tag)))
    seen = await two.exec(["sh", "-c", "cat a.txt; ls /tmp; cat /proc/*/cmdline"])
    assert seen.output.startswith("first\n") and tag not in seen.output and "x\n" not in seen.output
    await one.close()
    with pytest.raises(SandboxDead):
        await running
    assert survivors(tag) == []
    assert await two.read("a.txt") == "first\n"
    await two.close()


async def test_a_command_the_system_refuses_is_the_sandboxes_failure(template: Path) -> None:
    """One that could not even be started says nothing about the policy: an infrastructure failure, no OSError."""
    sandbox = await open_sandbox(template)
    with pytest.raises(SandboxDead, match="failed at exec"):
        await sandbox.exec(["echo", "x" * 200_000])
    await sandbox.close()


async def test_sixteen_at_once(template: Path) -> None:
    async def episode(number: int) -> str:
        sandbox = await open_sandbox(template)
        await sandbox.write({"mine": str(number)})
        result = await sandbox.exec(["sh", "-c", "sleep 0.2; cat mine a.txt"], timeout=60)
        await sandbox.close()
        return result.output

    outputs = await asyncio.gather(*(episode(number) for number in range(16)))
    assert outputs == [f"{number}first\n" for number in range(16)]


async def test_requests_of_one_sandbox_wait_their_turn(box: BwrapSandbox) -> None:
    results = await asyncio.gather(*(box.exec(["sh", "-c", f"echo {i} >> log; cat log"]) for i in range(4)))
    assert [result.output.split()[-1] for result in results] == ["0", "1", "2", "3"]


async def test_a_cancelled_command_is_killed_and_the_sandbox_goes_on(box: BwrapSandbox) -> None:
    """F53: cancelled in mid-call."""
    tag = new_tag()
    running = asyncio.create_task(box.exec(["sleep", tag], timeout=200))
    assert await eventually(lambda: bool(survivors(tag)))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert survivors(tag) == []
    assert (await box.exec(["echo", "well"])).output == "well\n"


async def test_a_dead_sandbox_says_so(template: Path) -> None:
    """F59: infrastructure, not the agent; and its commands die with it."""
    tag, sandbox = new_tag(), await open_sandbox(template)
    running = asyncio.create_task(sandbox.exec(["sleep", tag], timeout=200))
    assert await eventually(lambda: bool(survivors(tag)))
    sandbox._process.kill()
    with pytest.raises(SandboxDead):
        await running
    assert await eventually(lambda: not survivors(tag))
    with pytest.raises(SandboxDead):
        await sandbox.read("a.txt")
    await sandbox.close()
    await sandbox.close()


async def test_kill_nine_of_the_driver_leaves_nothing(template: Path) -> None:
    """F53: no process; and the files were in the holder's own mounts."""
    tag = new_tag()
    script = f"""
        import asyncio
        from pathlib import Path
        from treadle.sandbox.bwrap import open_sandbox
        async def main():
            sandbox = await open_sandbox(Path({str(template)!r}))
            print(sandbox._process.pid, flush=True)
            await sandbox.exec(["sh", "-c", "setsid sleep {tag} & sleep {tag}"], timeout=200)
        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        holder = Path("/proc", driver.stdout.readline().strip())
        assert await eventually(lambda: len(survivors(tag)) == 2) and holder.exists()
        driver.kill()
    assert await eventually(lambda: not survivors(tag))
    assert await eventually(lambda: not holder.exists() or "State:\tZ" in (holder / "status").read_text())
