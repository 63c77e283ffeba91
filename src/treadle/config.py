"""Settings: one TOML file plus dotted overrides, read into frozen structs. Unknown keys fail with the nearest name."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from treadle.errors import ConfigError, unknown


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every section."""


class Model(Section, frozen=True):
    base: str = "smollm2"  # "smollm2", "tiny" or a Hugging Face model folder
    dtype: str = "auto"  # of sampling: bfloat16 where the processor multiplies it fast; masters are float32
    slots: int = 64  # sessions decoded at once
    context: int = 1024  # tokens a session can hold
    threads: int = 2


class Tasks(Section, frozen=True):
    packages: tuple[str, ...] = ("toolz", "networkx", "more-itertools")  # more-itertools is held out whole
    train: int = 280  # tasks to practise on
    held_out: int = 190  # tasks nobody trains on
    levels: tuple[float, float, float] = (0.7, 0.15, 0.15)  # share of each level of difficulty
    boundary: float = 0.1  # share of tasks whose right act is to ask, refuse or give up


class Collect(Section, frozen=True):
    demonstrations: int = 200
    boundary: float = 0.15  # share of demonstrations from boundary tasks


class Sft(Section, frozen=True):
    epochs: int = 1
    rows: int = 4  # trajectories an update: few rows, since a short cold start needs many updates
    learning_rate: float = 3e-4


class Shape(Section, frozen=True):
    tasks: int = 24
    group: int = 8
    epochs: int = 1
    rows: int = 16
    learning_rate: float = 1e-5
    beta: float = 0.1  # DPO
    trained_layers: int = 0  # decoder layers that are trained, from the top; 0: every weight


class Rl(Section, frozen=True):
    steps: int = 8
    tasks: int = 8  # groups a step
    group: int = 8  # rollouts of one task
    boundary: float = 0.2  # share of a step's groups whose right act is to ask, refuse or give up
    refills: int = 4  # extra groups a step may sample in place of those without spread
    learning_rate: float = 4e-5
    minibatches: int = 1  # updates a step; the clip matters from the second on
    clip_low: float = 0.2
    clip_high: float = 0.28
    truncate: float = 2.0  # cap of the importance ratio between trainer and sampler
    trained_layers: int = 0  # decoder layers that are trained, from the top; 0: every weight
    signal_weight: float = 1.5  # of invalid and repeated calls, beside the outcome


class Distill(Section, frozen=True):
    layers: int = 11  # decoder layers the student keeps: those its teacher would miss most
    probes: int = 2  # runs of the teacher's on which layers are left out in turn
    tasks: int = 64  # tasks the teacher is asked to solve for the student
    samples: int = 4  # teacher runs a task
    epochs: int = 2
    rows: int = 4
    learning_rate: float = 7e-4
    steps: int = 6  # on-policy steps in which its teacher corrects the student
    step_rows: int = 64  # student runs a step


class Release(Section, frozen=True):
    margin: float = 0.1  # how much worse held-out success may plausibly be
    cost_margin: float = 0.1  # how much dearer, as a share


class Eval(Section, frozen=True):
    temperature: float = 1.0
    episodes: int = 200


class Serve(Section, frozen=True):
    host: str = "127.0.0.1"
    port: int = 8321
    sessions: int = 8  # tasks a turn plays against its own endpoint


class Config(Section, frozen=True):
    seed: int = 0
    pack_tokens: int = 3072  # tokens of one training micro-batch, shared prefixes counted once
    model: Model = Model()
    tasks: Tasks = Tasks()
    collect: Collect = Collect()
    sft: Sft = Sft()
    shape: Shape = Shape()
    rl: Rl = Rl()
    distill: Distill = Distill()
    release: Release = Release()
    eval: Eval = Eval()
    serve: Serve = Serve()


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read `path` (None: the defaults), then apply overrides such as `rl.steps=4`.

    Raises ConfigError naming the key, the nearest known one, or the type that was expected.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            raise ConfigError(f"no settings file at {path}: write one with `treadle init`") from None
        except OSError as error:
            raise ConfigError(f"can't read {path} ({error.strerror}): -w takes the workspace's folder") from None
        except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, or nothing that can be read
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for override in overrides:
        _apply(data, override)
    _check_keys(data, Config, "")
    try:
        return _check_values(msgspec.convert(data, Config))
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings: {error}") from None


def dump(config: Config) -> str:
    """The resolved settings as TOML, in the order of the structs, each with what stands beside it in this file."""
    lines = _lines(config)
    for name, value in msgspec.structs.asdict(config).items():
        if isinstance(value, Section):
            lines += ["", f"[{name}]", *_lines(value)]
    return "\n".join(lines) + "\n"


def _lines(section: Section) -> list[str]:
    beside = dict(re.findall(r"^    (\w+): .*  # (.+)$", inspect.getsource(type(section)), re.MULTILINE))
    plain = {key: item for key, item in msgspec.structs.asdict(section).items() if not isinstance(item, Section)}
    return [f"{key} = {_toml(item)}" + (f"  # {beside[key]}" if key in beside else "") for key, item in plain.items()]


def _toml(value: Any) -> str:
    # JSON and TOML write strings, numbers, booleans and flat lists alike
    return repr(value) if isinstance(value, float) else msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"override {key}={text[:40]}... can't be read: {error}") from None
    *sections, last = key.strip().split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise ConfigError(f"override {override!r}: {section!r} is a value, not a section")
    data[last] = value


def _check_keys(data: dict[str, Any], struct: type[Section], prefix: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in data.items():
        if key not in fields:
            raise ConfigError(unknown("setting", f"{prefix}{key}", [f"{prefix}{name}" for name in fields]))
        kind = fields[key]
        if isinstance(kind, type) and issubclass(kind, Section) and isinstance(value, dict):
            _check_keys(value, kind, f"{prefix}{key}.")


MANY = 1_000_000
LIMITS: dict[str, tuple[float, float]] = {
    "seed": (0, 2**63 - 1),
    "pack_tokens": (1, MANY),
    "model.slots": (1, 4096),
    "model.context": (2, MANY),
    "model.threads": (1, 512),
    "tasks.train": (1, MANY),
    "tasks.held_out": (1, MANY),
    "tasks.boundary": (0, 1),
    "collect.demonstrations": (1, MANY),
    "collect.boundary": (0, 1),
    "sft.epochs": (1, MANY),
    "sft.rows": (1, MANY),
    "sft.learning_rate": (1e-12, 0.1),
    "shape.tasks": (1, MANY),
    "shape.group": (2, MANY),  # one rollout has no baseline
    "shape.epochs": (1, MANY),
    "shape.rows": (1, MANY),
    "shape.learning_rate": (1e-12, 0.1),
    "shape.beta": (1e-6, 100),
    "shape.trained_layers": (0, MANY),
    "rl.steps": (1, MANY),
    "rl.tasks": (1, MANY),
    "rl.group": (2, MANY),
    "rl.boundary": (0, 1),
    "rl.refills": (0, MANY),
    "rl.learning_rate": (1e-12, 0.1),
    "rl.minibatches": (1, MANY),
    "rl.clip_low": (0, 1),
    "rl.clip_high": (0, 100),
    "rl.truncate": (1, float("inf")),
    "rl.trained_layers": (0, MANY),
    "rl.signal_weight": (0, 100),
    "distill.layers": (1, MANY),
    "distill.probes": (1, MANY),
    "distill.tasks": (1, MANY),
    "distill.samples": (1, MANY),
    "distill.epochs": (1, MANY),
    "distill.rows": (1, MANY),
    "distill.learning_rate": (1e-12, 0.1),
    "distill.steps": (0, MANY),
    "distill.step_rows": (1, MANY),
    "release.margin": (0, 1),
    "release.cost_margin": (0, 100),
    "eval.temperature": (0, 10),
    "eval.episodes": (1, MANY),
    "serve.port": (0, 65535),  # 0: any free one
    "serve.sessions": (0, MANY),
}


def numbers(config: Config) -> dict[str, float]:
    """Every setting that is one number, by its full name."""
    found: dict[str, float] = {}
    for name, value in msgspec.structs.asdict(config).items():
        parts = msgspec.structs.asdict(value).items() if isinstance(value, Section) else [("", value)]
        found |= {f"{name}.{key}".rstrip("."): part for key, part in parts if isinstance(part, int | float)}
    return found


def _check_values(config: Config) -> Config:
    """Values that would only fail minutes later."""
    for name, value in numbers(config).items():
        least, most = LIMITS[name]
        if not least <= value <= most:
            raise ConfigError(f"{name} is {value}: it must be from {least:g} to {most:g}")
    tasks, model = config.tasks, config.model
    if not tasks.packages or len(set(tasks.packages)) < len(tasks.packages):
        raise ConfigError(f"tasks.packages is {list(tasks.packages)}: name at least one package, each once")
    if not all(0 <= level <= 1 for level in tasks.levels) or sum(tasks.levels) > 1.000001:
        raise ConfigError(f"tasks.levels is {list(tasks.levels)}: shares are from 0 to 1, and add up to no more than 1")
    if sum(tasks.levels) == 0 and tasks.boundary == 0:
        raise ConfigError("tasks.levels and tasks.boundary are all 0: no task would be made")
    if config.pack_tokens < model.context:
        raise ConfigError(
            f"pack_tokens is {config.pack_tokens} but model.context is {model.context}: "
            "a whole episode must fit, so set pack_tokens to at least model.context"
        )
    if 0 < config.eval.temperature < 1e-4:
        raise ConfigError(f"eval.temperature is {config.eval.temperature}: give 0 (greedy) or at least 0.0001")
    if model.dtype not in ("auto", "bfloat16", "float32"):
        raise ConfigError(unknown("model.dtype", model.dtype, ["auto", "bfloat16", "float32"]))
    for name, text in (("model.base", model.base), ("serve.host", config.serve.host)):
        if not text.strip() or "\0" in text:
            raise ConfigError(f"{name} is {text!r}: it can't be empty or hold NUL")
    return config
