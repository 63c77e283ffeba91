"""F80: no secret and no personal data reaches the store; ordinary code is left alone."""

import json
from pathlib import Path

import pytest

from test_ingest import Row, call, episode, result, says, user, write
from treadle.pool.formats import openai_chat
from treadle.pool.ingest import ingest
from treadle.pool.scrub import Scrubber
from treadle.store import Store
from treadle.types import Message, Node, Source, Trajectory, to_msgpack


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "treadle.db")


KEY = "zz-9f31ab77cd"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA7bq\nqL9e\n-----END RSA PRIVATE KEY-----"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"


@pytest.mark.parametrize(
    ("text", "secret", "category"),
    [
        (f"FOO_API_KEY={KEY}", KEY, "api_key"),
        (f'{{"api_key": "{KEY}"}}', KEY, "api_key"),
        (r"{\"password\": \"hunter2\"}", "hunter2", "password"),
        ("db password: hunter2", "hunter2", "password"),
        ("export DB_PASSWORD=letmein", "letmein", "password"),
        ('client_secret = "correct-horse"', "correct-horse", "secret"),
        ("curl -H 'Authorization: Bearer abcdef1234567890'", "abcdef1234567890", "bearer"),
        ("Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz", "bearer"),
        ("postgres://bob:s3cret@db/x", "bob:s3cret", "url_credentials"),
        (f"key:\n{PEM}\nend", PEM, "private_key"),
        (PEM[:60], PEM[:60], "private_key"),
        ("write to bob.smith@example.co.uk.", "bob.smith@example.co.uk", "email"),
        (f"got {JWT} back", JWT, "token"),
        ("sk-proj-abcdefghij0123456789", "sk-proj-abcdefghij0123456789", "token"),
        ("ghp_" + "a1B2" * 9, "ghp_" + "a1B2" * 9, "token"),
        ("printed q8Zr2LmX0vTb7NcY4kHs9WdE1 here", "q8Zr2LmX0vTb7NcY4kHs9WdE1", "high_entropy"),
    ],
)
def test_secrets_are_replaced(text: str, secret: str, category: str) -> None:
    scrubber = Scrubber()
    clean = scrubber.text(text)
    assert secret not in clean
    assert f"<secret:{category}:" in clean
    assert dict(scrubber.counts) == {category: 1}
    assert scrubber.text(clean) == clean, "scrubbing again changes nothing"
    assert Scrubber().text(text) == clean, "stable from run to run"


CODE = '''
import operator
from toolz.functoolz import curry, compose

no_default = '__no__default__'
SORT_KEY = "ascending_by_length_of_name"

def groupby(key, seq, token=None, secret=None):
    """ Group a collection by a key function
    >>> groupby(len, ['Alice', 'Bob'])  # doctest: +SKIP
    """
    if not callable(key):
        key = getter(key)
    d = collections.defaultdict(lambda: [].append)
    token = tokens[0]
    password: str = get_password(auth=self.auth)
    access_key = settings.ACCESS_KEY2
    for item in seq:
        d[key(item)](item)
    return {k: v.__self__ for k, v in d.items()}

@curry
def accumulate_with_initial_value_2(binop, seq, initial=no_default): return binop @ seq.T
class TestHTTPServer2ConnectionPoolManager3(unittest.TestCase): pass
'''


def test_ordinary_code_is_left_alone() -> None:
    scrubber = Scrubber()
    assert scrubber.text(CODE) == CODE
    for text in (
        "da39a3ee5e6b4b0d3255bfef95601890afd80709",
        "PWD=/home/user/src",
        "tests/test_itertoolz.py::test_join2",
    ):
        assert scrubber.text(text) == text
    networkx = pytest.importorskip("networkx")
    for path in sorted(Path(networkx.__file__).parent.glob("algorithms/*.py")):
        text = path.read_text()
        assert scrubber.text(text) == text or {"email", "high_entropy"} >= set(scrubber.counts), path
    assert scrubber.counts.total() < 10


def secret_row() -> Row:
    arguments = json.dumps({"env": {"FOO_API_KEY": KEY}, KEY: 1, "note": f"mail bob@example.com, {KEY}"})
    return {
        "messages": [
            user(f"my FOO_API_KEY={KEY}"),
            {"role": "user", "content": "and", "name": "bob@example.com"},
            says(
                f"I see {KEY}",
                call("call_Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8", "run", arguments),
                call("c2", "run", '{"password": "hunter2'),
            ),
            result("call_Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8", f"echo {KEY}"),
            result("c2", "broken"),
        ],
        "metadata": {
            "failures": {"3": f"API_KEY={KEY}"},
            "task_id": "t",
            "note": f"Bearer {KEY}",
            "owner": "bob@example.com",
        },
        "tools": [{"type": "function", "function": {"name": "run", "description": f"use {KEY}"}}],
    }


def test_no_secret_reaches_the_store(store: Store, tmp_path: Path) -> None:
    """In text, arguments, keys, results, metadata; the same secret has one placeholder; JSON stays valid; ids stay."""
    report = ingest([write(tmp_path / "log.jsonl", secret_row())], store)
    (stored,) = store.trajectories()
    data = to_msgpack(stored).decode("latin-1")
    for secret in (KEY, "hunter2", "bob@example.com"):
        assert secret not in data
        for suffix in ("", "-wal"):
            assert secret.encode() not in Path(f"{store.location}{suffix}").read_bytes()
    placeholder = Scrubber().text(f"FOO_API_KEY={KEY}").partition("=")[2]
    made = stored.nodes[2].message.tool_calls[0]
    assert made.arguments is not None
    assert made.arguments["env"] == {"FOO_API_KEY": placeholder}
    assert made.arguments[placeholder] == 1
    assert stored.nodes[3].message.content == f"echo {placeholder}"
    assert made.id == "call_Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8"
    json.dumps(openai_chat.to_row(stored))
    assert report.secrets["api_key"] >= 5 and report.secrets["email"] == 3


def test_the_task_id_of_a_label_is_no_secret() -> None:
    """However random: without it the task's split can't be looked up, and with its tokens the row would be useless."""
    labels = {"task_id": "repair-toolz-L1-60de0c38f1ec1124-ddc8f7", "user": "AKIAIOSFODNN7EXAMPLE"}
    node = Node(id=0, parent=None, message=Message("user", "go"), tokens=[1, 2], mask=[0, 0])
    trajectory = Trajectory(
        id="t", task_id=None, environment=None, contract=None, source=Source.SERVED, policy="p", nodes=[node]
    )
    trajectory.labels = {"task_id": labels["task_id"]}
    assert Scrubber().trajectory(trajectory) is trajectory
    trajectory.labels = labels
    clean = Scrubber().trajectory(trajectory)
    assert clean.labels["task_id"] == labels["task_id"] and "AKIA" not in clean.labels["user"]
    assert clean.extra == {"tokens_dropped": 2}


def test_tokens_that_spell_a_secret_go_too() -> None:
    """A rollout's ids would still hold what its text no longer says."""
    clean = episode()
    for node in clean.nodes:
        node.tokens, node.mask, node.log_probs, node.versions = [1, 2], [0, 1], [None, -0.1], [None, 3]
    assert Scrubber().trajectory(clean) is clean
    clean.nodes[1].message = Message(role="user", content=f"API_KEY={KEY}")
    scrubber = Scrubber()
    scrubbed = scrubber.trajectory(clean)
    assert scrubbed.tokens() == [] and clean.tokens() != []
    assert scrubber.counts["tokens_dropped"] == 12
