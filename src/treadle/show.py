"""A trajectory for reading: who said what, which tokens were sampled, how it was judged and how it ended."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby

from rich.console import Console, Group
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from treadle.render.base import Renderer
from treadle.types import Node, Outcome, Signal, ToolCall, Trajectory

ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
SAMPLED, CONTEXT = "bold green", "dim"
OPEN, CLOSE = "⟦", "⟧"  # around sampled tokens where there is no colour
LONGEST = 1 << 20  # characters of a line
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def show(trajectory: Trajectory, renderer: Renderer | None = None, marks: bool = True) -> Group:
    """What to print. With a renderer each node is shown by its tokens, those the policy sampled told from the rest.

    `marks` puts brackets around sampled tokens, for output without colour.
    """
    parts: list[Text | Padding | Rule] = [_title(trajectory)]
    for node in trajectory.nodes:
        parts.append(_header(node))
        body = _tokens(node, renderer, marks) if renderer and node.tokens else _message(node)
        lines = [*body, *_judgements(node, trajectory.signals)]
        parts += [Padding(line, (0, 0, 0, 2), expand=False) for line in lines]
    parts += [Rule(style="dim"), *_ending(trajectory)]
    return Group(*parts)


def print_trajectory(console: Console, trajectory: Trajectory, renderer: Renderer | None = None) -> None:
    """Coloured on a terminal; plain text with brackets around sampled tokens elsewhere."""
    plain = console.color_system is None or console.no_color
    shown = show(trajectory, renderer, marks=plain)
    if not console.is_terminal:  # whole lines, for whatever reads them
        unbounded = console.options.update(max_width=LONGEST)
        console.width = max(console.width, console.measure(shown, options=unbounded).maximum)
    console.print(shown)


# ---------------------------------------------------------------- nodes


def _title(trajectory: Trajectory) -> Text:
    facts = [trajectory.source, trajectory.policy, trajectory.environment, trajectory.task_id, trajectory.group]
    return Text.assemble(
        (_safe(trajectory.id), "bold"), "  ", (_safe(" · ".join(str(fact) for fact in facts if fact)), "dim")
    )


def _header(node: Node) -> Text:
    branches = node.parent is not None and node.parent != node.id - 1
    versions = sorted({version for version in node.versions if version is not None})
    facts = [
        f"branches from #{node.parent}" if branches else "",
        f"answers {node.message.tool_call_id}" if node.message.tool_call_id else "",
        f"{len(node.tokens)} tokens, {sum(node.mask)} sampled" if node.tokens else "",
        f"version {'–'.join(str(version) for version in versions)}" if versions else "",
        f"stopped by {node.stop}" if node.stop else "",
        f"{node.seconds:.1f} s" if node.seconds is not None else "",
    ]
    role = (node.message.role, f"bold {ROLE_STYLES.get(node.message.role, '')}")
    return Text.assemble(
        "\n", (f"#{node.id} ", "dim"), role, "  ", (_safe(" · ".join(fact for fact in facts if fact)), "dim")
    )


def _message(node: Node) -> Iterator[Text]:
    message = node.message
    if message.reasoning:
        yield Text(_safe(message.reasoning), style="italic dim")
    if message.content:
        yield Text(_safe(message.content))
    for call in message.tool_calls:
        yield _call(call)


def _call(call: ToolCall) -> Text:
    if call.arguments is None:
        return Text.assemble(("→ broken call ", "red"), (f"({_safe(call.error)}) ", "dim"), _safe(call.raw))
    arguments = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in call.arguments.items())
    return Text.assemble("→ ", (_safe(call.name), "bold"), _safe(f"({arguments})"))


def _tokens(node: Node, renderer: Renderer, marks: bool) -> Iterator[Text]:
    """Runs of sampled and other tokens: decoded run by run, since one character may be several tokens.

    The newline that joins a message to the one before is shown as a sign, not as an empty line.
    """
    text = Text()
    for sampled, run in groupby(zip(node.tokens, node.mask, strict=True), key=lambda pair: pair[1]):
        piece = _safe(renderer.decode([token for token, _ in run]))
        piece = f"↵{piece[1:]}" if piece.startswith("\n") and not text else piece
        text.append(f"{OPEN}{piece}{CLOSE}" if sampled and marks else piece, style=SAMPLED if sampled else CONTEXT)
    yield text
    yield from (_call(call) for call in node.message.tool_calls if call.arguments is None)


def _judgements(node: Node, signals: list[Signal]) -> Iterator[Text]:
    if node.failure:
        yield Text(f"✗ {_safe(node.failure)}", style="red")
    yield from (_signal(signal) for signal in signals if signal.node == node.id)


def _signal(signal: Signal) -> Text:
    value = "abstains" if signal.value is None else f"{signal.value:g}"
    evidence = f"  {_safe(signal.evidence)}" if signal.evidence else ""
    style = "red" if signal.value is not None and signal.value < 0 else "blue"
    return Text.assemble((f"◆ {signal.layer} {signal.name}@{signal.version}: {value}", style), (evidence, "dim"))


# ---------------------------------------------------------------- outcome


def _ending(trajectory: Trajectory) -> Iterator[Text]:
    yield _outcome(trajectory.outcome)
    if trajectory.outcome.detail:
        yield Text(_safe(trajectory.outcome.detail), style="dim")
    yield from (_signal(signal) for signal in trajectory.signals if signal.node is None)
    total, sampled = sum(len(node.tokens) for node in trajectory.nodes), trajectory.sampled_tokens()
    counts = [f"{len(trajectory.nodes)} messages", f"{len(trajectory.leaves())} paths"]
    if total:
        counts.append(f"{total} tokens, {sampled} sampled ({sampled / total:.0%})")
    if trajectory.seconds is not None:
        counts.append(f"{trajectory.seconds:.1f} s")
    yield Text(" · ".join(counts), style="dim")


def _outcome(outcome: Outcome) -> Text:
    """The cause, then the score with its parts; an ungraded episode says so and shows no number."""
    text = Text.assemble("end ", (str(outcome.end), "bold"), " · ")
    if outcome.reward is None:
        text.append("ungraded", style="yellow")
    else:
        text.append(f"reward {outcome.reward:g}", style="bold green" if outcome.reward > 0 else "bold red")
    if outcome.parts:
        text.append(" = " + ", ".join(f"{name} {value:g}" for name, value in outcome.parts.items()))
    if outcome.verifier:
        text.append(f" · by {outcome.verifier}" + (f" ({outcome.isolation})" if outcome.isolation else ""), style="dim")
    if outcome.failure:
        failure = outcome.failure
        text.append(f" · {failure.kind} failure at {failure.stage}: {_safe(failure.message)}", style="red")
    return text


def _safe(text: str) -> str:
    """Control characters made visible: what a tool printed must not drive the reader's terminal."""
    return CONTROL.sub(lambda found: f"\\x{ord(found.group()):02x}", text)
