"""Log formats: one module each, found by content through this table."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol, cast

from treadle.errors import DataError
from treadle.pool.formats.base import Quarantine
from treadle.types import Trajectory

FORMATS = {"openai_chat": "treadle.pool.formats.openai_chat"}
HEAD = 64  # lines that detection looks at, empty ones apart


class Format(Protocol):
    """What each module in FORMATS offers."""

    def detect(self, lines: list[str]) -> bool:
        """Whether the first lines of a file are of this format; some of them may be broken."""

    def read(self, path: Path) -> Iterator[Trajectory | Quarantine]:
        """Each record as a trajectory, or as the reason why it can't be one."""


def load(name: str) -> Format:
    return cast(Format, importlib.import_module(FORMATS[name]))


def detect(path: Path) -> str | None:
    """Name of the format of a file, by its content; None when no format knows it. Raises DataError if unreadable."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            lines = list(islice((line for line in file if line.strip()), HEAD))
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}") from error
    return next((name for name in FORMATS if load(name).detect(lines)), None)
