"""Settings: one TOML file plus dotted overrides, read into frozen structs. Unknown keys fail with the nearest name."""

from __future__ import annotations

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
    packages: tuple[str, ...] = ("toolz", "networkx", "more-itertools")  # the last one is held out whole
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
    refills: int = 4  # extra groups a step may sample in place of those without spread
    learning_rate: float = 4e-5
    minibatches: int = 1  # updates a step; the clip matters from the second on
    clip_low: float = 0.2
    clip_high: float = 0.28
    truncate: float = 2.0  # cap of the importance ratio between trainer and sampler
    trained_layers: int = 0  # decoder layers that are trained, from the top; 0: every weight
    signal_weight: float = 0.7  # of invalid and repeated calls, beside the outcome


class Distill(Section, frozen=True):
    layers: int = 10  # decoder layers the student keeps
    tasks: int = 64  # tasks the teacher is asked to solve for the student
    samples: int = 4  # teacher runs a task
    epochs: int = 2
    rows: int = 4
    learning_rate: float = 1e-3
    steps: int = 4  # on-policy steps
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
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"no settings file at {path}: write one with `treadle init`") from None
        except OSError as error:
            raise ConfigError(f"can't read {path} ({error.strerror}): -w takes the workspace's folder") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for override in overrides:
        _apply(data, override)
    _check_keys(data, Config, "")
    try:
        return _check_values(msgspec.convert(data, Config))
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings: {error}") from None


def dump(config: Config) -> str:
    """The resolved settings as TOML, in the order of the structs."""
    lines: list[str] = []
    for name, value in msgspec.structs.asdict(config).items():
        if not isinstance(value, Section):
            lines.append(f"{name} = {_toml(value)}")
    for name, value in msgspec.structs.asdict(config).items():
        if isinstance(value, Section):
            lines += ["", f"[{name}]"]
            lines += [f"{key} = {_toml(item)}" for key, item in msgspec.structs.asdict(value).items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    # JSON and TOML write strings, numbers, booleans and flat lists alike
    return repr(value) if isinstance(value, float) else msgspec.json.encode(value).decode()


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
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


def _check_shares(config: Config) -> None:
    levels = config.tasks.levels
    for name, value in (
        ("tasks.boundary", config.tasks.boundary),
        ("collect.boundary", config.collect.boundary),
        *((f"tasks.levels[{i}]", level) for i, level in enumerate(levels)),
    ):
        if not 0 <= value <= 1:
            raise ConfigError(f"{name} is {value}: a share is from 0 to 1")
    if sum(levels) > 1.000001:
        raise ConfigError(f"tasks.levels is {list(levels)}: the shares add up to more than 1")


def _check_signs(config: Config) -> None:
    for name, value in (
        ("seed", config.seed),
        ("shape.trained_layers", config.shape.trained_layers),
        ("rl.trained_layers", config.rl.trained_layers),
        ("rl.refills", config.rl.refills),
        ("distill.steps", config.distill.steps),
        ("serve.sessions", config.serve.sessions),
    ):
        if value < 0:
            raise ConfigError(f"{name} is {value}: it can't be negative")
    for name, rate in (
        ("sft.learning_rate", config.sft.learning_rate),
        ("shape.learning_rate", config.shape.learning_rate),
        ("rl.learning_rate", config.rl.learning_rate),
        ("distill.learning_rate", config.distill.learning_rate),
    ):
        if not 0 < rate < 1:
            raise ConfigError(f"{name} is {rate}: a learning rate is above 0 and far below 1")


def _check_values(config: Config) -> Config:
    """Values that would only fail minutes later."""
    counts = {
        "model.slots": config.model.slots,
        "model.context": config.model.context,
        "model.threads": config.model.threads,
        "tasks.train": config.tasks.train,
        "tasks.held_out": config.tasks.held_out,
        "collect.demonstrations": config.collect.demonstrations,
        "sft.rows": config.sft.rows,
        "sft.epochs": config.sft.epochs,
        "shape.tasks": config.shape.tasks,
        "shape.epochs": config.shape.epochs,
        "shape.rows": config.shape.rows,
        "rl.steps": config.rl.steps,
        "rl.tasks": config.rl.tasks,
        "rl.minibatches": config.rl.minibatches,
        "distill.layers": config.distill.layers,
        "distill.tasks": config.distill.tasks,
        "distill.samples": config.distill.samples,
        "distill.epochs": config.distill.epochs,
        "distill.rows": config.distill.rows,
        "distill.step_rows": config.distill.step_rows,
        "eval.episodes": config.eval.episodes,
        "pack_tokens": config.pack_tokens,
    }
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}: it must be at least 1")
    if not config.tasks.packages or len(set(config.tasks.packages)) < len(config.tasks.packages):
        raise ConfigError(f"tasks.packages is {list(config.tasks.packages)}: name at least one package, each once")
    _check_shares(config)
    for name, value in (("shape.group", config.shape.group), ("rl.group", config.rl.group)):
        if value < 2:
            raise ConfigError(f"{name} is {value}: a group needs 2 or more rollouts, or it has no baseline")
    if config.pack_tokens < config.model.context:
        raise ConfigError(
            f"pack_tokens is {config.pack_tokens} but model.context is {config.model.context}: "
            "a whole episode must fit, so set pack_tokens to at least model.context"
        )
    if config.model.dtype not in ("auto", "bfloat16", "float32"):
        raise ConfigError(unknown("model.dtype", config.model.dtype, ["auto", "bfloat16", "float32"]))
    _check_signs(config)
    if not 0 <= config.serve.port < 65536:
        raise ConfigError(f"serve.port is {config.serve.port}: a port is from 0 (any free one) to 65535")
    if config.eval.temperature < 0:
        raise ConfigError(f"eval.temperature is {config.eval.temperature}: it can't be negative")
    return config
