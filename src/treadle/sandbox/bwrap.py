"""The bubblewrap sandbox: untrusted code with no network, no host files, and a bound on everything it can use.

Each sandbox has one holder process (holder.py) in user and mount namespaces of its own: a capped tmpfs, and on it an
overlay of the template. Each command is one bubblewrap launched by the holder. Closing the holder's socket, or the
death of this process by any means, ends the processes and frees the files.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from treadle.errors import SandboxDead, SandboxUnavailable, UserError
from treadle.sandbox import holder
from treadle.sandbox.base import ExecResult, Guarantees, Limits
from treadle.sandbox.doctor import MEMORY_ATTACK, PROBE_LIMITS, baited, judge
from treadle.sandbox.places import (
    prepare_template,
    reachable,
    reachable_python,
    sandbox_venv,
    shared_folder,
    sweep,
)
from treadle.sandbox.seccomp import seccomp_program

__all__ = ["BwrapSandbox", "open_sandbox", "prepare_template", "probe", "sandbox_venv", "sweep"]

BACKEND = "bwrap"
WORK = "/repo"  # where the agent sees its work tree
GRACE_SECONDS = 10.0  # beyond a command's own timeout, before a silent holder is given up
SMALLEST_OUTPUT, KILL_NOTICE = 256, 48  # bytes
DEFAULT_LIMITS = Limits()
REMEDY = (
    "It needs bubblewrap (apt-get install bubblewrap) and user namespaces (sysctl user.max_user_namespaces above 0; "
    "where AppArmor restricts them, sysctl kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp "
    "profile that allows unshare and mount)"
)


# ---------------------------------------------------------------- opening


async def open_sandbox(template: Path, python: Path | None = None, limits: Limits = DEFAULT_LIMITS) -> BwrapSandbox:
    """A fresh sandbox whose work tree is a copy-on-write view of the folder `template`.

    `python` is the interpreter, inside its virtual environment, that comes first on the agent's PATH. A template from
    `prepare_template` is used as it is, any other folder is prepared first. SandboxUnavailable where isolation doesn't
    hold, with the remedy: there is no fallback to less.
    """
    await probe()
    return await _start(template, python, limits)


async def probe() -> Guarantees:
    """What holds on this machine, by attacking a sandbox opened the usual way; found once a process.

    SandboxUnavailable when bubblewrap can't run or an attack came through.
    """
    return await asyncio.to_thread(_probe_once)


_known: Guarantees | None = None
_knowing = threading.Lock()


def _probe_once() -> Guarantees:
    """In a thread and event loop of its own, so that callers on any loop can wait for the same answer."""
    global _known
    with _knowing:
        if _known is None:
            _known = asyncio.run(_attack())
        return _known


async def _attack() -> Guarantees:
    await asyncio.to_thread(sweep)
    empty, python = shared_folder() / "root", reachable_python()
    sandbox = await _start(empty, python, PROBE_LIMITS)
    try:
        with baited(secret=empty) as arguments:
            report = await sandbox.exec([str(python), *arguments])
        guarantees = judge(BACKEND, report, await sandbox.exec([str(python), *MEMORY_ATTACK]))
    except (SandboxDead, OSError) as error:  # OSError: the sandbox's user may not run what was found
        raise SandboxUnavailable(f"no sandbox on this machine: {error}. {REMEDY}") from error
    finally:
        await sandbox.close()
    if guarantees.broken:
        raise SandboxUnavailable(f"the sandbox does not hold against: {', '.join(guarantees.broken)}. {REMEDY}")
    return guarantees


async def _start(template: Path, python: Path | None, limits: Limits) -> BwrapSandbox:
    """`open_sandbox` without the question what holds."""
    template, root = await asyncio.to_thread(_ready, template), shared_folder() / "root"
    prefix = command_prefix(root, python, limits)
    here, there = socket.socketpair()
    with there:
        process = _launch_holder(there, template.stat().st_uid)
    sandbox = BwrapSandbox(process, *await asyncio.open_unix_connection(sock=here), prefix)
    opening = {"kind": "open", "root": str(root), "template": str(template), "filter": seccomp_program().hex()}
    caps = {"disk": limits.disk, "inodes": limits.inodes, "memory": limits.memory}
    try:
        await sandbox.ask(opening | caps, GRACE_SECONDS)
    except (SandboxDead, OSError) as error:
        await sandbox.close()
        raise SandboxUnavailable(f"no sandbox on this machine: {error}. {REMEDY}") from error
    except asyncio.CancelledError:
        await sandbox.close()
        raise
    return sandbox


def _ready(template: Path) -> Path:
    """The template if it was prepared, else a prepared copy."""
    template = template.absolute()
    if template.parent == shared_folder() / "templates" and template.is_dir():
        return template
    return prepare_template(template, "adhoc")


def _launch_holder(there: socket.socket, uid: int) -> subprocess.Popen[bytes]:
    """Never as uid 0, whose sandboxes would own the host's /proc/sys and escape RLIMIT_NPROC.

    By setpriv, for with `user=` Popen would fork, and copy a trainer's page tables each time.
    """
    user = [_tool("setpriv"), f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"] if os.getuid() == 0 else []
    alone = [_tool("unshare"), "--user", "--map-root-user", "--mount", "--"]
    python = [str(reachable_python()), "-I", "-S", "-X", "utf8", "-c", Path(holder.__file__).read_text()]
    return subprocess.Popen(
        [*user, *alone, *python],
        stdin=there.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={},
        cwd="/",
        start_new_session=True,  # a Ctrl-C is for us to handle, not for every holder at once
    )


# ---------------------------------------------------------------- the command line


def command_prefix(root: Path, python: Path | None, limits: Limits) -> list[str]:
    """The command line that every command is appended to: all the isolation there is, as data."""
    variables = {
        "PATH": ":".join([*([str(python.parent)] if python else []), "/usr/local/bin", "/usr/bin", "/bin"]),
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    caps = {
        "nproc": limits.processes,
        "fsize": limits.file_size,
        "cpu": limits.cpu_seconds,
        "nofile": limits.open_files,
        "core": 0,
        "as": limits.address_space,
    }
    return [
        _tool("bwrap"), "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--disable-userns",
        "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox",
        "--clearenv", *(word for name, value in variables.items() for word in ("--setenv", name, value)),
        *_system_binds(), "--proc", "/proc", "--dev", "/dev",
        *(word for place in _python_places(python) for word in ("--ro-bind", place, place)),
        "--bind", f"{root}/tmp", "/tmp", "--bind", f"{root}/shm", "/dev/shm",
        "--bind", f"{root}/work", WORK, "--chdir", WORK,
        "--json-status-fd", str(holder.STATUS), "--seccomp", str(holder.FILTER),
        "--remount-ro", "/dev", "--remount-ro", "/", "--",
        _tool("prlimit"), *(f"--{name}={value}" for name, value in caps.items()), "--",
    ]  # fmt: skip


def _system_binds() -> list[str]:
    """/usr read-only, and the old top-level folders as this machine has them."""
    words = ["--ro-bind", "/usr", "/usr"]
    for old in (Path("/bin"), Path("/sbin"), Path("/lib"), Path("/lib64")):
        if old.is_symlink():
            words += ["--symlink", str(old.readlink()), str(old)]
        elif old.exists():
            words += ["--ro-bind", str(old), str(old)]
    for kept in ("/etc/ld.so.cache", "/etc/alternatives"):
        words += ["--ro-bind-try", kept, kept]
    return words


def _python_places(python: Path | None) -> list[str]:
    """The interpreter's environment and the installations behind it, where /usr doesn't hold them already.

    UserError when one is not a Python's own folder (showing it could show a home), or the sandbox's user can't enter.
    """
    places: set[Path] = set()
    step = python
    while step is not None:
        places.add(Path(os.path.normpath(step.parent.absolute())).parent)
        step = step.parent / step.readlink() if step.is_symlink() else None
    for place in (places := {place for place in places if not place.is_relative_to("/usr")}):
        if place == Path("/") or not ((place / "pyvenv.cfg").is_file() or any(place.glob("lib/python3*"))):
            raise UserError(f"python {python}: {place} is no Python's own folder; give one from sandbox_venv")
        if not reachable(place):
            raise UserError(
                f"python {python}: {place} can't be entered by a sandbox's user; give one from sandbox_venv"
            )
    return sorted(str(place) for place in places)


def _tool(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/bin:/bin")
    if not found:
        raise SandboxUnavailable(f"no sandbox on this machine: {name} is not installed. {REMEDY}")
    return found


# ---------------------------------------------------------------- the sandbox


class BwrapSandbox:
    """Implements `treadle.sandbox.base.Sandbox`. Requests of one sandbox are served one after another."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        prefix: list[str],
    ) -> None:
        self._process, self._reader, self._writer, self._prefix = process, reader, writer, prefix
        self._turn = asyncio.Lock()
        self._ending: asyncio.Task[str] | None = None

    async def exec(self, command: Sequence[str], timeout: float = 20.0, output_limit: int = 16_384) -> ExecResult:
        """Run `command` in the work tree; when this returns, nothing that it started is alive.

        The exit code is the command's own word: hostile code that it runs can forge it. ValueError for a command that
        can't be one; SandboxDead when the sandbox, not the command, failed.
        """
        if isinstance(command, str) or not command or any("\0" in word for word in command):
            raise ValueError(f"command {command!r}: give a non-empty list of words without NUL")
        if output_limit < SMALLEST_OUTPUT:
            raise ValueError(f"output_limit {output_limit}: give at least {SMALLEST_OUTPUT} bytes")
        words, limit = [*self._prefix, *command], output_limit - KILL_NOTICE
        request = {"kind": "exec", "command": words, "timeout": timeout, "limit": limit}
        answer = await self.ask(request, timeout + GRACE_SECONDS)
        code, ended_by, output = answer["code"], answer["ended_by"], answer["output"]
        if code is None and not ended_by:
            raise SandboxDead(f"bubblewrap did not start the command: {output.strip()}")
        if ended_by:
            output += f"\n[killed: {f'timeout of {timeout:g} s' if ended_by == 'time' else 'out of ' + ended_by}]\n"
        by_signal = code is not None and 128 < code <= 128 + signal.SIGRTMAX
        return ExecResult(
            code=None if ended_by or by_signal else code,
            output=output,
            truncated=answer["truncated"],
            timed_out=ended_by == "time",
            seconds=answer["seconds"],
            backend=BACKEND,
        )

    async def write(self, files: Mapping[str, str]) -> None:
        """Write UTF-8 text files. A link that was planted at a path is replaced; one on the way is a ValueError."""
        for path in files:
            _check_path(path)
        await self.ask({"kind": "write", "files": dict(files)}, GRACE_SECONDS)

    async def read(self, path: str) -> str:
        """One regular UTF-8 file of at most 4 MiB; ValueError for anything else, FileNotFoundError for nothing."""
        _check_path(path)
        answer = await self.ask({"kind": "read", "path": path}, GRACE_SECONDS)
        text: str = answer["text"]
        return text

    async def reset(self) -> None:
        await self.ask({"kind": "reset"}, GRACE_SECONDS)

    async def close(self) -> None:
        """End every process and free every file of this sandbox. Closing twice is fine."""
        await self._end()

    async def _end(self) -> str:
        """Close, once; returns the holder's last words."""
        if self._ending is None:
            self._writer.close()
            self._ending = asyncio.create_task(asyncio.to_thread(_wait_for, self._process))
        return await asyncio.shield(self._ending)

    async def ask(self, request: dict[str, Any], patience: float) -> dict[str, Any]:
        """One request and its answer. A cancelled caller's command is killed before the cancellation goes on."""
        await self._turn.acquire()
        exchange = asyncio.create_task(self._exchange(request))
        exchange.add_done_callback(lambda _: self._turn.release())
        try:
            for seconds in (patience, GRACE_SECONDS):  # the second look is for an event loop that was itself held up
                if (await asyncio.wait({exchange}, timeout=seconds))[0]:
                    return _raised(exchange.result(), request)
        except asyncio.CancelledError:
            self._send({"kind": "cancel"})
            with suppress(SandboxDead):
                await exchange
            raise
        await self._end()
        return _raised(await exchange, request)

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._ending is not None:
            raise SandboxDead("the sandbox is closed")
        try:
            self._send(request)
            await self._writer.drain()
            (size,) = struct.unpack("!I", await self._reader.readexactly(4))
            answer: dict[str, Any] = json.loads(await self._reader.readexactly(size))
            return answer
        except (OSError, asyncio.IncompleteReadError) as error:
            reason = await self._end() or type(error).__name__
            raise SandboxDead(f"the sandbox no longer answers ({reason})") from error

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        self._writer.write(struct.pack("!I", len(body)) + body)


def _wait_for(process: subprocess.Popen[bytes]) -> str:
    """The holder leaves by itself when its socket closes; one that doesn't is killed, and its commands with it."""
    try:
        _, words = process.communicate(timeout=2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        _, words = process.communicate()
    return words.decode(errors="replace").strip().rsplit("\n", 1)[-1]


def _raised(answer: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """The answer, or the error that it tells of."""
    if "error" not in answer:
        return answer
    where = answer.get("on") or request.get("path") or ""
    if "errno" not in answer:
        raise ValueError(f"{where}: {answer['error']}" if where else answer["error"])
    if request["kind"] in ("exec", "reset"):
        raise SandboxDead(f"the sandbox failed at {request['kind']}: {answer['error']} {where}".rstrip())
    raise OSError(answer["errno"], answer["error"], where)  # FileNotFoundError where that is its number


def _check_path(path: str) -> None:
    parts = PurePosixPath(path).parts
    if not parts or path != "/".join(parts) or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"path {path!r}: give a plain path relative to the work tree, without '..'")
