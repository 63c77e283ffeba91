"""Logs in: every order of roles, every form of arguments, nothing lost without a count, no secret stored."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.errors import DataError
from treadle.pool.formats import openai_chat
from treadle.pool.formats.base import BadRecord
from treadle.pool.ingest import IngestReport, ingest
from treadle.pool.scrub import Scrubber
from treadle.store import Store
from treadle.types import Effect, End, Message, Node, Outcome, Source, Tool, ToolCall, Trajectory, to_msgpack

Row = dict[str, Any]


def user(text: str = "fix it") -> Row:
    return {"role": "user", "content": text}


def says(text: str | None = None, *calls: Row) -> Row:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def call(id: str | None = "c1", name: str = "read", arguments: Any = '{"path": "a.py"}') -> Row:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **({"id": id} if id else {})}


def result(id: str | None = "c1", text: str = "1: x", **more: Any) -> Row:
    return {"role": "tool", "content": text, **({"tool_call_id": id} if id else {}), **more}


def read(messages: list[Row], **more: Any) -> Trajectory:
    return openai_chat.read_row({"messages": messages, **more})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "treadle.db")


def roles(trajectory: Trajectory) -> str:
    return "".join(node.message.role[0] for node in trajectory.nodes)


# ---------------------------------------------------------------- roles and results


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user(), says(None, call("a"), call("b")), result("a"), result("b"), says("done")], "uatta"),
        ([says("hello"), user(), says("done")], "aua"),
        ([user(), user(), says("done")], "uua"),
        ([user(), says(None, call()), result(), says("x"), says("y")], "uataa"),
        ([{"role": "developer", "content": "be kind"}, user(), says("done")], "sua"),
    ],
)
def test_real_conversations_are_accepted(messages: list[Row], expected: str) -> None:
    """F76: consecutive tool replies, assistant first, repeated users, null content with calls."""
    assert roles(read(messages)) == expected


def test_an_interrupted_call_is_marked() -> None:
    """F77: one pair, one interrupted call, no exception."""
    trajectory = read([user(), says(None, call("c1"), call("c2")), result("c2")])
    assert trajectory.extra["interrupted"] == 1
    assert trajectory.outcome.end is End.INTERRUPTED
    assert trajectory.nodes[2].message.tool_call_id == "c2"


def test_the_call_that_ended_the_episode_needs_no_result() -> None:
    messages = [user(), says(None, call("c1", "submit", "{}"))]
    assert "interrupted" not in read(messages, metadata={"end": "submitted"}).extra
    assert read(messages).extra["interrupted"] == 1


def test_a_call_of_no_tool_is_broken() -> None:
    """F27: a call without a name can't be run, and what it said is kept."""
    trajectory = read([user(), says(None, call("c1", name="", arguments='{"path": "a.py"}')), result("c1")])
    (made,) = trajectory.nodes[1].message.tool_calls
    assert made.arguments is None and "names no tool" in made.error and made.raw == '{"path": "a.py"}'
    assert trajectory.extra["counts"]["broken_calls"] == 1


def test_results_out_of_order_go_to_their_calls() -> None:
    """F77: each result names the tool it answers, whatever the order."""
    two = says(None, call("c1", "read"), call("c2", "search"))
    trajectory = read([user(), two, result("c2"), result("c1")])
    assert [(n.message.tool_call_id, n.message.name) for n in trajectory.nodes[2:]] == [
        ("c2", "search"),
        ("c1", "read"),
    ]
    assert trajectory.labels == {}


def test_results_without_ids_are_paired_by_order_and_say_so() -> None:
    two = says(None, call(None, "read"), call(None, "search"))
    trajectory = read([user(), two, result(None), result(None)])
    assert [n.message.name for n in trajectory.nodes[2:]] == ["read", "search"]
    assert [n.extra.get("inferred") for n in trajectory.nodes[2:]] == [True, True]
    by_name = read([user(), two, result(None, name="search"), result(None, name="read")])
    assert [n.message.name for n in by_name.nodes[2:]] == ["search", "read"]


def test_a_result_that_answers_nothing_is_dropped_and_counted() -> None:
    trajectory = read([user(), says(None, call("c1")), result("c1"), result("c1"), result("zzz"), says("done")])
    assert roles(trajectory) == "uata"
    assert trajectory.extra["counts"]["dropped_results"] == 2
    assert [n.parent for n in trajectory.nodes] == [None, 0, 1, 2]


def test_reused_call_ids_still_tell_calls_apart() -> None:
    """Many logs number calls from zero in every turn, and some within one."""
    turns = [says(None, call("c", "read")), result("c", "first"), says(None, call("c", "edit")), result("c", "second")]
    trajectory = read([user(), *turns])
    ids = [c.id for n in trajectory.nodes for c in n.message.tool_calls]
    assert len(set(ids)) == 2
    answers = {n.message.tool_call_id: n.message.content for n in trajectory.nodes if n.message.role == "tool"}
    assert answers == {ids[0]: "first", ids[1]: "second"}
    late = read([user(), says(None, call("c", "read")), says(None, call("c", "edit")), result("c")])
    assert late.nodes[-1].message.name == "edit", "the earlier call was cut off; its id was used again"


def test_the_old_function_call_form() -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "read", "arguments": "{}"}}
    trajectory = read([user(), old, {"role": "function", "name": "read", "content": "x"}])
    assert roles(trajectory) == "uat"
    assert trajectory.nodes[2].message.name == "read"


# ---------------------------------------------------------------- contents and arguments


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"line": 3}, {"line": 3}),
        ('{"line": 3}', {"line": 3}),
        (json.dumps('{"line": 3}'), {"line": 3}),
        ("", {}),
        (None, {}),
        ('{"line": ', None),
        ("[1, 2]", None),
        (3, None),
        ('{"line": NaN}', None),  # Python reads these two, and no other parser does
        ('{"line": 1e999}', None),
        ('{"text": "\\ud800"}', None),
        ('{"a": ' * 70 + "1" + "}" * 70, None),
    ],
)
def test_every_form_of_arguments(arguments: Any, expected: Any) -> None:
    trajectory = read([user(), says(None, call("c1", "edit", arguments)), result("c1")])
    made = trajectory.nodes[1].message.tool_calls[0]
    assert made.arguments == expected
    if expected is None:
        assert made.error and str(arguments) in made.raw, "a broken call keeps what was written"
        assert trajectory.extra["counts"]["broken_calls"] == 1


def test_content_in_parts() -> None:
    parts = [
        {"type": "text", "text": "see "},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "text", "text": "this"},
    ]
    trajectory = read([{"role": "user", "content": parts}, says("done")])
    assert trajectory.nodes[0].message.content == "see this"
    assert trajectory.nodes[0].extra["parts"] == ["image_url"]
    assert trajectory.extra["counts"]["parts_without_text"] == 1


def test_labels_do_not_have_to_match_the_messages(store: Store, tmp_path: Path) -> None:
    """F79: messages as JSON text, an empty assistant turn, and a run that was not resolved."""
    row = {"messages": json.dumps([user(), says(""), says("done")]), "resolved": False}
    trajectory = openai_chat.read_row(row)
    assert roles(trajectory) == "uaa"
    assert trajectory.extra["empty_replies"] == 1
    assert trajectory.outcome.reward == 0.0


def test_metadata_may_be_json_text_and_a_number_text() -> None:
    trajectory = openai_chat.read_row(
        {"messages": [user(), says("done")], "metadata": json.dumps({"reward": "1.0", "task_id": "t"})}
    )
    assert (trajectory.outcome.reward, trajectory.task_id) == (1.0, "t")
    assert not any(name.startswith("unread") for name in trajectory.extra.get("counts", {}))


@pytest.mark.parametrize(
    ("beside", "counted"),
    [
        ({"reward": 10**400}, "unread_reward"),
        ({"reward": "high"}, "unread_reward"),
        ({"metadata": {"end": "nonsense"}}, "unread_end"),
        ({"metadata": {"created": ["x"]}}, "unread_created"),
        ({"metadata": ["task_id"]}, "unread_metadata"),
        ({"metadata": "{"}, "unread_metadata"),
    ],
)
def test_what_cannot_be_read_is_counted(beside: Row, counted: str) -> None:
    trajectory = openai_chat.read_row({"messages": [user(), says("done")], **beside})
    assert trajectory.extra["counts"] == {counted: 1}


def test_failures_must_be_of_messages_that_are_there() -> None:
    with pytest.raises(BadRecord, match="'99' is not the index of a message"):
        read([user(), says("done")], metadata={"failures": {"99": "x"}})


@pytest.mark.parametrize("reward", [None, "high", float("nan"), float("inf")])
def test_a_reward_that_is_not_known_is_not_zero(reward: Any) -> None:
    line = json.dumps({"messages": [user(), says("done")], "metadata": {"reward": reward}})
    assert openai_chat.read_row(openai_chat._load(line)).outcome.reward is None
    assert read([user(), says("done")], metadata={"reward": 0}).outcome.reward == 0.0


def test_marked_mistakes_stay_untrained_where_they_were() -> None:
    """Indexes are into the row's messages, also when a result before them was dropped."""
    messages = [user(), says(None, call("c1")), result("c1"), result("zzz"), says("wrong"), says("right")]
    trajectory = read(messages, metadata={"untrained": [4]})
    assert [n.message.content for n in trajectory.nodes if n.extra.get("untrained")] == ["wrong"]
    with pytest.raises(BadRecord, match="0 is not the index of an assistant message"):
        read(messages, metadata={"untrained": [0]})


def test_unknown_fields_are_kept() -> None:
    trajectory = read(
        [{**user(), "mood": "calm"}, says("done")], run=7, metadata={"task_id": "t", "shift": "night", "model": "m"}
    )
    assert trajectory.nodes[0].extra["fields"] == {"mood": "calm"}
    assert trajectory.extra["fields"] == {"run": 7}
    assert trajectory.extra["metadata"] == {"shift": "night"}
    assert (trajectory.task_id, trajectory.policy) == ("t", "m")


# ---------------------------------------------------------------- writing and reading back


def episode() -> Trajectory:
    messages = [
        Message(role="system", content="You mend code."),
        Message(role="user", content="Füge hinzu"),
        Message(
            role="assistant",
            content="",
            reasoning="hm",
            tool_calls=(
                ToolCall(id="a", name="edit", arguments={"line": 1, "text": "é"}),
                ToolCall(
                    id="b", name="read", arguments=None, raw='{"name": "read", "arguments": {"path: }', error="broken"
                ),
            ),
        ),
        Message(role="tool", content="text not found", tool_call_id="a", name="edit"),
        Message(role="tool", content="broken call", tool_call_id="b", name="read"),
        Message(role="assistant", content="done"),
    ]
    nodes = [Node(id=i, parent=i - 1 if i else None, message=m) for i, m in enumerate(messages)]
    nodes[3].failure = "text_not_found"
    nodes[2].extra = {"untrained": True}
    return Trajectory(
        id="e",
        task_id="t",
        environment="repair",
        contract="c",
        source=Source.ROLLOUT,
        policy="solver",
        nodes=nodes,
        outcome=Outcome(end=End.SUBMITTED, reward=1.0),
        created=12.5,
    )


def test_what_is_written_is_read_back() -> None:
    tool = Tool(name="read", description="Read", parameters={"type": "object"}, effect=Effect.READ)
    row = json.loads(json.dumps(openai_chat.to_row(episode(), [tool])))
    assert isinstance(row["messages"][2]["tool_calls"][0]["function"]["arguments"], str)
    back = openai_chat.read_row(row)
    for before, after in zip(episode().nodes, back.nodes, strict=True):
        assert [c.arguments for c in before.message.tool_calls] == [c.arguments for c in after.message.tool_calls]
        assert [c.raw for c in before.message.tool_calls] == [c.raw for c in after.message.tool_calls]
        assert (before.message.content, before.failure, before.extra) == (
            after.message.content,
            after.failure,
            after.extra,
        )
        assert (before.message.name, before.message.tool_call_id) == (after.message.name, after.message.tool_call_id)
    for t in (back, episode()):
        assert (t.task_id, t.environment, t.contract, t.policy) == ("t", "repair", "c", "solver")
        assert (t.outcome, t.created) == (Outcome(end=End.SUBMITTED, reward=1.0), 12.5)
    assert back.extra["tools"][0]["function"]["name"] == "read"
    assert openai_chat.to_row(back)["messages"] == row["messages"]


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
fields = st.sampled_from(["role", "content", "tool_calls", "function_call", "tool_call_id", "name", "weight"])
role_names = st.sampled_from(["user", "assistant", "tool", "system", "function", "x"])
messages = st.dictionaries(fields, anything | role_names, max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.lists(messages | anything, max_size=4), anything)
def test_no_row_can_stop_the_reading(rows: list[Any], metadata: Any) -> None:
    """Whatever a line holds, it is a storable trajectory or a reason; nothing else is raised."""
    line = json.dumps({"messages": rows, "metadata": metadata})
    record = openai_chat._record(Path("log"), 1, line.encode())
    if isinstance(record, Trajectory):
        assert to_msgpack(Scrubber().trajectory(record))
    else:
        assert record.code and record.reason


# ---------------------------------------------------------------- ingest


def write(path: Path, *rows: Row | str | bytes) -> Path:
    lines = [
        row if isinstance(row, bytes) else row.encode() if isinstance(row, str) else json.dumps(row).encode()
        for row in rows
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


GOOD = {"messages": [user(), says(None, call()), result(), says("done")], "metadata": {"task_id": "t", "reward": 1}}


def test_broken_lines_are_set_aside_with_their_reason(store: Store, tmp_path: Path) -> None:
    path = write(
        tmp_path / "log.jsonl",
        "{not json",
        GOOD,
        "",
        "[1]",
        {"messages": []},
        {"messages": [user()]},
        {"messages": [{"role": "robot", "content": "x"}, says("y")]},
        b'{"messages": [{"role": "assistant", "content": "\xff"}]}',
        '{"messages": [{"role": "assistant", "content": "\\ud800"}]}',
        '{"messages": [{"role": "assistant", "content": "x"}], "n": ' + "9" * 30 + "}",
        "[" * 100_000,
        '{"messages": [{"role": "assistant", "content": "x"}], "n": ' + "[" * 600 + "]" * 600 + "}",
        {"messages": [user("after all"), says("that")]},
    )
    report = ingest([path], store)
    assert report.trajectories == 2
    assert report.quarantined == {
        "broken_json": 2,
        "not_an_object": 1,
        "no_messages": 1,
        "no_reply": 1,
        "unknown_role": 1,
        "bad_encoding": 1,
        "not_storable": 3,
    }
    assert report.records == report.trajectories + report.repeated + sum(report.quarantined.values())
    kept = {d.record_id: d.reason for d in store.dispositions("ingest")}
    assert kept[f"{path}:1"].startswith("broken_json: not valid JSON")
    assert "unknown role 'robot'" in kept[f"{path}:7"]


def test_ingest_twice_does_nothing_twice(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", GOOD, GOOD, {**GOOD, "run": 2})
    first, second = ingest([path], store), ingest([tmp_path], store)
    assert (first.trajectories, first.repeated) == (2, 1)
    assert (second.trajectories, second.repeated) == (0, 3)
    assert sum(1 for _ in store.trajectories()) == 2


def test_the_report_says_what_each_trace_is_good_for(store: Store, tmp_path: Path) -> None:
    """F78"""
    cut = {"messages": [user(), says(None, call("a"), call("b"))], "metadata": {"task_id": "t", "reward": 0}}
    ungraded = {"messages": [user(), says("done")]}
    report = ingest([write(tmp_path / "log.jsonl", GOOD, cut, ungraded)], store)
    assert report.good_for == {"sft": 2, "preference": 1, "rl": 0}
    assert report.missing["rl: no token ids"] == 3
    assert report.missing["sft: tool results missing (2)"] == 1
    assert report.missing["preference: no reward"] == 1
    assert (report.calls, report.results, report.interrupted) == (3, 1, 1)


def test_served_logs_keep_their_source(store: Store, tmp_path: Path) -> None:
    served = {"messages": [user(), says("done")], "metadata": {"source": "served"}}
    ingest([write(tmp_path / "log.jsonl", served, GOOD)], store)
    assert [t.source for t in store.trajectories()] == [Source.SERVED, Source.LOG]


def test_bad_paths_say_so_before_anything_is_stored(store: Store, tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", GOOD)
    with pytest.raises(DataError, match="no such file"):
        ingest([good, tmp_path / "missing.jsonl"], store)
    with pytest.raises(DataError, match=r"no known log format \(known: openai_chat\)"):
        ingest([good, write(tmp_path / "other.jsonl", '{"a": 1}', "text")], store)
    assert list(store.trajectories()) == []
    assert ingest([write(tmp_path / "broken_first.jsonl", "{", GOOD)], store).trajectories == 1
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="write it to a file first"):
        ingest([tmp_path / "pipe"], store)
    (tmp_path / "empty.jsonl").touch()
    assert ingest([tmp_path / "empty.jsonl"], store) == IngestReport(files=1)


def test_a_folder_says_what_it_left_alone(store: Store, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", GOOD)
    write(tmp_path / "deep.JSONL", "", *[""] * 100, {"messages": [user("other"), says("x")]})
    for name in ("b.jsonl.gz", "c.txt", "d.txt", "README"):
        (tmp_path / name).write_text("x")
    report = ingest([tmp_path], store)
    assert (report.files, report.trajectories) == (2, 2)
    assert report.skipped == {".gz": 1, ".txt": 2, "no ending": 1, ".db": 1, ".db-wal": 1, ".db-shm": 1}


def test_real_logs_are_read(tmp_path: Path) -> None:
    """Real tool dialogues, where the folder with them is at hand."""
    folder = Path(__file__).parents[2] / "shared" / "data" / "logs" / "tau_bench"
    files = sorted(folder.glob("*.json"))
    if not files:
        pytest.skip("no real logs here")
    rows = [
        {"messages": row["traj"], "metadata": {"reward": row["reward"]}} for row in json.loads(files[0].read_text())
    ]
    report = ingest([write(tmp_path / "log.jsonl", *rows)], Store(tmp_path / "treadle.db"))
    assert report.quarantined == {}
    assert report.trajectories + report.repeated == len(rows)
    assert report.results > 0 and report.mended.get("dropped_results", 0) == 0
