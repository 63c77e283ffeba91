"""distill: teacher, tasks → a student of fewer layers that shares the tokenizer.

First the student imitates demonstrations and what the teacher solved, mistakes left out; then it is corrected on its
own runs, where only the teacher can say what would have been better (on-policy reverse KL).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.batch import Example
from treadle.credit import decisions
from treadle.engine.base import Engine
from treadle.errors import DataError
from treadle.learner import Learner, kept_layers, prune_layers
from treadle.losses import cross_entropy, reverse_kl
from treadle.report import Run
from treadle.rollout import Job, rollout_seed
from treadle.training import cuts, demonstrations, fit, imitation, update
from treadle.types import Checkpoint, Task, Trajectory
from treadle.workspace import Workspace


async def distill(ws: Workspace, teacher: Checkpoint, run: Run) -> Checkpoint:
    """Raises DataError when the teacher solved nothing."""
    settings = ws.config.distill
    tasks = _mixed(ws)
    guide = ws.learner(teacher)
    kept = kept_layers(guide.model.config.num_hidden_layers, settings.layers)
    runs = await _teacher_runs(ws, teacher, tasks)
    shown, foreign = demonstrations(ws.store.training_trajectories("sft"), ws.renderer, ws.contract)
    if foreign:
        ws.console.print(f"distill: {foreign} trajectories call tools that {ws.contract.environment!r} lacks: left out")
    examples = [imitation(t) for t in [*runs, *shown]]
    folder = prune_layers(teacher.path, kept, ws.path / "checkpoints" / "student-start")
    student = Learner(folder, threads=ws.config.model.threads)
    with ws.progress("distill", len(examples) * settings.epochs) as advance:
        fit(
            student,
            examples,
            cross_entropy(),
            rows=settings.rows,
            epochs=settings.epochs,
            learning_rate=settings.learning_rate,
            pack_tokens=ws.config.pack_tokens,
            seed=ws.config.seed,
            advance=advance,
            log=lambda metrics: run.log("distill", **metrics),
        )
    data = [example.trajectory.id for example in examples]
    start = ws.save(student, "distill-start", teacher, data)
    engine = await ws.engine(start)
    await _on_policy(ws, engine, start, student, guide, tasks, run)
    checkpoint = ws.save(student, "distill", teacher, data)
    await engine.load_weights(student.state(), checkpoint.updates)
    ws.holds(checkpoint)
    return checkpoint


def _mixed(ws: Workspace) -> list[Task]:
    tasks = ws.training_tasks()
    order = np.random.default_rng([ws.config.seed, 3]).permutation(len(tasks))
    return [tasks[i] for i in order]


async def _teacher_runs(ws: Workspace, teacher: Checkpoint, tasks: list[Task]) -> list[Trajectory]:
    settings = ws.config.distill
    places = [(task, member) for task in tasks[: settings.tasks] for member in range(settings.samples)]
    jobs = _jobs(f"distill-{teacher.id}-{ws.config.seed}", places, ws.config.seed)
    engine = await ws.engine(teacher)
    played = await ws.play(engine, teacher.id, jobs, 1.0, "distill: teacher runs")
    solved = [t for t in played if t.outcome.reward == 1]
    if not solved:
        raise DataError(f"distill: the teacher solved none of {len(jobs)} runs, so there is nothing to learn from it")
    return ws.store.admit_training(solved)


def _jobs(prefix: str, places: Sequence[tuple[Task, int]], seed: int) -> list[Job]:
    """One for each task and number of its try."""
    return [
        Job(id=f"{prefix}-{task.id}-{member}", task=task, seed=rollout_seed(seed, 7, task.id, member), group=task.id)
        for task, member in places
    ]


async def _on_policy(
    ws: Workspace,
    engine: Engine,
    start: Checkpoint,
    student: Learner,
    guide: Learner,
    tasks: list[Task],
    run: Run,
) -> None:
    settings = ws.config.distill
    for step in range(settings.steps):
        await engine.load_weights(student.state(), start.updates + step)
        first = step * settings.step_rows
        places = [(tasks[i % len(tasks)], i // len(tasks)) for i in range(first, first + settings.step_rows)]
        jobs = _jobs(f"distill-{start.id}-{step}", places, ws.config.seed)
        title = f"distill {step + 1}/{settings.steps}"
        played = await ws.play(engine, f"{start.id}+{step}", jobs, 1.0, title)
        examples = [Example(t, dict.fromkeys(decisions(t), 1.0)) for t in played if decisions(t)]
        rate = settings.learning_rate / 4
        metrics, report = update(student, examples, reverse_kl(), rate, ws.config.pack_tokens, teacher=guide)
        reward = [t.outcome.reward for t in played if t.outcome.reward is not None]
        mean = sum(reward) / len(reward) if reward else None
        run.log("distill-on-policy", step=step, reward=mean, graded=len(reward), **metrics, **cuts(report))
