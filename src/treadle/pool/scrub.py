"""Secrets and personal data leave before anything is stored: each becomes `<secret:CATEGORY:HASH>`.

The same secret gets the same placeholder everywhere. What was found once in a trajectory is replaced wherever it occurs
there again, named or not.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from treadle.pool import secrets
from treadle.types import Message, Node, ToolCall, Trajectory

Visit = Callable[[str], str]
NamedVisit = Callable[[str, str], str]  # (key, value) -> value

TASK_ID = "task_id"
EVERYWHERE = 8  # characters from which a found secret is looked for in places that don't name it


class Scrubber:
    """Replaces secrets and counts them by category. One scrubber serves a whole ingest."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._placeholders: dict[str, str] = {}
        self._categories: dict[str, str] = {}

    def text(self, text: str) -> str:
        """One text on its own."""
        return self._replace(text, None)

    def trajectory(self, trajectory: Trajectory) -> Trajectory:
        """A copy without secrets; the same object when it has none.

        Token ids still spell what the text no longer says, so they are all dropped from a trajectory that was changed.
        """
        found: set[str] = set()

        def collect(text: str) -> str:
            found.update(text[hit.start : hit.end] for hit in secrets.find(text))
            return text

        def collect_named(key: str, value: str) -> str:
            if secrets.named(key, value):
                found.add(value)
            return collect(value)

        _mapped(trajectory, collect, collect_named)
        if not found:
            return trajectory
        long = sorted((secret for secret in found if len(secret) >= EVERYWHERE), key=len, reverse=True)
        known = re.compile("|".join(map(re.escape, long))) if long else None
        clean = _mapped(
            trajectory,
            lambda text: self._replace(text, known),
            lambda key, value: self._replace_named(key, value, known),
        )
        if any(node.tokens for node in clean.nodes):
            dropped = sum(len(node.tokens) for node in clean.nodes)
            self.counts["tokens_dropped"] += dropped
            clean.nodes = [_without_tokens(node) for node in clean.nodes]
            clean.extra = {**clean.extra, "tokens_dropped": dropped}
        return clean

    def _replace(self, text: str, known: re.Pattern[str] | None) -> str:
        pieces: list[str] = []
        at = 0
        for hit in secrets.find(text):
            pieces += [text[at : hit.start], self._placeholder(text[hit.start : hit.end], hit.category)]
            at = hit.end
        cleaned = "".join(pieces) + text[at:]
        return (
            cleaned if known is None else known.sub(lambda match: self._placeholder(match.group(), "secret"), cleaned)
        )

    def _replace_named(self, key: str, value: str, known: re.Pattern[str] | None) -> str:
        category = secrets.named(key, value)
        return self._placeholder(value, category) if category else self._replace(value, known)

    def _placeholder(self, secret: str, category: str) -> str:
        """Two bytes of a keyed hash: enough to tell secrets apart in a log, too few to find one by trying."""
        if secret not in self._placeholders:
            data = secret.encode("utf-8", "surrogatepass")
            digest = hashlib.blake2b(data, key=b"treadle", digest_size=2).hexdigest()
            self._placeholders[secret] = f"<secret:{category}:{digest}>"
            self._categories[secret] = category
        self.counts[self._categories[secret]] += 1
        return self._placeholders[secret]


def _mapped(trajectory: Trajectory, visit: Visit, named: NamedVisit) -> Trajectory:
    """A copy with every text that came from outside replaced; ids stay."""
    nodes = [
        msgspec.structs.replace(
            node,
            message=_mapped_message(node.message, visit, named),
            failure=node.failure and visit(node.failure),
            extra=_mapped_value(node.extra, visit, named),
        )
        for node in trajectory.nodes
    ]
    outcome = msgspec.structs.replace(trajectory.outcome, detail=visit(trajectory.outcome.detail))
    labels = dict(trajectory.labels)
    ids = {TASK_ID: labels.pop(TASK_ID)} if TASK_ID in labels else {}  # random enough to be taken for a secret
    return msgspec.structs.replace(
        trajectory,
        nodes=nodes,
        outcome=outcome,
        labels=_mapped_value(labels, visit, named) | ids,
        extra=_mapped_value(trajectory.extra, visit, named),
    )


def _mapped_message(message: Message, visit: Visit, named: NamedVisit) -> Message:
    def call(made: ToolCall) -> ToolCall:
        arguments = _mapped_value(made.arguments, visit, named)
        return msgspec.structs.replace(made, arguments=arguments, raw=visit(made.raw), error=visit(made.error))

    return msgspec.structs.replace(
        message,
        content=visit(message.content),
        name=message.name and visit(message.name),
        reasoning=None if message.reasoning is None else visit(message.reasoning),
        tool_calls=tuple(map(call, message.tool_calls)),
    )


def _mapped_value(value: Any, visit: Visit, named: NamedVisit) -> Any:
    if isinstance(value, str):
        return visit(value)
    if isinstance(value, dict):
        return {
            visit(str(key)): named(str(key), inner) if isinstance(inner, str) else _mapped_value(inner, visit, named)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mapped_value(inner, visit, named) for inner in value]
    return value


def _without_tokens(node: Node) -> Node:
    return msgspec.structs.replace(node, tokens=[], mask=[], log_probs=[], versions=[])
