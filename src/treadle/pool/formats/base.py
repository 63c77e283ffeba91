"""What readers share: how a record that can't be used is reported."""

from __future__ import annotations

import msgspec


class Quarantine(msgspec.Struct, frozen=True):
    """A record set aside: where it stands, a code to count by, and what is wrong with it."""

    file: str
    line: int  # from 1
    code: str
    reason: str

    def where(self) -> str:
        return f"{self.file}:{self.line}"


class BadRecord(ValueError):
    """Raised while reading one record; becomes its Quarantine."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
