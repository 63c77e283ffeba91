"""One error tree. `UserError` is for what a user can mend: one clear line, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TreadleError(Exception):
    """Base of everything raised on purpose."""


class UserError(TreadleError):
    """Bad input. The message names the value and the fix."""


class ConfigError(UserError):
    """Unknown or ill-typed setting."""


class DataError(UserError):
    """A record or file that can't be read."""


class SandboxUnavailable(UserError):
    """No isolation backend works on this machine."""


class HeldOut(TreadleError):
    """A held-out task was about to enter training."""


class InfrastructureError(TreadleError):
    """Not the agent's fault: the episode is ungraded and leaves every statistic."""


class SandboxDead(InfrastructureError):
    """The sandbox no longer answers."""


class EngineError(InfrastructureError):
    """The sampling engine failed."""


def unknown(kind: str, value: str, choices: Iterable[str]) -> str:
    """`unknown tool 'raed': did you mean 'read'? (known: list, read)`"""
    known = sorted(choices)
    near = difflib.get_close_matches(value, known, n=1)
    hint = f": did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {value!r}{hint} (known: {', '.join(known)})"
