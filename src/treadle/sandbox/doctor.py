"""What the sandbox really holds on this machine, found by attacking it."""

from __future__ import annotations


async def probe() -> None:
    return None
