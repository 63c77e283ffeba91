"""Ways to break one line of a function. Every change is an exact replacement of a stretch of one line."""

from __future__ import annotations

import ast
import builtins
import keyword
import random
import re
from collections.abc import Callable, Iterator
from functools import lru_cache

import msgspec

from treadle.types import Record

BODY_LINES = range(2, 26)  # a function's own lines, its docstring aside


class Function(Record, frozen=True):
    name: str
    qualified: str  # Class.method
    first: int  # line of its first decorator, or of `def`: what code objects and tracebacks of calls name
    start: int  # first line of the body after the docstring
    end: int
    names: tuple[str, ...]  # names it reads, in order of appearance


class Change(msgspec.Struct, frozen=True):
    """Characters `start` to `end` of line `line` (from 1) become `text`."""

    kind: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, source_line: str) -> str:
        return source_line[: self.start] + self.text + source_line[self.end :]


# ---------------------------------------------------------------- what there is to break


@lru_cache(maxsize=64)
def functions(source: str) -> tuple[tuple[Function, ast.FunctionDef], ...]:
    """Functions of a suitable length, outermost ones only: a nested one belongs to the one around it."""
    found = []
    for prefix, node in _defined(ast.parse(source), ""):
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if body and (body[-1].end_lineno or 0) - body[0].lineno + 1 in BODY_LINES:
            reads = (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
            function = Function(
                name=node.name,
                qualified=prefix + node.name,
                first=min([node.lineno, *(d.lineno for d in node.decorator_list)]),
                start=body[0].lineno,
                end=body[-1].end_lineno or 0,
                names=tuple(dict.fromkeys(reads)),
            )
            found.append((function, node))
    return tuple(found)


def _defined(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in node.body:
        if isinstance(child, ast.FunctionDef):
            yield prefix, child
        elif isinstance(child, ast.ClassDef):
            yield from _defined(child, f"{prefix}{child.name}.")


# ---------------------------------------------------------------- misspelt names


def misspelt(word: str, rng: random.Random) -> str:
    """One slip of the fingers: two letters swapped, one dropped, or one doubled. The first letter stays."""
    at = rng.randrange(1, len(word)) if len(word) > 1 else 0
    if len(word) > 2 and rng.random() < 0.4:
        at = rng.randrange(1, len(word) - 1)
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if len(word) > 3 and rng.random() < 0.5:
        return word[:at] + word[at + 1 :]
    return word[: at + 1] + word[at] + word[at + 1 :]


def name_changes(node: ast.FunctionDef, lines: list[str], rng: random.Random) -> list[Change]:
    """A misspelling of each name that is read and of each attribute."""
    taken = {*dir(builtins), *keyword.kwlist, *re.findall(r"\w+", "\n".join(lines))}
    changes = []
    for inner in _body_nodes(node):
        word, start = "", 0
        if not isinstance(inner, ast.expr):
            continue
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
            word, start = inner.id, inner.col_offset
        elif isinstance(inner, ast.Attribute) and inner.end_lineno == inner.value.end_lineno:
            word, start = inner.attr, (inner.end_col_offset or 0) - len(inner.attr)
        if len(word) < 2:
            continue
        wrong = misspelt(word, rng)
        if wrong != word and wrong not in taken:
            line = inner.end_lineno or 0
            changes.append(Change("name", line, start, start + len(word), wrong))
    return changes


# ---------------------------------------------------------------- errors that point at their line


ATTRIBUTES = {
    "append": "add", "add": "append", "items": "pairs", "keys": "names", "values": "entries", "extend": "append_all",
    "update": "merge", "pop": "take", "neighbors": "nodes_near", "remove": "delete", "popleft": "pop_left",
}  # fmt: skip


def pointed_changes(node: ast.FunctionDef, lines: list[str], rng: random.Random) -> list[Change]:
    """A dropped or doubled argument, None for a value, a wrong attribute, a wrong constant key, a missing call."""
    changes: list[Change] = []
    for inner in _body_nodes(node):
        changes += _pointed(inner, lines)
    rng.shuffle(changes)
    return changes


def _pointed(inner: ast.AST, lines: list[str]) -> Iterator[Change]:
    if isinstance(inner, ast.Call) and inner.lineno == inner.end_lineno:
        line, arguments = inner.lineno, inner.args
        if len(arguments) > 1 and not inner.keywords:
            yield Change("arity", line, arguments[-2].end_col_offset or 0, arguments[-1].end_col_offset or 0, "")
            yield Change("arity", line, arguments[0].col_offset, arguments[1].col_offset, "")
        if len(arguments) == 1 and not inner.keywords:
            yield Change("arity", line, arguments[0].col_offset, arguments[0].end_col_offset or 0, "")
        for argument in arguments:
            if isinstance(argument, ast.Name):
                yield Change("none", line, argument.col_offset, argument.end_col_offset or 0, "None")
        if not arguments and not inner.keywords:
            yield Change("call", line, inner.func.end_col_offset or 0, inner.end_col_offset or 0, "")
    elif isinstance(inner, ast.Attribute) and inner.attr in ATTRIBUTES and inner.end_lineno == inner.value.end_lineno:
        end = inner.end_col_offset or 0
        yield Change("attribute", inner.end_lineno or 0, end - len(inner.attr), end, ATTRIBUTES[inner.attr])
    elif isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Constant):
        key = inner.slice
        wrong = repr(key.value + 9) if type(key.value) is int else repr(f"{key.value!s}s")
        yield Change("key", key.lineno, key.col_offset, key.end_col_offset or 0, wrong)
    elif isinstance(inner, ast.For | ast.comprehension) and isinstance(inner.iter, ast.Name):
        yield Change("none", inner.iter.lineno, inner.iter.col_offset, inner.iter.end_col_offset or 0, "None")


# ---------------------------------------------------------------- wrong, and silent about it


FLIPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"), ast.Mod: ("%", "//"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
}  # fmt: skip
WORDS = {"True": "False", "False": "True", "min": "max", "max": "min", "any": "all", "all": "any"}


def silent_changes(node: ast.FunctionDef, lines: list[str], rng: random.Random) -> list[Change]:
    """Flipped operators and conditions, off by one, swapped arguments and branches."""
    changes: list[Change] = []
    for inner in _body_nodes(node):
        changes += _flipped(inner, lines)
        changes += _swapped(inner, lines)
    rng.shuffle(changes)
    return changes


def _flipped(inner: ast.AST, lines: list[str]) -> Iterator[Change]:
    if isinstance(inner, ast.Compare):
        sides = [inner.left, *inner.comparators]
        for operator, left, right in zip(inner.ops, sides, sides[1:], strict=False):
            yield from _between("operator", operator, left, right, lines)
    elif isinstance(inner, ast.BinOp):
        yield from _between("operator", inner.op, inner.left, inner.right, lines)
    elif isinstance(inner, ast.BoolOp):
        yield from _between("operator", inner.op, inner.values[0], inner.values[1], lines)
    elif isinstance(inner, ast.If | ast.While | ast.IfExp) and not isinstance(inner.test, ast.BoolOp | ast.Compare):
        test = inner.test
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield Change("negated", test.lineno, test.col_offset, test.operand.col_offset, "")
        else:
            yield Change("negated", test.lineno, test.col_offset, test.col_offset, "not ")
    elif isinstance(inner, ast.Constant) and type(inner.value) is int and 0 <= inner.value < 100:
        yield Change("off-by-one", inner.lineno, inner.col_offset, inner.end_col_offset or 0, str(inner.value + 1))
    elif isinstance(inner, ast.Constant) and type(inner.value) is bool:
        yield Change("constant", inner.lineno, inner.col_offset, inner.end_col_offset or 0, WORDS[str(inner.value)])
    elif isinstance(inner, ast.Name) and inner.id in WORDS:
        yield Change("function", inner.lineno, inner.col_offset, inner.end_col_offset or 0, WORDS[inner.id])


def _swapped(inner: ast.AST, lines: list[str]) -> Iterator[Change]:
    pair: tuple[ast.expr, ast.expr] | None = None
    if isinstance(inner, ast.IfExp):
        pair = inner.body, inner.orelse
    elif isinstance(inner, ast.Call) and len(inner.args) == 2:
        pair = inner.args[0], inner.args[1]
    elif isinstance(inner, ast.Tuple) and len(inner.elts) == 2 and isinstance(inner.ctx, ast.Load):
        pair = inner.elts[0], inner.elts[1]
    if pair and len({pair[0].lineno, pair[0].end_lineno, pair[1].lineno, pair[1].end_lineno}) == 1:
        text, (a, b) = lines[pair[0].lineno - 1], pair
        a_end, b_end = a.end_col_offset or 0, b.end_col_offset or 0
        swapped = text[b.col_offset : b_end] + text[a_end : b.col_offset] + text[a.col_offset : a_end]
        if swapped != text[a.col_offset : b_end]:
            yield Change("swapped", a.lineno, a.col_offset, b_end, swapped)


def _between(kind: str, operator: ast.AST, left: ast.expr, right: ast.expr, lines: list[str]) -> Iterator[Change]:
    old, new = FLIPS.get(type(operator), ("", ""))
    if old and left.end_lineno == right.lineno:
        start, text = left.end_col_offset or 0, lines[right.lineno - 1]
        at = text.find(old, start, right.col_offset)
        if at >= 0:
            yield Change(kind, right.lineno, at, at + len(old), new)


def _body_nodes(node: ast.FunctionDef) -> Iterator[ast.AST]:
    """Every node of the body but the docstring's; the signature's annotations, defaults and decorators are outside."""
    for statement in node.body[1:] if ast.get_docstring(node) is not None else node.body:
        yield from ast.walk(statement)


MAKERS: dict[str, Callable[[ast.FunctionDef, list[str], random.Random], list[Change]]] = {
    "L1": name_changes,
    "L2": pointed_changes,
    "L3": silent_changes,
}


# ---------------------------------------------------------------- the way back


def undoing(change: Change, source_line: str) -> tuple[str, str]:
    """(old, new) for `replace` on the broken line: `old` is there once, whole words, and `new` gives the source line.

    Grows the stretch word by word until it is unique.
    """
    broken = change.apply(source_line)
    start, end = change.start, change.start + len(change.text)
    while True:
        start, end = _word_start(broken, start), _word_end(broken, end)
        old = broken[start:end]
        if old.strip() and broken.find(old) == broken.rfind(old):
            return old, source_line[start : len(source_line) - (len(broken) - end)]
        if start == 0 and end == len(broken):
            return old, source_line
        start, end = max(0, start - 1), min(len(broken), end + 1)


def _word_start(text: str, at: int) -> int:
    while 0 < at < len(text) and _in_word(text[at]) and _in_word(text[at - 1]):
        at -= 1
    return at


def _word_end(text: str, at: int) -> int:
    while 0 < at < len(text) and _in_word(text[at]) and _in_word(text[at - 1]):
        at += 1
    return at


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "_"
