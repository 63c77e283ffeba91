"""check: environment → tasks, each admitted only if its verifier can be trusted on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from treadle.env.repair.survey import SHARES
from treadle.env.repair.tasks import PoolSize, build_pool, probes
from treadle.errors import ConfigError, DataError
from treadle.models import cache_folder
from treadle.types import Split, Task
from treadle.workspace import Workspace

LEVELS = ("L1", "L2", "L3")
SPARE = 1.15  # a pool is made somewhat larger than asked for, since a split's share of it varies


async def check(ws: Workspace) -> dict[str, Any]:
    """Make and admit the pool of tasks (kept for other workspaces too), and store this workspace's share of it.

    A candidate is admitted when its fix passes, its broken state fails, and both do so thrice. Returns counts of what
    was stored, what the store holds of earlier checks (also used), what stays in the pool, what was rejected and why.
    """
    settings = ws.config.tasks
    size = _size(ws)
    with ws.progress("check: making tasks", size.total) as advance:
        pool = await build_pool(ws.environment.bench, cache_folder() / "repair-pool.jsonl", size, advance=advance)
    tasks = [task for task in pool.tasks if _sayable(ws, task)]
    rejected = pool.rejected | {"the right answer is longer than a reply may be": len(pool.tasks) - len(tasks)}
    held_out = _share(ws, [task for task in tasks if task.split is Split.HELD_OUT], settings.held_out)
    train = _share(ws, [task for task in tasks if task.split is Split.TRAIN], settings.train)
    for split, made, wanted in (("training", train, settings.train), ("held-out", held_out, settings.held_out)):
        if not made:
            reasons = ", ".join(f"{n} {why}" for why, n in rejected.items() if n) or "no candidate was found"
            raise DataError(f"check: no {split} task of the {wanted} asked for was admitted ({reasons})")
    chosen = [*held_out, *train]
    ws.store.add_tasks(chosen)
    earlier = len(ws.store.tasks()) - len(chosen)
    stored = Counter(f"{task.split}/{task.labels['level']}" for task in chosen)
    spare = len(tasks) - len(chosen)  # of other splits, or more than was asked for
    return {"stored": dict(stored), "of_earlier_checks": earlier, "spare": spare, "rejected": rejected}


def _size(ws: Workspace) -> PoolSize:
    """Of the pool that gives both splits what they ask for."""
    settings = ws.config.tasks
    packages = [source.package for source in ws.environment.bench.sources.values()]
    whole = sum(package.share for package in packages)
    apart = sum(package.share for package in packages if package.held_out) / whole
    if apart == 1:
        raise ConfigError(f"every package of tasks.packages is held out ({', '.join(settings.packages)}): add another")
    train = (1 - apart) * SHARES["train"]
    held_out = apart + (1 - apart) * (1 - sum(SHARES.values()))
    total = SPARE * max(settings.train / train, settings.held_out / held_out)
    solvable = (1 - settings.boundary) * total
    L1, L2, L3 = (round(solvable * share) for share in settings.levels)
    return PoolSize(L1=L1, L2=L2, L3=L3, boundary=round(settings.boundary * total))


def _sayable(ws: Workspace, task: Task) -> bool:
    """Whether each reply of the right answer is within the contract's limit, in this model's tokens."""
    gold = next(probe for probe in probes(task) if probe.name == "gold")
    longest = max(sum(ws.renderer.reply(reply)[1]) for reply in gold.replies)
    return longest <= ws.contract.budget.reply_tokens


def _share(ws: Workspace, tasks: Sequence[Task], count: int) -> list[Task]:
    """`count` tasks in the proportions asked for; where a kind runs short there are fewer, and the counts show it."""
    settings = ws.config.tasks
    wanted = {level: (1 - settings.boundary) * share for level, share in zip(LEVELS, settings.levels, strict=True)}
    wanted["boundary"] = settings.boundary
    rng = np.random.default_rng([ws.config.seed, count])
    chosen: list[Task] = []
    for family, share in wanted.items():
        some = [task for task in tasks if task.labels["level"] == family]
        chosen += [some[i] for i in rng.permutation(len(some))[: round(share * count)]]
    return chosen
