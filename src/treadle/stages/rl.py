"""rl: tasks + checkpoint → trajectories + checkpoint.

GRPO on groups at the edge of ability: advantage of a reply = group-normalised outcome + a share of the centred step
signal (invalid and repeated calls). The sampler's own log-probs are the behaviour policy; the gap between sampler and
trainer is corrected by a truncated importance ratio, and with several updates a step the clip bounds each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.batch import Example, divisor, pack
from treadle.credit import decisions, group_advantages, has_spread, step_advantages
from treadle.curriculum import Curriculum
from treadle.engine.base import Engine
from treadle.errors import DataError
from treadle.feedback.process import behaviour, step_signals
from treadle.learner import Learner
from treadle.losses import Loss, policy_loss
from treadle.report import Run
from treadle.training import Steps, cuts, joined
from treadle.types import Checkpoint, Task, Trajectory, fingerprint
from treadle.workspace import Workspace

Group = list[Trajectory]
TOLD = ("reward", "invalid_calls", "repeats")  # after each step


async def rl(ws: Workspace, parent: Checkpoint, run: Run) -> Checkpoint:
    """Resumes after the last finished step. Says which steps had nothing to learn from; DataError when all had."""
    settings = ws.config.rl
    tasks = ws.training_tasks()
    data = [fingerprint([task.id for task in tasks])]
    name = ws.checkpoint_id("rl", parent, data)
    steps = Steps(ws.path / "checkpoints", f"{name}-")
    if (made := ws.made("rl", parent, data)) is not None:
        steps.forget()
        return made
    learner = ws.learner(parent, settings.trained_layers)
    done = steps.resume(learner)
    curriculum = Curriculum(tasks)
    _recall(ws, curriculum, parent, [_step(name, step) for step in range(done)])
    engine = await ws.engine(parent)
    loss = policy_loss(clip_low=settings.clip_low, clip_high=settings.clip_high, tis=settings.truncate)
    for step in range(done, settings.steps):
        await engine.load_weights(learner.state(), parent.updates + learner.updates)
        groups = await _sample(ws, engine, f"{parent.id}+{learner.updates}", _step(name, step), curriculum, step)
        ws.store.admit_training(t for group in groups for t in group)
        examples, facts = credit(groups, settings.signal_weight)
        if not examples:
            of = "none is graded" if facts["reward"] is None else f"mean reward {facts['reward']:.2f}"
            ws.console.print(f"rl: no group of step {step + 1} tells its rollouts apart ({of}): nothing is learnt")
            run.log("rl", checkpoint=name, step=step, **facts)
            continue
        metrics = _improve(ws, learner, examples, loss)
        # Told before it is saved: a kill in between tells the step twice, and never loses it.
        run.log("rl", checkpoint=name, step=step, **facts, **metrics)
        told = [f"{fact} {value:.2f}" for fact in TOLD if (value := facts[fact]) is not None]
        ws.console.print(f"rl {step + 1}: " + ", ".join(told))
        steps.save(learner, step + 1)
    if learner.updates == 0:
        raise DataError(
            f"rl: no group of {settings.steps} steps told its rollouts apart, so nothing was learnt: raise rl.group "
            "or rl.refills, train longer before RL, or give harder tasks where all were solved"
        )
    checkpoint = ws.save(learner, "rl", parent, data)
    await engine.load_weights(learner.state(), checkpoint.updates)
    ws.now_holds(checkpoint)
    steps.forget()
    return checkpoint


def _improve(ws: Workspace, learner: Learner, examples: list[Example], loss: Loss) -> dict[str, float]:
    """One update a minibatch; the old policy is the one before the first of them. Counts are sums, the rest the last's.

    A group's rows stay together, so that what they share is still computed once. The first minibatch needs no
    log-probs of the old policy from beforehand: it is trained on with the old weights themselves.
    """
    settings = ws.config.rl
    groups: dict[str | None, list[Example]] = {}
    for example in examples:
        groups.setdefault(example.trajectory.group, []).append(example)
    rows = list(groups.values())
    order = np.random.default_rng([ws.config.seed, learner.updates]).permutation(len(rows))
    parts = np.array_split(order, min(settings.minibatches, len(rows)))
    plan = [pack([row for i in sorted(part) for row in rows[i]], ws.config.pack_tokens) for part in parts]
    for packs, _ in plan:
        for each in packs:
            each.require_behaviour()
    for packs, _ in plan[1:]:
        for each, logp_N in zip(packs, learner.log_probs(packs), strict=True):
            each.old_logp_N = logp_N
    told: list[dict[str, float]] = []
    for packs, report in plan:
        told.append(learner.forward_backward(packs, loss, divisor(packs)) | cuts(report))
        told.append(learner.step(settings.learning_rate))
    return joined(told)


async def _sample(
    ws: Workspace, engine: Engine, policy: str, prefix: str, curriculum: Curriculum, step: int
) -> list[Group]:
    """A group for each chosen task; groups without spread are made up for by others, within the bound."""
    settings = ws.config.rl
    rng = np.random.default_rng([ws.config.seed, step])

    async def play(tasks: list[Task], about: str = "") -> list[Group]:
        title = f"rl {step + 1}/{settings.steps}{about}"
        return await ws.play_groups(engine, policy, tasks, settings.group, prefix, f"rl {step}", title)

    chosen = curriculum.choose(settings.tasks, rng, boundary=settings.boundary)
    groups = await play(chosen)
    flat = sum(not has_spread([t.outcome.reward for t in group]) for group in groups)
    if min(flat, settings.refills) > 0:
        taken = frozenset(task.id for task in chosen)
        more = curriculum.choose(min(flat, settings.refills), rng, exclude=taken)
        groups += await play(more, " refill")
    for group in groups:
        curriculum.observe(group[0].task_id or "", [t.outcome.reward for t in group])
    return groups


def _step(name: str, step: int) -> str:
    """How the groups of a step begin, on the way to the checkpoint of this name."""
    return f"{name}-{step:04d}-"


def _recall(ws: Workspace, curriculum: Curriculum, parent: Checkpoint, done: Sequence[str]) -> None:
    """What is already known of the tasks: the groups that shaping probed and RL practised on the way to the parent,
    oldest first, and those of the finished steps.

    Groups of a step that was broken off are left out: a resumed step must choose the tasks it had chosen.
    """
    known = [prefix for each in ws.lineage(parent) for prefix in (ws.probes(each), f"{each}-")]
    for prefix in (*known, *done):
        groups: dict[tuple[str, str], list[float | None]] = {}
        for group, task_id, reward in ws.store.group_outcomes(prefix):
            groups.setdefault((group, task_id), []).append(reward)
        for (_, task_id), rewards in sorted(groups.items()):
            curriculum.observe(task_id, rewards)


def _signals(trajectory: Trajectory) -> dict[int, float]:
    """Sum of the step signals on each decision; one without fault has 0."""
    values = dict.fromkeys(decisions(trajectory), 0.0)
    for signal in step_signals(trajectory):
        if signal.node in values and signal.value is not None:
            values[signal.node] += signal.value
    return values


def credit(groups: list[Group], signal_weight: float) -> tuple[list[Example], dict[str, float | None]]:
    """Examples of all groups that tell their rollouts apart, and the facts of the step.

    Ungraded rollouts (infrastructure) give no example and no statistic.
    """
    examples: list[Example] = []
    graded = [t for group in groups for t in group if t.outcome.reward is not None]
    flat = 0
    for group in groups:
        outcome = group_advantages([t.outcome.reward for t in group], "grpo")
        weights = step_advantages(group, outcome, [_signals(t) for t in group], signal_weight)
        flat += not any(outcome)
        if any(value for row in weights for value in row.values()):
            examples += [
                Example(trajectory=t, weights=row)
                for t, row in zip(group, weights, strict=True)
                if t.outcome.reward is not None
            ]
    behaviours = [behaviour(t) for t in graded]
    calls = sum(b.calls for b in behaviours)
    after_failure = sum(b.calls_after_failure for b in behaviours)
    return examples, {
        "reward": _share(sum(t.outcome.reward or 0.0 for t in graded), len(graded)),
        "groups": float(len(groups)),
        "flat_groups": float(flat),
        "ungraded": float(sum(map(len, groups)) - len(graded)),
        "rows": float(len(examples)),
        "invalid_calls": _share(sum(b.invalid_calls for b in behaviours), calls),
        "repeats": _share(sum(b.repeats_after_failure for b in behaviours), after_failure),
        "sampled_tokens": _share(sum(t.sampled_tokens() for t in graded), len(graded)),
    }


def _share(part: float, whole: int) -> float | None:
    """None where nothing was counted."""
    return part / whole if whole else None
