"""Which records say the same: exact copies by hash, near copies by MinHash (Broder 1997) over word triples."""

from __future__ import annotations

import msgspec
from rensa import RMinHash, RMinHashLSH

from treadle.tables import prompt_words, words
from treadle.types import Node, Task, Trajectory, fingerprint

PERMUTATIONS, BANDS, SEED = 128, 16, 1
NEAR = 0.9  # estimated Jaccard similarity from which two records are one


def shingles(words: list[str], size: int) -> set[str]:
    """Runs of `size` words; a shorter text is one run."""
    return {" ".join(words[i : i + size]) for i in range(max(1, len(words) - size + 1))} if words else set()


def task_words(task: Task) -> list[str]:
    """Prompt and scene: what makes the task this one."""
    return [*prompt_words(task.messages), *_scene_words(task.public)]


def _scene_words(value: object) -> list[str]:
    if isinstance(value, dict):
        return [word for inner in value.values() for word in _scene_words(inner)]
    if isinstance(value, list | tuple):
        return [word for inner in value for word in _scene_words(inner)]
    return words(str(value))


def trajectory_key(trajectory: Trajectory, task_id: str | None, reward: float | None) -> str:
    """Equal for trajectories of one task that say and do the same and got the same reward, whatever their ids."""
    path = trajectory.path()
    return fingerprint([task_id, reward, [_said(node) for node in path]])


def _said(node: Node) -> list[object]:
    message = node.message
    calls = [[call.name, call.arguments, call.raw if call.arguments is None else ""] for call in message.tool_calls]
    return [message.role, message.content, message.reasoning, calls]


def trajectory_words(trajectory: Trajectory) -> list[str]:
    """From the first reply on: the prompt is shared by all runs of a task."""
    path = trajectory.path()
    first = next((i for i, node in enumerate(path) if node.message.role == "assistant"), len(path))
    return [word for node in path[first:] for word in words(str(_said(node)))]


class Match(msgspec.Struct, frozen=True):
    record: str
    similarity: float


class NearDuplicates:
    """Records seen so far, by group; only records of one group are compared."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[RMinHashLSH, list[tuple[str, RMinHash]]]] = {}

    def match(self, group: str, record: str, words: list[str]) -> Match | None:
        """The most similar earlier record that is a near copy; a record without one is remembered."""
        sketch = RMinHash(PERMUTATIONS, SEED)
        sketch.update(sorted(shingles(words, 3)))
        if group not in self._groups:
            self._groups[group] = (RMinHashLSH(NEAR, PERMUTATIONS, BANDS), [])
        index, known = self._groups[group]
        near = [Match(known[i][0], float(sketch.jaccard(known[i][1]))) for i in index.query(sketch)]
        best = max(near, key=lambda match: match.similarity, default=None)
        if best is not None and best.similarity >= NEAR:
            return best
        index.insert(len(known), sketch)
        known.append((record, sketch))
        return None
