from pathlib import Path

import pytest

from treadle import config
from treadle.errors import ConfigError


def test_defaults_survive_a_round_trip_through_toml(tmp_path: Path) -> None:
    settings = config.load(None, ["rl.steps=3", "model.base=tiny", "rl.truncate=inf"])
    path = tmp_path / "treadle.toml"
    path.write_text(config.dump(settings))
    assert config.load(path) == settings
    assert settings.rl.steps == 3


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rl.stepz=3", "did you mean 'rl.steps'"),  # F91: unknown keys name the nearest
        ("sead=1", "did you mean 'seed'"),
        ("rl.steps=many", "Expected `int`, got `str`"),
        ("rl.steps", "section.key=value"),
        ("seed.deep=1", "unknown|not a section|Expected"),
        ("rl.group=1", "from 2 to"),
        ("pack_tokens=10", "at least model.context"),
        ("model.dtype=int3", "bfloat16"),
        ("eval.episodes=0", "eval.episodes is 0: it must be from 1 to"),
        ("rl.minibatches=0", "from 1 to"),
        ("seed=-1", "from 0 to"),
        ("rl.trained_layers=-1", "rl.trained_layers is -1"),
        ("serve.port=70000", "65535"),
        ("sft.learning_rate=0", "from 1e-12"),
        ("distill.learning_rate=inf", "to 0.1"),
        ("release.margin=nan", "release.margin is nan"),
        ("shape.beta=0", "shape.beta is 0"),
        ("rl.truncate=-1", "rl.truncate is -1"),
        ("model.threads=100000", "to 512"),
        ("eval.temperature=1e-300", "0 .greedy."),
        ('serve.host=""', "serve.host is ''"),
        ('model.base="a\\u0000b"', "NUL"),
        ("tasks.levels=[0.0, 0.0, 2.0]", "from 0 to 1"),
        ("seed=" + "9" * 5000, "seed=9999.*can't be read"),
        ("seed=" + "[" * 2000, "can't be read"),
    ],
)
def test_a_bad_setting_is_named_with_its_remedy(override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config.load(None, [override])


@pytest.mark.parametrize("text", ["seed = " + "[" * 2000, "seed = " + "9" * 5000, b"seed = 1 # \xff", "seed ="])
def test_a_file_that_is_no_toml(text: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "treadle.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match="is not valid TOML"):
        config.load(path)
    path.write_bytes(b"\xef\xbb\xbfseed = 3")  # as some editors save it
    assert config.load(path).seed == 3


def test_every_number_has_limits() -> None:
    """So that none is accepted at first and fails minutes later; and what `init` writes can be read again."""
    assert config.numbers(config.Config()).keys() == config.LIMITS.keys()
    with pytest.raises(ConfigError, match="no task would be made"):
        config.load(None, ["tasks.levels=[0.0, 0.0, 0.0]", "tasks.boundary=0"])


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "treadle.toml"
    settings = config.load(None, ['model.base="a\x7fb \\" ü"'.replace("\x7f", "\\u007f")])
    path.write_text(config.dump(settings), encoding="utf-8")
    assert config.load(path) == settings
    assert "slots = 64  # sessions decoded at once\n" in path.read_text()


def test_files_that_are_missing_or_broken_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="treadle init"):
        config.load(tmp_path / "treadle.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[rl\nsteps = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        config.load(broken)


def test_an_override_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "treadle.toml"
    path.write_text("[rl]\nsteps = 5\nrefills = 1\n")
    settings = config.load(path, ["rl.steps=7"])
    assert (settings.rl.steps, settings.rl.refills) == (7, 1)
