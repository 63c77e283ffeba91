"""The house holds its own rules: which way imports point, what loads torch, sizes, words, true documents."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

import treadle

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "treadle"
FILES = sorted(SOURCE.rglob("*.py"))

# each floor may import from its own and from those above it in this list, never from a later one
FLOORS = (
    ("types",),
    ("errors", "config", "store", "tables"),
    ("credit", "losses", "batch", "prefix", "attention", "render", "models"),
    ("engine", "learner", "prune", "sandbox", "env", "feedback", "rollout", "pool", "curriculum", "metrics"),
    ("training", "report", "workspace", "serve", "show"),
    ("stages",),
    ("cli",),
)
FLOOR_OF = {name: i for i, names in enumerate(FLOORS) for name in names}
HEAVY = {"torch", "transformers", "safetensors", "gguf", "matplotlib", "sklearn", "scipy"}
NEEDS_TORCH = ("learner", "prune", "losses", "attention", "training", "engine.slots", "engine.llama", "stages.")


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imports(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports anywhere, without the package's name."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from (name.removeprefix("treadle.") for name in names if name.startswith("treadle."))
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.removeprefix("treadle.") for alias in node.names if alias.name.startswith("treadle.")
            )


GRAPH = {module: {name for name in imports(path) if name in MODULES} for module, path in MODULES.items()}

# ---------------------------------------------------------------- imports


def test_every_module_has_a_floor() -> None:
    assert {module.partition(".")[0] for module in MODULES} - {""} <= set(FLOOR_OF)


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, names in GRAPH.items()
        for name in names
        if module and name and FLOOR_OF[name.partition(".")[0]] > FLOOR_OF[module.partition(".")[0]]
    ]
    assert not wrong


def test_imports_make_no_circle() -> None:
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    list(TopologicalSorter({m: names - packages for m, names in GRAPH.items()}).static_order())


def test_stages_do_not_import_each_other() -> None:
    stages = {module for module in MODULES if module.startswith("stages.")}
    assert {m: GRAPH[m] & stages for m in stages - {"stages.turn"} if GRAPH[m] & stages} == {}


# ---------------------------------------------------------------- torch


def heavy_after(code: str) -> str:
    """Which heavy packages a fresh interpreter holds after running `code`."""
    report = f"\nimport sys; print('heavy:', sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


HELP = """
import sys
from treadle.cli import main
sys.argv = ["treadle", "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code
"""


@pytest.mark.parametrize("code", ["import treadle", HELP])
def test_import_and_help_load_nothing_heavy(code: str) -> None:
    assert heavy_after(code) == "heavy: []"


def test_light_modules_load_nothing_heavy() -> None:
    light = [module for module in MODULES if module and not module.startswith(NEEDS_TORCH)]
    assert {"types", "store", "rollout", "credit", "serve.app", "cli"} <= set(light)
    assert heavy_after("\n".join(f"import treadle.{module}" for module in light)) == "heavy: []"


# ---------------------------------------------------------------- size and words


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.count("\n") <= 400, "look for the second idea hiding in it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name


def texts() -> Iterator[Path]:
    """What people wrote: everything but what is built, fetched or measured."""
    kinds = ("*.py", "*.md", "*.toml", "*.txt", "Makefile", "run")
    folders = (ROOT / name for name in ("src", "tests", "docs", "examples", "bench", ".ci"))
    inside = chain.from_iterable(folder.rglob(kind) for folder in folders for kind in kinds)
    return chain(inside, *(ROOT.glob(kind) for kind in kinds))


def test_no_unfinished_work_and_no_place_names() -> None:
    """The project speaks of itself alone: no marks of unfinished work, no folder of one machine, no package index."""
    marks = [
        "TO" + "DO",
        "FIX" + "ME",
        "X" * 3,
        "Not" + "Implemented",
        "index" + "-url",
        "find" + "-links",
        "py" + "pi.org",
    ]
    words = re.compile("|".join(rf"\b{mark}\b" for mark in marks))
    for path in texts():
        found = words.search(path.read_text("utf-8")) or re.search(re.escape(f"{ROOT}/"), path.read_text("utf-8"))
        assert not found, f"{path}: {found.group()}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_wide_except_and_no_attribute_by_string(path: Path) -> None:
    """Whatever catches everything raises it again, or says on its line why not."""
    text = path.read_text("utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("getattr", "setattr", "hasattr"), f"line {node.lineno}"
        if isinstance(node, ast.ExceptHandler):
            wide = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            assert not wide or again or "#" in lines[node.lineno - 1], f"line {node.lineno}"


# ---------------------------------------------------------------- documents


def project() -> dict[str, object]:
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return table


def test_one_version() -> None:
    assert project().get("version", treadle.__version__) == treadle.__version__
    assert f"## [{treadle.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_constraints_pin_what_is_required() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = chain.from_iterable(table["project"]["optional-dependencies"].values())
    required = [*table["project"]["dependencies"], *extras, *table["dependency-groups"]["dev"]]
    names = {re.split(r"[^A-Za-z0-9_.-]", requirement)[0] for requirement in required}
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()}
    assert {normal(name) for name in names} <= {normal(name) for name in pinned}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_tree_in_agents_is_the_tree() -> None:
    """AGENTS.md names every source file, and no other."""
    listed = set(re.findall(r"^([\w/]+\.py) ", (ROOT / "AGENTS.md").read_text("utf-8"), re.MULTILINE))
    there = {str(path.relative_to(SOURCE)) for path in FILES if path.read_text("utf-8").strip()}
    assert (sorted(there - listed), sorted(listed - there)) == ([], []), "(not listed, not there)"


def test_invariants_name_tests_that_exist() -> None:
    tests = "\n".join(path.read_text("utf-8") for path in ROOT.glob("tests/test_*.py"))
    named = re.findall(r"`(test_\w+)\.py::(test_\w+)`", (ROOT / "INVARIANTS.md").read_text("utf-8"))
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in tests]
    assert named and not missing
