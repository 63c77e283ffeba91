"""A place where untrusted code runs, put back to its start before each use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

MIB = 1 << 20


class Limits(msgspec.Struct, frozen=True):
    """What one sandbox may use. Sizes in bytes; `processes` and the three after it hold for each command."""

    disk: int = 64 * MIB  # everything written in one episode: work tree, /tmp and /dev/shm together
    inodes: int = 20_000
    memory: int = 512 * MIB  # resident memory of all the processes of a command together
    processes: int = 64
    address_space: int = 1024 * MIB  # per process
    cpu_seconds: int = 20  # per process
    file_size: int = 32 * MIB
    open_files: int = 256


class Guarantees(msgspec.Struct, frozen=True):
    """What an isolation backend was seen to hold against on this machine, and what it can't bound."""

    backend: str
    held: tuple[str, ...]
    broken: tuple[str, ...]
    unbounded: tuple[str, ...]


class ExecResult(msgspec.Struct, frozen=True):
    code: int | None  # exit status; None when a signal or a limit ended it
    output: str  # stdout and stderr together, capped while reading: head and tail kept
    truncated: bool
    timed_out: bool
    seconds: float
    backend: str


class Sandbox(Protocol):
    async def exec(self, command: Sequence[str], timeout: float = 20.0, output_limit: int = 16_384) -> ExecResult: ...

    async def write(self, files: Mapping[str, str]) -> None:
        """Write text files, paths relative to the work tree. A path that leaves it is a ValueError."""

    async def read(self, path: str) -> str:
        """One regular file's text, never following a link. FileNotFoundError when it isn't there."""

    async def reset(self) -> None:
        """Back to the template, in place."""

    async def close(self) -> None: ...
