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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from treadle.errors import SandboxDead, SandboxUnavailable
from treadle.sandbox import holder
from treadle.sandbox.base import ExecResult, Limits
from treadle.sandbox.places import (
    prepare_template,
    reachable_python,
    sandbox_venv,
    shared_folder,
    sweep,
)
from treadle.sandbox.seccomp import seccomp_program

__all__ = ["BwrapSandbox", "open_sandbox", "prepare_template", "sandbox_venv", "sweep"]

BACKEND = "bwrap"
WORK = "/repo"  # where the agent sees its work tree
GRACE_SECONDS = 10.0  # beyond a command's own timeout, before a silent holder is given up
DEFAULT_LIMITS = Limits()
REMEDY = (
    "It needs bubblewrap (apt-get install bubblewrap) and user namespaces (sysctl user.max_user_namespaces above 0; "
    "where AppArmor restricts them, sysctl kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp "
    "profile that allows unshare and mount)"
)


async def open_sandbox(template: Path, python: Path | None = None, limits: Limits = DEFAULT_LIMITS) -> BwrapSandbox:
    """A fresh sandbox whose work tree is a copy-on-write view of the folder `template`.

    `python` is the interpreter, inside its virtual environment, that comes first on the agent's PATH. A template from
    `prepare_template` is used as it is, any other folder is prepared first. SandboxUnavailable where isolation doesn't
    hold, with the remedy: there is no fallback to less.
    """
    from treadle.sandbox.doctor import probe

    await probe()
    return await start(template, python, limits)


async def start(template: Path, python: Path | None, limits: Limits) -> BwrapSandbox:
    """`open_sandbox` without the check of what holds."""
    template, root = await asyncio.to_thread(_ready, template), shared_folder() / "root"
    uid = template.stat().st_uid
    here, there = socket.socketpair()
    with there:
        process = await asyncio.to_thread(_launch_holder, there, uid)
    reader, writer = await asyncio.open_unix_connection(sock=here, limit=1 << 20)
    sandbox = BwrapSandbox(process, reader, writer, command_prefix(root, python, limits))
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


def command_prefix(root: Path, python: Path | None, limits: Limits) -> list[str]:
    """The command line that every command is appended to: all the isolation there is, as data."""
    bwrap, prlimit = _tool("bwrap"), _tool("prlimit")
    path = [f"{python.parent}"] if python else []
    variables = {
        "PATH": ":".join([*path, "/usr/local/bin", "/usr/bin", "/bin"]),
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
        bwrap, "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--disable-userns",
        "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox",
        "--clearenv", *(word for name, value in variables.items() for word in ("--setenv", name, value)),
        *_system_binds(), "--proc", "/proc", "--dev", "/dev",
        *(word for place in _python_places(python) for word in ("--ro-bind", place, place)),
        "--bind", f"{root}/tmp", "/tmp", "--bind", f"{root}/shm", "/dev/shm",
        "--bind", f"{root}/work", WORK, "--chdir", WORK,
        "--json-status-fd", str(holder.STATUS), "--seccomp", str(holder.FILTER),
        "--remount-ro", "/dev", "--remount-ro", "/", "--",
        prlimit, *(f"--{name}={value}" for name, value in caps.items()), "--",
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
    """The interpreter's environment, and the installation it was made from, where /usr doesn't hold them already."""
    if python is None:
        return []
    places = {python.parent.parent, python.resolve().parent.parent}
    return sorted(str(place) for place in places if not place.is_relative_to("/usr"))


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
        self._dead = ""

    async def exec(self, command: Sequence[str], timeout: float = 20.0, output_limit: int = 16_384) -> ExecResult:
        """Run `command` in the work tree; when this returns, nothing that it started is alive.

        ValueError for a command that can't be one; SandboxDead when the sandbox, not the command, failed.
        """
        if isinstance(command, str) or not command or any("\0" in word for word in command):
            raise ValueError(f"command {command!r}: give a non-empty list of words without NUL")
        request = {"kind": "exec", "command": [*self._prefix, *command], "timeout": timeout, "limit": output_limit}
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
        for path in files:
            _check_path(path)
        await self.ask({"kind": "write", "files": dict(files)}, GRACE_SECONDS)

    async def read(self, path: str) -> str:
        _check_path(path)
        answer = await self.ask({"kind": "read", "path": path}, GRACE_SECONDS)
        text: str = answer["text"]
        return text

    async def reset(self) -> None:
        await self.ask({"kind": "reset"}, GRACE_SECONDS)

    async def close(self) -> None:
        """End every process and free every file of this sandbox. Closing twice is fine."""
        self._dead = self._dead or "closed"
        self._writer.close()
        await asyncio.to_thread(_end, self._process)

    async def ask(self, request: dict[str, Any], patience: float) -> dict[str, Any]:
        """One request and its answer. A cancelled caller's command is killed before the cancellation goes on."""
        async with self._turn:
            if self._dead:
                raise SandboxDead(f"the sandbox is {self._dead}")
            exchange = asyncio.ensure_future(self._exchange(request, patience))
            try:
                answer = await asyncio.shield(exchange)
            except asyncio.CancelledError:
                self._send({"kind": "cancel"})
                with suppress(SandboxDead):
                    await exchange
                raise
        return _raised(answer, request)

    async def _exchange(self, request: dict[str, Any], patience: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(patience):
                self._send(request)
                await self._writer.drain()
                (size,) = struct.unpack("!I", await self._reader.readexactly(4))
                answer: dict[str, Any] = json.loads(await self._reader.readexactly(size))
                return answer
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            await self.close()
            self._dead = "dead"
            words = self._process.stderr.read().decode(errors="replace").strip() if self._process.stderr else ""
            reason = words.splitlines()[-1] if words else type(error).__name__
            raise SandboxDead(f"the sandbox no longer answers ({reason})") from error

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        self._writer.write(struct.pack("!I", len(body)) + body)


def _raised(answer: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """The answer, or the error it tells of."""
    if "error" not in answer:
        return answer
    number, words = answer.get("errno"), answer["error"]
    where = request.get("path") or answer.get("on") or ", ".join(request.get("files", ()))
    if number is None or number in (40, 21):  # ELOOP: a link on the way; EISDIR
        raise ValueError(f"{where!r}: {words}")
    if number in (2, 20):  # ENOENT, ENOTDIR
        raise FileNotFoundError(number, words, where)
    raise OSError(number, words, where)


def _check_path(path: str) -> None:
    parts = PurePosixPath(path).parts
    if not parts or path != "/".join(parts) or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"path {path!r}: give a plain path relative to the work tree, without '..'")


def _ready(template: Path) -> Path:
    """The template if a sandbox can use it as it is, else a prepared copy."""
    template = template.absolute()
    if template.parent == shared_folder() / "templates" and template.is_dir():
        return template
    return prepare_template(template, "adhoc")


def _tool(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/bin:/bin")
    if not found:
        raise SandboxUnavailable(f"no sandbox on this machine: {name} is not installed. {REMEDY}")
    return found


def _launch_holder(there: socket.socket, uid: int) -> subprocess.Popen[bytes]:
    """Never as uid 0, whose sandboxes would own the host's /proc/sys and escape RLIMIT_NPROC."""
    source = Path(holder.__file__).read_text()
    alone = [_tool("unshare"), "--user", "--map-root-user", "--mount", "--"]
    python = [str(reachable_python()), "-I", "-S", "-X", "utf8", "-c", source]
    is_root = os.getuid() == 0
    return subprocess.Popen(
        [*alone, *python],
        stdin=there.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={},
        cwd="/",
        start_new_session=True,  # a Ctrl-C is for us to handle, not for every holder at once
        user=uid if is_root else None,
        group=uid if is_root else None,
        extra_groups=[] if is_root else None,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """The holder leaves by itself when its socket closes; one that doesn't is killed, and its commands with it."""
    try:
        process.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
