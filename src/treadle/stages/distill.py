"""distill: teacher, tasks → a student of fewer layers that shares the tokenizer.

The student starts from the layers that its teacher would miss most. It imitates demonstrations and what the teacher
solved, mistakes left out; then it is corrected on its own runs, where only the teacher can say what would have been
better (on-policy reverse KL).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.batch import Example, pack, unfit
from treadle.credit import decisions
from treadle.engine.base import Engine
from treadle.errors import DataError
from treadle.learner import Learner
from treadle.losses import cross_entropy, reverse_kl
from treadle.prune import needed_layers, prune_layers
from treadle.report import Run
from treadle.rollout import Job, rollout_seed
from treadle.training import Steps, demonstrations, fit, imitation
from treadle.types import Checkpoint, Source, Task, Trajectory, is_solved
from treadle.workspace import Workspace


async def distill(ws: Workspace, teacher: Checkpoint, run: Run) -> Checkpoint:
    """Resumes after imitation, or the last finished step. Raises DataError when the teacher solved nothing."""
    tasks = _mixed(ws)
    guide = ws.learner(teacher)
    runs = await _teacher_runs(ws, teacher, tasks)
    shown, foreign = demonstrations(ws.store.training_trajectories("sft"), ws.renderer, ws.contract)
    if foreign:
        ws.console.print(f"distill: {foreign} trajectories are of another contract: left out")
    examples = [imitation(t) for t in [*runs, *_solved_before(ws, teacher), *shown]]
    data = [example.trajectory.id for example in examples]
    start = ws.made("distill-start", teacher, data)
    if start is None:
        imitator = _imitate(ws, teacher, _needed(ws, guide, runs, run), examples, run)
        start = ws.save(imitator, "distill-start", teacher, data)
    steps = Steps(ws.path / "checkpoints", f"distill-{ws.stage_key('distill', start)}-")
    if (made := ws.made("distill", start, data)) is not None:
        steps.forget()
        return made
    student = ws.learner(start)
    done = steps.resume(student)
    engine = await ws.engine(start)
    for step in range(done, ws.config.distill.steps):
        await engine.load_weights(student.state(), start.updates + student.updates)
        await _correct(ws, engine, start, student, guide, tasks, step, run)
        steps.save(student, step + 1)
    checkpoint = ws.save(student, "distill", start, data)
    await engine.load_weights(student.state(), checkpoint.updates)
    ws.now_holds(checkpoint)
    steps.forget()
    return checkpoint


def _imitate(
    ws: Workspace, teacher: Checkpoint, layers: Sequence[int], examples: Sequence[Example], run: Run
) -> Learner:
    """A student of these layers of the teacher, trained on the examples."""
    settings = ws.config.distill
    folder = prune_layers(teacher.path, layers, ws.path / "checkpoints" / "student-start")
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
    return student


def _needed(ws: Workspace, guide: Learner, runs: Sequence[Trajectory], run: Run) -> list[int]:
    """The teacher's layers that make the student, by what they do for some of its runs, of middling length."""
    count, probes = ws.config.distill.layers, ws.config.distill.probes
    rows = [row for t in runs if unfit(row := imitation(t), limit=ws.config.pack_tokens) is None]
    order = sorted(rows, key=lambda row: len(row.trajectory.tokens()))
    middling = order[max(0, len(order) - probes) // 2 :][:probes]
    packs, _ = pack(middling, probes * ws.config.pack_tokens)
    with ws.progress("distill: layers left out", len(guide.model.base_model.layers) - count) as advance:
        kept = needed_layers(guide, packs[0], count, advance)
    run.log("distill-layers", kept=kept)
    return kept


def _mixed(ws: Workspace) -> list[Task]:
    tasks = ws.training_tasks()
    order = np.random.default_rng([ws.config.seed, 3]).permutation(len(tasks))
    return [tasks[i] for i in order]


async def _teacher_runs(ws: Workspace, teacher: Checkpoint, tasks: list[Task]) -> list[Trajectory]:
    settings = ws.config.distill
    places = [(task, member) for task in tasks[: settings.tasks] for member in range(settings.samples)]
    jobs = _jobs(f"distill-{teacher.id}-{ws.conditions()}", places, ws.config.seed)
    engine = await ws.engine(teacher)
    played = await ws.play(engine, teacher.id, jobs, 1.0, "distill: teacher runs")
    solved = [t for t in played if is_solved(t.outcome.reward)]
    if not solved:
        raise DataError(
            f"distill: the teacher solved none of {len(jobs)} runs: train it longer, or raise distill.tasks"
        )
    return ws.store.admit_training(solved)


def _solved_before(ws: Workspace, teacher: Checkpoint) -> list[Trajectory]:
    """What the policies solved that became the teacher, step by step: they are there already."""
    rollouts = ws.store.trajectories(source=Source.ROLLOUT)
    made = [t for t in rollouts if (t.group or "").startswith(f"{teacher.id}-") and is_solved(t.outcome.reward)]
    return ws.store.admit_training(sorted(made, key=lambda t: t.id))  # stored as they finished: no order to rely on


def _jobs(prefix: str, places: Sequence[tuple[Task, int]], seed: int) -> list[Job]:
    """One for each task and number of its try."""
    return [
        Job(
            id=f"{prefix}-{task.id}-{member}",
            task=task,
            seed=rollout_seed(seed, "distill", task.id, member),
            group=task.id,
        )
        for task, member in places
    ]


async def _correct(
    ws: Workspace,
    engine: Engine,
    start: Checkpoint,
    student: Learner,
    guide: Learner,
    tasks: list[Task],
    step: int,
    run: Run,
) -> None:
    """The student plays the next tasks, and its teacher says of every token what it would have said instead."""
    settings = ws.config.distill
    first = settings.tasks + step * settings.step_rows  # those that the teacher was not shown on come first
    places = [(tasks[i % len(tasks)], i // len(tasks)) for i in range(first, first + settings.step_rows)]
    jobs = _jobs(f"distill-{start.id}-{step}", places, ws.config.seed)
    title = f"distill {step + 1}/{settings.steps}"
    played = await ws.play(engine, f"{start.id}+{student.updates}", jobs, 1.0, title)
    examples = [Example(t, dict.fromkeys(decisions(t), 1.0)) for t in played if decisions(t)]
    with ws.progress(f"{title}: corrected", len(examples)) as advance:
        fit(
            student,
            examples,
            reverse_kl(),
            rows=settings.rows,
            epochs=1,
            learning_rate=settings.learning_rate / 4,  # it imitates well by now
            pack_tokens=ws.config.pack_tokens,
            seed=ws.config.seed + step,
            advance=advance,
            log=lambda metrics: run.log("distill-on-policy", **metrics),
            teacher=guide,
        )
    reward = [t.outcome.reward for t in played if t.outcome.reward is not None]
    mean = sum(reward) / len(reward) if reward else None
    run.log("distill-step", step=step, reward=mean, graded=len(reward), silent=len(played) - len(examples))
