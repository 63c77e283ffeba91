"""Attacks that must fail inside a sandbox and succeed on a bare process. Sent inside as text: standard library alone.

Arguments: a port that something listens on at 127.0.0.1, an abstract socket name with a listener, a path that exists on
the host, then the names of the attacks to try (none: all). Prints a JSON object: name to whether it came through.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

PORT, NAME, SECRET = sys.argv[1:4] if len(sys.argv) > 3 else ("0", "", "")
EXPECTED_VARIABLES = {"PATH", "HOME", "LANG", "PWD", "PYTHONDONTWRITEBYTECODE", "LC_CTYPE"}


def tcp() -> bool:
    with socket.create_connection(("127.0.0.1", int(PORT)), 0.5):
        return True


def abstract_socket() -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + NAME)
        return True


def vsock() -> bool:
    """The family that reaches a virtual machine's host whatever the network namespace."""
    with socket.socket(socket.AF_VSOCK):
        return True


def host_files() -> bool:
    return any(Path(place).exists() for place in (SECRET, "/etc/passwd", "/root", "/home", "/sys", "/var/log"))


def environment() -> bool:
    return bool(set(os.environ) - EXPECTED_VARIABLES or Path("/proc/1/environ").read_bytes())


def other_processes() -> bool:
    return sum(entry.name.isdigit() for entry in Path("/proc").iterdir()) > 3


def write_outside() -> bool:
    return any(_plant(place) for place in ("/", "/usr", "/etc", "/dev", "/proc/sys/kernel", sys.prefix))


def _plant(place: str) -> bool:
    try:
        Path(place, "planted").write_text("x")
    except OSError:
        return False
    return True


def privileges() -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    capable = int(status["CapEff"], 16) or int(status["CapBnd"], 16)
    return os.getuid() == 0 or bool(capable) or int(status["NoNewPrivs"]) != 1


def ptrace() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if _call("ptrace", 0, 0, 0, 0) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def process_memory() -> bool:
    """process_vm_readv with nothing to read: refused before anything is looked at, or not."""
    return _call("process_vm_readv", os.getpid(), None, 0, None, 0, 0)


def new_user_namespace() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if _call("unshare", 0x10000000) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def memory_file() -> bool:
    os.close(os.memfd_create("hidden"))
    return True


def shared_memory() -> bool:
    segment = ctypes.CDLL(None).shmget(0, 4096, 0o1600)
    if segment >= 0:
        ctypes.CDLL(None).shmctl(segment, 0, None)  # 0: remove it
    return bool(segment >= 0)


def _call(name: str, *arguments: int | None) -> bool:
    return bool(ctypes.CDLL(None)[name](*arguments) >= 0)


def processes() -> bool:
    children = []
    try:
        for _ in range(40):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            children.append(child)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return True


def disk() -> bool:
    with Path("filler").open("wb") as file:
        try:
            for _ in range(4):
                file.write(bytes(1 << 20))
                file.flush()
        finally:
            os.truncate("filler", 0)
    return True


def inodes() -> bool:
    for number in range(400):
        Path(f"inode{number}").touch()
    return True


ATTACKS: tuple[Callable[[], bool], ...] = (
    tcp,
    abstract_socket,
    vsock,
    host_files,
    environment,
    other_processes,
    write_outside,
    privileges,
    ptrace,
    process_memory,
    new_user_namespace,
    memory_file,
    shared_memory,
    processes,
    disk,
    inodes,
)


def comes_through(attack: Callable[[], bool]) -> bool:
    try:
        return attack()
    except OSError:
        return False


if __name__ == "__main__":
    chosen = [attack for attack in ATTACKS if len(sys.argv) < 5 or attack.__name__ in sys.argv[4:]]
    print(json.dumps({attack.__name__: comes_through(attack) for attack in chosen}))
