"""Holds one sandbox's files and runs its commands; lives in the sandbox's own user and mount namespaces.

Sent to a bare interpreter as `-c` text, so it uses the standard library alone and reads no file of this package. It
answers one request at a time over the socket at descriptor 0, each message a JSON object after its length in 4 bytes.
It ends, and with it every process and file of the sandbox, when that socket closes or the driver dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import stat
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONTROL, STATUS, FILTER = 0, 3, 4  # the last two: where the command line expects its descriptors
WATCH_SECONDS = 0.05
READ_LIMIT = 4 << 20
CHUNK = 1 << 16
NOTICE = 40  # bytes kept free for the words that say what was cut
SHOWN = ("work", "tmp", "shm")  # the folders that the command line binds
NOSUID_NODEV, DETACH, SUBREAPER = 6, 2, 36

LIBC = ctypes.CDLL(None, use_errno=True)


# ---------------------------------------------------------------- messages


def receive() -> dict[str, Any] | None:
    """The next request; None when the driver has gone."""
    body = _take(struct.unpack("!I", header)[0]) if (header := _take(4)) else None
    return json.loads(body) if body else None


def _take(size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(CONTROL, size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def send(message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    data = memoryview(struct.pack("!I", len(body)) + body)
    while data:
        data = data[os.write(CONTROL, data) :]


# ---------------------------------------------------------------- files


def mount_all(config: dict[str, Any], fresh: bool) -> None:
    """A capped tmpfs holding an overlay of the template. Dropping both whole is a reset that walks no hostile tree."""
    root = config["root"]
    if not fresh:
        for place in (f"{root}/work", root):
            _check(LIBC.umount2(place.encode(), DETACH), place)
    _mount("tmpfs", root, f"size={config['disk']},nr_inodes={config['inodes']},mode=700")
    for name in (*SHOWN, "upper", "scratch"):
        Path(root, name).mkdir()
    template = config["template"]
    for special in "\\:,":
        template = template.replace(special, "\\" + special)
    layers = f"userxattr,lowerdir={template},upperdir={root}/upper,workdir={root}/scratch"
    _mount("overlay", f"{root}/work", layers)


def _mount(kind: str, place: str, options: str) -> None:
    _check(LIBC.mount(kind.encode(), place.encode(), kind.encode(), NOSUID_NODEV, options.encode()), f"{kind} {place}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


@contextlib.contextmanager
def folder_of(root: str, path: str, make: bool) -> Iterator[int]:
    """A descriptor of the folder that holds `path`, reached a step at a time so that no link is ever followed."""
    step_flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(f"{root}/work", step_flags)
    try:
        for part in path.split("/")[:-1]:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=fd)
            try:
                step = os.open(part, step_flags, dir_fd=fd)
            except NotADirectoryError:
                raise ValueError(f"{part!r} on its way is a link or a file, not a folder") from None
            os.close(fd)
            fd = step
        yield fd
    finally:
        os.close(fd)


def write_file(root: str, path: str, data: bytes) -> None:
    """Replace the entry itself: a link or pipe planted there is swept aside, not written through."""
    name, draft = path.rsplit("/", 1)[-1], f".{os.urandom(8).hex()}"
    with folder_of(root, path, make=True) as folder:
        mode = 0o644
        with contextlib.suppress(FileNotFoundError):
            old = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if stat.S_ISDIR(old):
                raise ValueError("is a folder")
            mode = stat.S_IMODE(old) & 0o777 if stat.S_ISREG(old) else mode
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(draft, flags, 0o600, dir_fd=folder), "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.write(data)
            os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            raise


def read_file(root: str, path: str) -> str:
    name = path.rsplit("/", 1)[-1]
    with folder_of(root, path, make=False) as folder:
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise ValueError("not a regular file")
        with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
            data = file.read(READ_LIMIT + 1)
    if len(data) > READ_LIMIT:
        raise ValueError(f"larger than {READ_LIMIT} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None


# ---------------------------------------------------------------- commands


class Output:
    """Keeps the head and the tail of what goes by, never more than the limit (at least 100 bytes)."""

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self.head, self.tail = bytearray(), bytearray()
        self.head_size = (limit - NOTICE) // 2
        self.tail_size = limit - self.head_size

    def add(self, chunk: bytes) -> None:
        self.total += len(chunk)
        space = self.head_size - len(self.head)
        self.head += chunk[:space]
        self.tail += chunk[space:]
        del self.tail[: -self.tail_size]

    def text(self) -> str:
        if self.total <= self.limit:
            return (self.head + self.tail).decode(errors="replace")
        tail = self.tail[NOTICE:]
        cut = self.total - len(self.head) - len(tail)
        return f"{self.head.decode(errors='replace')}\n[... {cut} bytes cut ...]\n{tail.decode(errors='replace')}"


class Command:
    """One bubblewrap, from launch until nothing of it is left."""

    def __init__(self, request: dict[str, Any], config: dict[str, Any], driver: int) -> None:
        self.started = self.watched = time.monotonic()
        self.timeout, self.memory, self.driver = request["timeout"], config["memory"], driver
        self.output = Output(request["limit"])
        self.first: int | None = None  # the process that is number 1 inside
        self.code: int | None = None
        self.record = b""
        self.ended_by = ""
        for name in SHOWN:
            Path(config["root"], name).chmod(0o755)  # or the last command could have locked the next one out
        self.pipe, pipe_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.status, status_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(pipe_in, True)
        filter_fd = os.memfd_create("filter")  # a fresh one each time: it is read from its current offset
        os.write(filter_fd, bytes.fromhex(config["filter"]))
        os.lseek(filter_fd, 0, os.SEEK_SET)
        try:
            self.pid = _launch(request["command"], pipe_in, status_in, filter_fd)
        except BaseException:
            os.close(self.pipe)
            os.close(self.status)
            raise
        finally:
            for fd in (pipe_in, status_in, filter_fd):
                os.close(fd)

    def finish(self) -> dict[str, Any]:
        """Serve the command until it ends or must; then see to it that no process remains."""
        process = os.pidfd_open(self.pid)
        poller = select.poll()
        for fd in (self.pipe, self.status, process, CONTROL, self.driver):
            poller.register(fd, select.POLLIN)
        running = True
        while running:
            for fd, _ in poller.poll(self._wait()):
                if fd == process:
                    running = False
                elif fd in (self.pipe, self.status):
                    if not (self._read_output() if fd == self.pipe else self._read_status()):
                        poller.unregister(fd)
                else:  # the driver cancels, or has gone
                    poller.unregister(fd)
                    self._kill("cancelled")
            if running and not self.ended_by:
                self._enforce()
        reap()
        while self._read_status():
            pass
        while self._read_output():
            pass
        for fd in (process, self.pipe, self.status):
            os.close(fd)
        return self._result()

    def _wait(self) -> float:
        """Milliseconds until the next look at the limits."""
        left = self.started + self.timeout - time.monotonic()
        return max(0.0, min(left, WATCH_SECONDS) * 1000) if not self.ended_by else WATCH_SECONDS * 1000

    def _enforce(self) -> None:
        now = time.monotonic()
        if now - self.started >= self.timeout:
            self._kill("time")
        elif now - self.watched >= WATCH_SECONDS:
            self.watched = now
            if self.first is not None and memory_used(self.first, self.memory) > self.memory:
                self._kill("memory")

    def _kill(self, why: str) -> None:
        self.ended_by = self.ended_by or why
        os.kill(self.pid, signal.SIGKILL)  # not reaped before `reap`, so the number is still its own

    def _read_output(self) -> bool:
        chunk = _read(self.pipe)
        self.output.add(chunk or b"")
        return bool(chunk)

    def _read_status(self) -> bool:
        chunk = _read(self.status)
        *lines, self.record = (self.record + (chunk or b"")).split(b"\n")  # it is written piece by piece
        for line in lines:
            record = json.loads(line)
            self.first = record.get("child-pid", self.first)
            self.code = record.get("exit-code", self.code)
        return bool(chunk)

    def _result(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "ended_by": self.ended_by,
            "output": self.output.text(),
            "truncated": self.output.total > self.output.limit,
            "seconds": time.monotonic() - self.started,
        }


def _launch(command: list[str], output: int, status: int, filter_fd: int) -> int:
    """Start with an empty environment: what the caller's held would be readable in /proc/1/environ."""
    # Copies above the low numbers, or giving one its place could overwrite another.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (output, status, filter_fd)]
    actions: list[tuple[int, int, int]] = [(os.POSIX_SPAWN_DUP2, high[0], 1), (os.POSIX_SPAWN_DUP2, high[0], 2)]
    actions += [(os.POSIX_SPAWN_DUP2, high[1], STATUS), (os.POSIX_SPAWN_DUP2, high[2], FILTER)]
    nothing = (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)
    defaults = [signal.SIGPIPE, signal.SIGXFSZ]  # Python ignores these, and ignoring is inherited
    try:
        return os.posix_spawn(command[0], command, {}, file_actions=[nothing, *actions], setsigdef=defaults)
    finally:
        for fd in high:
            os.close(fd)


def _read(fd: int) -> bytes | None:
    try:
        return os.read(fd, CHUNK)
    except BlockingIOError:
        return None


def memory_used(first: int, enough: int) -> int:
    """Resident bytes of every process that the sandbox's own /proc lists; shared pages count once where it matters."""
    inside = f"/proc/{first}/root/proc"
    try:
        if Path(inside).stat().st_dev == Path("/proc").stat().st_dev:  # still the host's: it is not set up yet
            return 0
        numbers = [name for name in os.listdir(inside) if name.isdigit()]  # noqa: PTH208
    except OSError:  # half set up, or gone
        return 0
    resident = sum(_pages(f"{inside}/{number}/statm") for number in numbers) * os.sysconf("SC_PAGE_SIZE")
    if resident <= enough:
        return resident
    return sum(_proportional(f"{inside}/{number}/smaps_rollup") for number in numbers)


def _pages(path: str) -> int:
    try:
        return int(Path(path).read_text().split()[1])
    except (OSError, IndexError):
        return 0


def _proportional(path: str) -> int:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def reap() -> None:
    """Kill and collect all that is left. A namespace's first process ends only after every other one in it."""
    own = f"/proc/self/task/{os.getpid()}/children"
    while True:
        for child in Path(own).read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


# ---------------------------------------------------------------- the loop


def answer(request: dict[str, Any], config: dict[str, Any], driver: int) -> dict[str, Any]:
    kind, root = request["kind"], config["root"]
    if kind == "exec":
        return Command(request, config, driver).finish()
    if kind == "write":
        for path, text in request["files"].items():
            try:
                write_file(root, path, text.encode())
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from None
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        return {}
    if kind == "read":
        return {"text": read_file(root, request["path"])}
    mount_all(config, fresh=kind == "open")
    return {}


def main() -> None:
    LIBC.prctl(SUBREAPER, 1, 0, 0, 0)  # what a dead bubblewrap leaves comes to us, to be killed and collected
    Path("/proc/self/oom_score_adj").write_text("1000")  # the sandbox, never the trainer, when memory runs out
    driver = os.pidfd_open(os.getppid())
    poller = select.poll()
    poller.register(CONTROL, select.POLLIN)
    poller.register(driver, select.POLLIN)
    config: dict[str, Any] = {}
    while True:
        ready = dict(poller.poll())
        request = receive() if driver not in ready else None
        if request is None:
            sys.exit(0)
        if request["kind"] == "cancel":
            continue  # the command that it meant had just ended
        config = request if request["kind"] == "open" else config
        try:
            send(answer(request, config, driver))
        except OSError as error:
            send({"errno": error.errno, "error": error.strerror, "on": str(error.filename or "")})
        except ValueError as error:
            send({"error": str(error)})


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the driver went while being answered
        main()
