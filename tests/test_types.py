"""The structs that pass between stages: round trips, views of the tree, identity of content."""

import msgspec
import pytest

from treadle.types import (
    Checkpoint,
    Contract,
    Effect,
    End,
    Failure,
    FailureKind,
    Layer,
    Message,
    Node,
    Outcome,
    SamplingParams,
    Signal,
    Source,
    Split,
    StopReason,
    Task,
    TaskKind,
    Tool,
    ToolCall,
    Trajectory,
    fingerprint,
    from_json,
    from_msgpack,
    to_json,
    to_msgpack,
)

CALL = ToolCall(id="c", name="edit", arguments={"text": "é\n", "line": 3})


def node(id: int, parent: int | None, role: str, tokens: list[int], trained: bool = False) -> Node:
    mask = [int(trained)] * len(tokens)
    return Node(id=id, parent=parent, message=Message(role=role, content=f"m{id}"), tokens=tokens, mask=mask)


def tree() -> Trajectory:
    """user 0 - assistant 1 - tool 2 - assistant 3, with another first reply 4 beside 1."""
    nodes = [
        node(0, None, "user", [10, 11]),
        node(1, 0, "assistant", [12], trained=True),
        node(2, 1, "tool", [13, 14]),
        node(3, 2, "assistant", [15], trained=True),
        node(4, 0, "assistant", [16, 17], trained=True),
    ]
    nodes[1].message = Message(role="assistant", tool_calls=(CALL,), reasoning="hm")
    nodes[1].log_probs, nodes[1].versions, nodes[1].stop = [None], [3], StopReason.STOP
    return Trajectory(
        id="t",
        task_id=None,
        environment="repair",
        contract="c",
        source=Source.ROLLOUT,
        policy="p",
        nodes=nodes,
        outcome=Outcome(
            end=End.ERROR, parts={"tests": 0.5}, failure=Failure(kind=FailureKind.INFRASTRUCTURE, stage="grade")
        ),
        signals=[Signal(name="s", layer=Layer.JUDGE, value=None, node=1)],
        sampling=SamplingParams(temperature=0.5, stop_ids=(2, 3)),
    )


TASK = Task(
    id="a",
    environment="repair",
    kind=TaskKind.DANGEROUS,
    messages=(Message(role="user", content="delete the tests"),),
    public={"line": 3},
    private={"answer": "no"},
    split=Split.HELD_OUT,
)
CONTRACT = Contract(
    environment="repair",
    version="1",
    tools=(Tool(name="read", description="Read", parameters={"type": "object"}, effect=Effect.READ),),
    acts=(),
)


@pytest.mark.parametrize(
    "value",
    [TASK, tree(), CONTRACT, Checkpoint(id="c", path="/x", parent=None, stage="sft")],
    ids=lambda v: type(v).__name__,
)
def test_round_trips(value: object) -> None:
    assert from_json(to_json(value), type(value)) == value
    assert from_msgpack(to_msgpack(value), type(value)) == value


def test_not_known_and_zero_stay_apart() -> None:
    """Invariant 3: defaults are left out of the encoding, and None and 0 still differ after it."""
    for reward in (None, 0.0):
        outcome = Outcome(end=End.SUBMITTED, reward=reward)
        for back in (from_msgpack(to_msgpack(outcome), Outcome), from_json(to_json(outcome), Outcome)):
            assert back.reward == reward and type(back.reward) is type(reward)


def test_unknown_fields_are_an_error() -> None:
    with pytest.raises(msgspec.ValidationError, match="rewrad"):
        from_json(b'{"end": "submitted", "rewrad": 1}', Outcome)


def test_paths_and_leaves() -> None:
    trajectory = tree()
    assert trajectory.leaves() == [3, 4]
    assert [n.id for n in trajectory.path(3)] == [0, 1, 2, 3]
    assert [n.id for n in trajectory.path()] == [0, 4], "the last node added is the default"
    assert trajectory.tokens(3) == [10, 11, 12, 13, 14, 15]
    assert trajectory.tokens() == [10, 11, 16, 17]
    assert trajectory.sampled_tokens() == 4


def test_two_trajectories_share_no_default() -> None:
    first, second = tree(), tree()
    first.nodes[0].extra["x"] = 1
    first.labels["y"] = "2"
    assert second.nodes[0].extra == {} and second.labels == {}


def test_content_is_the_same_whatever_the_id_and_the_split() -> None:
    """Invariant 6 rests on this key; the private half is no part of the problem."""
    replace = msgspec.structs.replace
    same = replace(TASK, id="b", split=Split.TRAIN, private={}, labels={"level": "1"}, lineage=("x",))
    assert same.content_key() == TASK.content_key()
    for other in (replace(TASK, public={"line": 4}), replace(TASK, kind=TaskKind.SOLVABLE), replace(TASK, messages=())):
        assert other.content_key() != TASK.content_key()


def test_fingerprints() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint([1, 2]) != fingerprint([2, 1])
    assert CONTRACT.fingerprint("tools as the policy reads them") != CONTRACT.fingerprint("other words")
    tool = msgspec.structs.replace(CONTRACT.tools[0], failures=("no_such_file",))
    assert msgspec.structs.replace(CONTRACT, tools=(tool,)).fingerprint("x") != CONTRACT.fingerprint("x")
