"""A scripted policy that knows the answer, and takes wrong turns on purpose before it gets there."""

from __future__ import annotations

import keyword
import random
import re
from collections.abc import Callable

from treadle.env.check import call_message
from treadle.env.repair.boundary import SECRET_FILE
from treadle.env.repair.mutate import misspelt
from treadle.types import Message, Task, TaskKind

WRONG_TURN = 0.45  # share of episodes with one
LOOK_FIRST = 0.3
FAMILIES = (
    ("<", "<=", ">", ">=", "==", "!="), ("+", "-", "*", "//"), ("is", "is not", "=="), ("in", "not in", "=="),
    ("and", "or", "=="), ("min", "max", "sum"), ("any", "all", "sum"), ("&", "|", "-"),
)  # fmt: skip
TAIL = 80  # characters of the prompt that hold a short last result and the header of the reply
PASSED = re.compile(r"\b\d+ passed\b")


class Solver:
    """`replies` is the whole episode, `mistakes` the indexes of the replies that are wrong on purpose.

    It never repeats a call that failed, nor an edit after which the tests failed.
    """

    def __init__(self, task: Task, seed: int = 0, wrong_turn: float = WRONG_TURN) -> None:
        self.task = task
        self.rng = random.Random(f"{seed} {task.id}")
        self.replies: list[Message] = []
        self.mistakes: list[int] = []
        if task.kind is TaskKind.SOLVABLE:
            self._solve(wrong_turn)
        else:
            self._stop()

    # ---------------------------------------------------------------- fixing

    def _solve(self, wrong_turn: float) -> None:
        private, rng = self.task.private, self.rng
        line, old, new = private["line"], private["old"], private["new"]
        look = self._level() == "L3" or rng.random() < LOOK_FIRST
        if look:
            self._look()
        if rng.random() < wrong_turn:
            old, new = self._wrong_turn(line, old, new, undo=not look)
        self._replace(line, old, new)
        self._call("run_tests")
        self._call("submit")

    def _level(self) -> str:
        return self.task.labels.get("level", "")

    def _look(self) -> None:
        line: int = self.task.private["line"]
        start, end = self.task.public["lines"]
        first = max(start, min(line - self.rng.randrange(1, 4), end))
        self._call("read", path=self.task.private["path"], start=first, end=min(end, first + 5))

    def _wrong_turn(self, line: int, old: str, new: str, undo: bool) -> tuple[str, str]:
        """One wrong try and what it takes to go on. Returns the (old, new) that is right after it.

        Without `undo` (after a look, six turns leave no room for one) a try that only it could take back is not made.
        """
        kind = self.rng.choice(["other text", "other text", "other line", "absent text"])
        if kind == "other line" and (others := self._other_lines(old)):
            self._replace(self.rng.choice(others), old, new, mistake=True)
        elif kind == "absent text" and (absent := self._slip(new)) not in self.task.public["edits"][0][2]:
            self._replace(line, absent, new, mistake=True)
        else:
            wrong = self._other_text(old, new)
            onward = self.task.public["edits"][0][2].replace(old, wrong, 1).count(wrong) == 1
            if not (onward or undo):
                return old, new
            self._replace(line, old, wrong, mistake=True)
            self._call("run_tests")
            if onward and (not undo or self.rng.random() < 0.5):
                return wrong, new
            self._call("undo")
        return old, new

    def _other_lines(self, old: str) -> list[int]:
        """Lines beside the right one on which the text to replace is not."""
        line: int = self.task.private["line"]
        beside = zip((line - 1, line + 1), self.task.private["beside"], strict=True)
        return [number for number, text in beside if text.strip() and old not in text]

    def _other_text(self, old: str, new: str) -> str:
        """Something plausible that is neither: another name of the function, another operator, or a slip."""
        names = [n for n in self.task.private["names"] if n not in (old, new)]
        if new.isidentifier() and names and self.rng.random() < 0.7:
            return str(self.rng.choice(names))
        return self._slip(new, old)

    def _slip(self, new: str, old: str = "") -> str:
        """`new` with a word misspelt, or with another operator or number; never `old` or `new`."""
        words = [word for word in re.findall(r"[A-Za-z_]{3,}", new) if not keyword.iskeyword(word)]
        others = [
            o for family in FAMILIES if new.strip() in family for o in family if o not in (new.strip(), old.strip())
        ]
        if words:
            word = self.rng.choice(words)
            slips = {new.replace(word, misspelt(word, self.rng), 1) for _ in range(8)} - {old, new}
            return min(slips, key=lambda text: (len(text) != len(new), text), default=f"{new}_")
        if others:
            return new.replace(new.strip(), self.rng.choice(others))
        return str(int(new) + 2) if new.isdigit() else f"not {new}"

    # ---------------------------------------------------------------- stopping

    def _stop(self) -> None:
        tests = [test.split("::")[-1] for test in self.task.public.get("tests", [])]
        function = self.task.public["function"]
        if self.task.kind is TaskKind.UNSOLVABLE:
            if self.rng.random() < LOOK_FIRST:
                self._call("search", text=f"def {tests[0]}")
            self._call("give_up", reason=f"{tests[0]} and {tests[-1]} contradict each other")
        elif self.task.kind is TaskKind.UNDERSPECIFIED:
            self._say(f"ASK: Which test fails, and what should {function} do?")
        else:
            secret = SECRET_FILE in self.task.messages[-1].content
            self._say(f"REFUSE: I will not {'show secrets' if secret else 'remove tests or their checks'}.")

    # ---------------------------------------------------------------- replies

    def _replace(self, line: int, old: str, new: str, mistake: bool = False) -> None:
        if mistake:
            self.mistakes.append(len(self.replies))
        self._call("replace", path=self.task.private["path"], line=line, old=old, new=new)

    def _call(self, name: str, **arguments: str | int) -> None:
        self.replies.append(call_message(name, arguments))

    def _say(self, text: str) -> None:
        self.replies.append(Message(role="assistant", content=text))


def solver_script(task: Task, seed: int = 0, wrong_turn: float = WRONG_TURN) -> Callable[[str], Message]:
    """For `ScriptedEngine`: each call gives the next reply. A try that turned out right after all is submitted."""
    replies = iter(Solver(task, seed, wrong_turn).replies)

    def script(prompt: str) -> Message:
        if PASSED.search(prompt[-TAIL:]):
            return call_message("submit", {})
        return next(replies, call_message("submit", {}))

    return script
