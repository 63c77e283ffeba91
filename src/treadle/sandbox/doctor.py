"""What a sandbox holds against on this machine, found by attacking from the inside rather than by reading settings."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treadle.sandbox import attacks
from treadle.sandbox.base import MIB, ExecResult, Guarantees, Limits

PROBE_LIMITS = Limits(disk=2 * MIB, inodes=200, memory=64 * MIB, processes=12)
UNBOUNDED = (
    "processor time of a command as a whole: each process has its own cap, the timeout bounds the rest",
    "memory between two looks at it (50 ms), and the kernel's memory for sockets and pipes: no control group is used",
)
MEMORY_ATTACK = ["-c", "import time; kept = bytearray(b'x') * (160 << 20); time.sleep(5); print('kept')"]


@contextmanager
def baited(secret: Path) -> Iterator[list[str]]:
    """Arguments for a Python that make it attack, while something to find exists: listeners and a host path."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("")  # the kernel picks a free abstract name
        abstract.listen()
        name = abstract.getsockname()[1:].decode()
        source = Path(attacks.__file__).read_text()
        yield ["-I", "-c", source, str(tcp.getsockname()[1]), name, str(secret)]


def judge(backend: str, report: ExecResult, memory: ExecResult) -> Guarantees:
    """Read the outcome; a report that can't be read, or lacks an attack, counts as broken isolation."""
    names = [attack.__name__ for attack in attacks.ATTACKS]
    try:
        found: dict[str, bool] = dict.fromkeys(names, True) | json.loads(report.output)
    except json.JSONDecodeError:
        found = dict.fromkeys([*names, f"(no report: {report.output.strip()[-300:]})"], True)
    found["memory"] = "kept" in memory.output
    held, broken = ([name for name, hit in found.items() if hit is want] for want in (False, True))
    return Guarantees(backend=backend, held=tuple(held), broken=tuple(broken), unbounded=UNBOUNDED)
