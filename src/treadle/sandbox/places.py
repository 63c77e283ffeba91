"""Folders that a sandbox's user can reach: templates, virtual environments, and the sweep of what a crash left.

A sandbox never runs as uid 0. Started by root, it runs as a high uid that follows from its template's name, so
sandboxes of different templates are strangers to each other even outside their namespaces; started by a user, as that
user.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from treadle.errors import SandboxUnavailable, UserError

CACHE_VARIABLE = "TREADLE_SANDBOX_CACHE"
UID_COUNT = 60_000
FIRST_UIDS = (1_900_000_001, 1_001)  # above all that systems hand out; in a container, what it maps is its own
COVERED = ("/tmp", "/dev", "/proc")  # by what a sandbox mounts
SYSTEM_PYTHON = Path("/usr/bin/python3")


# ---------------------------------------------------------------- the shared folder


def shared_folder(cache: Path | None = None) -> Path:
    """`cache`, or $TREADLE_SANDBOX_CACHE, or /var/tmp/treadle-<uid>: ours alone to write, for all to pass through."""
    default = Path(os.environ.get(CACHE_VARIABLE, "") or f"/var/tmp/treadle-{os.getuid()}")
    folder = Path(os.path.abspath(cache or default))  # noqa: PTH100 - a link is judged below, not resolved
    if covered := next((place for place in COVERED if folder.is_relative_to(place)), None):
        raise UserError(f"sandboxes have their own {covered}: {folder} can't be seen there: set {CACHE_VARIABLE}")
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise UserError(f"{folder} is a link or not ours: remove it, or set {CACHE_VARIABLE} to another folder")
    for place in (folder, folder / "templates", folder / "venvs", folder / "root"):
        place.mkdir(exist_ok=True)
        place.chmod(0o755)
    if not reachable(folder):
        raise UserError(f"{folder} lies below a private folder: set {CACHE_VARIABLE} to one that other users can enter")
    return folder


def reachable(path: Path) -> bool:
    """Whether a sandbox's user can get at `path`. Anyone but root keeps their own uid, so can."""
    steps = [path.resolve(), *path.resolve().parents]
    return os.getuid() != 0 or all(step.stat().st_mode & 0o001 for step in steps)


def reachable_python() -> Path:
    """The interpreter of this process if the sandbox's user can run it, else the system's."""
    for candidate in (Path(sys.executable).resolve(), SYSTEM_PYTHON):
        if candidate.exists() and reachable(candidate):
            return candidate
    raise SandboxUnavailable(
        f"no Python that a sandbox's user can run: install {SYSTEM_PYTHON} (apt-get install python3)"
    )


# ---------------------------------------------------------------- templates


def prepare_template(source: Path, name: str) -> Path:
    """A copy of the folder `source` that a sandbox can start from, made once for the same content and name.

    UserError when `source` isn't a folder of plain files, folders and links, or `name` isn't a plain word.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,80}", name):
        raise UserError(f"template name {name!r}: use letters, digits, '.', '_', '+' and '-'")
    if not source.is_dir():
        raise UserError(f"template {source}: not a folder")
    digest = _content_key(source)
    home = shared_folder() / "templates"
    target = home / f"{name}-{digest[:24]}"
    if target.exists():
        return target
    draft = Path(tempfile.mkdtemp(prefix=f"draft-{owner_label()}-", dir=home))
    try:
        shutil.copytree(source, draft / "copy", symlinks=True)
        _give(draft / "copy", template_uid(name))
        (draft / "copy").rename(target)
    except OSError:
        if not target.exists():  # else another process was first, with the same content
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def template_uid(name: str) -> int:
    """The uid that sandboxes of the template called `name` run as."""
    if os.getuid() != 0:
        return os.getuid()
    for first in FIRST_UIDS:
        if _is_mapped(first + UID_COUNT):
            return first + int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % UID_COUNT
    raise SandboxUnavailable(
        "no sandbox on this machine: root here has no other uid to run one as; start as a plain user"
    )


def _is_mapped(uid: int) -> bool:
    rows = [[int(part) for part in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(start <= uid < start + count for start, _, count in rows)


def _content_key(source: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(source.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            body = os.fsencode(path.readlink())
        elif stat.S_ISREG(mode):
            body = path.read_bytes()
        elif stat.S_ISDIR(mode):
            body = b""
        else:
            raise UserError(f"template {source}: {path.relative_to(source)} is a device, pipe or socket; remove it")
        head = f"{path.relative_to(source)}\0{mode:o}\0{len(body)}\0"
        digest.update(head.encode(errors="surrogateescape") + body)
    return digest.hexdigest()


def _give(root: Path, uid: int) -> None:
    """Only that uid may enter: one template's sandboxes have no business in another's."""
    for path in (root, *root.rglob("*")):
        os.chown(path, uid, uid if os.getuid() == 0 else -1, follow_symlinks=False)
    root.chmod(0o700)


# ---------------------------------------------------------------- virtual environments


def sandbox_venv(requirements: Sequence[str], cache: Path | None = None) -> Path:
    """A virtual environment with pytest and `requirements`, built once per set; returns its folder.

    UserError, with pip's last words, when they can't be installed.
    """
    python = reachable_python()
    wanted = sorted({*requirements, "pytest"})
    key = hashlib.sha256("\0".join([str(python), _version(python), *wanted]).encode()).hexdigest()[:16]
    home = shared_folder(cache) / "venvs"
    venv, done = home / key, home / f"{key}.done"
    with locked(home / f"{key}.lock"):  # built in place, for a venv can't be moved; `done` tells whole from half
        if not done.exists():
            shutil.rmtree(venv, ignore_errors=True)
            _run([str(python), "-m", "venv", "--without-pip", str(venv)], "make a virtual environment")
            pip = [*pip_command(), "--python", str(venv / "bin/python"), "install", "--quiet", "--no-input", *wanted]
            _run(pip, f"install {' '.join(wanted)}")
            done.write_text("\n".join(wanted) + "\n")
    return venv


def _version(python: Path) -> str:
    return subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout.strip()


def pip_command() -> list[str]:
    """How to call pip from here; raises UserError where there is none."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    if not found:
        raise UserError(
            "no pip to build the sandbox's packages with: run `python -m ensurepip` or apt-get install python3-pip"
        )
    return [found]


def _run(command: list[str], purpose: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, umask=0o022, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit {done.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise UserError(f"can't {purpose} for the sandbox: {errors[-1][:300]} (check the names and the package index)")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; the file is made where there is none."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------- leftovers


def owner_label() -> str:
    """`<pid>.<start time>`: names a process even after its number has been given to another."""
    return f"{os.getpid()}.{_start_time(os.getpid())}"


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return "gone"


def sweep() -> int:
    """Remove the drafts of processes that died while making them; returns how many. Sandboxes leave nothing else."""
    drafts = list((shared_folder() / "templates").glob("draft-*"))
    dead = [draft for draft in drafts if not _lives(draft.name.split("-")[1])]
    for draft in dead:
        shutil.rmtree(draft, ignore_errors=True)
    return len(dead)


def _lives(label: str) -> bool:
    pid, start = label.split(".")
    return _start_time(int(pid)) == start
