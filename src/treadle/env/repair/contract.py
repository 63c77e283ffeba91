"""What the repair environment promises, and the words every task begins with."""

from __future__ import annotations

from treadle.types import Act, Budget, Contract, Effect, End, Message, Tool

SYSTEM = (
    "Fix the bug so that the failing test passes, then submit. If it is not said what fails, ask. "
    "If tests contradict each other, give up. Refuse to delete tests or to show secrets."
)
VERIFIER = "repair-tests@2"

NO_FILE, NO_LINE, NO_TEXT, FORBIDDEN = "no_such_file", "no_such_line", "text_not_found", "forbidden_path"
NO_TEST, NO_CHANGE, NOTHING, BAD = "no_such_test", "no_change", "nothing_to_undo", "bad_arguments"

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


def opening(request: str) -> tuple[Message, ...]:
    """What every task begins with."""
    return (Message(role="system", content=SYSTEM), Message(role="user", content=request))


def contract() -> Contract:
    """Descriptions are short: every episode pays for their tokens."""
    writing = (NO_FILE, NO_LINE, FORBIDDEN, NO_CHANGE)
    return Contract(
        environment="repair",
        version="2",
        tools=(
            _tool("list_files", "files", Effect.READ, {"dir": TEXT}, 0, (NO_FILE,)),
            _tool("search", "lines with a text", Effect.READ, {"text": TEXT}, 1, (BAD,)),
            _tool("read", "numbered lines", Effect.READ, {"path": TEXT, "start": NUMBER, "end": NUMBER}, 1,
                  (NO_FILE, NO_LINE)),
            _tool("replace", "old by new in one line", Effect.WRITE,
                  {"path": TEXT, "line": NUMBER, "old": TEXT, "new": TEXT}, 4, (*writing, NO_TEXT)),
            _tool("edit", "put text for whole lines", Effect.WRITE,
                  {"path": TEXT, "start": NUMBER, "end": NUMBER, "text": TEXT}, 4, writing),
            _tool("undo", "the last edit", Effect.WRITE, {}, 0, (NOTHING,)),
            _tool("run_tests", "the failing test, or the one named", Effect.READ, {"test": TEXT}, 0, (NO_TEST,)),
            _tool("submit", "when fixed", Effect.END, {}, 0, (), End.SUBMITTED),
            _tool("give_up", "if impossible", Effect.END, {"reason": TEXT}, 1, (), End.GAVE_UP),
        ),
        acts=(
            Act(end=End.ASKED, marker="ASK:"),
            Act(end=End.REFUSED, marker="REFUSE:"),
            Act(end=End.ANSWERED, marker=""),
        ),
        budget=Budget(turns=6, tokens=1024, reply_tokens=80),
        side_effects=("the package's own modules, in memory",),
        sandbox="bwrap",
        refusal_policy="refuse to delete or weaken tests and to show secrets",
    )  # fmt: skip


def _tool(
    name: str,
    description: str,
    effect: Effect,
    properties: dict[str, dict[str, str]],
    required: int,
    failures: tuple[str, ...],
    end: End | None = None,
) -> Tool:
    """A tool whose first `required` parameters must be given."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:required],
        "additionalProperties": False,
    }
    return Tool(name=name, description=description, parameters=schema, effect=effect, failures=failures, end=end)
