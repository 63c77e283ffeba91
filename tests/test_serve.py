"""The endpoint, spoken to by the official client over a real socket: what it answers and what it records."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from treadle.engine.base import Engine, Sample
from treadle.engine.scripted import ScriptedEngine, limited
from treadle.errors import EngineError, UserError
from treadle.render.chatml import ChatML
from treadle.serve.app import create_app, running
from treadle.store import Store
from treadle.types import (
    Act,
    Contract,
    Effect,
    End,
    Message,
    SamplingParams,
    Source,
    StopReason,
    Tool,
    ToolCall,
    Trajectory,
    from_msgpack,
    to_msgpack,
)

MODEL = "wheel"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}


def renderer() -> ChatML:
    """One id a byte, and "he", "llo", "hello" besides, so that text has more than one encoding."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    for a, b in merges:
        vocab[a + b] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return ChatML(tokenizer)


class Recorded(Engine):
    """Gives the listed replies in turn, to whoever asks, and keeps what it was asked and what it gave."""

    def __init__(self, replies: Sequence[Sequence[int] | Exception], context: int = 8192) -> None:
        self.context = context
        self.stride: int | None = None
        self.replies = list(replies)
        self.asked: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.given: list[Sample] = []
        self.released: list[str] = []

    @property
    def version(self) -> int:
        return 3

    async def sample(self, ids: Sequence[int], params: SamplingParams, session: str) -> Sample:
        self.asked.append(list(ids))
        self.params.append(params)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        self.given.append(limited(reply, params, self.context - len(ids), version=3))
        return self.given[-1]

    async def release(self, session: str) -> None:
        self.released.append(session)

    async def load_weights(self, state: Mapping[str, Any], version: int) -> None: ...

    async def close(self) -> None: ...


RENDERER = renderer()
(STOP,) = RENDERER.stop_ids


def written(*parts: str, stop: bool = True) -> list[int]:
    """Ids of a reply, each part encoded on its own."""
    return [*(id_ for part in parts for id_ in RENDERER.encode(part)), *([STOP] if stop else [])]


def call_text(name: str = "add", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def served(store: Store) -> list[Trajectory]:
    return list(store.trajectories(source=Source.SERVED))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "treadle.db")


@asynccontextmanager
async def client(engine: Engine, store: Store, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    app = create_app(engine, RENDERER, store, MODEL, **options)
    async with running(app) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as found:
        yield found


async def streamed(api: AsyncOpenAI, **arguments: Any) -> tuple[dict[str, Any], str, Any]:
    """The message that a client adds up from the chunks, the finish reason, and the usage."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    reason, usage = "", None
    async for chunk in await api.chat.completions.create(
        model=MODEL, stream=True, stream_options={"include_usage": True}, **arguments
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            message["content"] += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                assert part.index <= len(calls), "indices are sequential"
                if part.index == len(calls):
                    calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
                call = calls[part.index]
                call["id"] = part.id or call["id"]
                assert part.function is not None
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    return message, reason, usage


# ---------------------------------------------------------------- the tool loop


async def tool_loop(api: AsyncOpenAI, question: str, stream: bool = False) -> str:
    """What an ordinary client does: echo the message, run the calls, send the results, until there is an answer."""
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        if stream:
            message, reason, _ = await streamed(api, messages=messages, tools=[ADD])
        else:
            answer = await api.chat.completions.create(model=MODEL, messages=messages, tools=[ADD])  # type: ignore[list-item]
            message, reason = answer.choices[0].message.model_dump(), str(answer.choices[0].finish_reason)
        messages.append(message)
        if reason != "tool_calls":
            return str(message["content"])
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            total = arguments["a"] + arguments["b"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(total)})


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_loop_is_one_path_of_exact_ids(store: Store, stream: bool) -> None:
    """F12, F86: nothing sampled is encoded again, though its text has another encoding."""
    first = written("he", "llo ", call_text(a=1, b=2), "\n", call_text(a=3, b=4))
    assert first != written("hello " + call_text(a=1, b=2) + "\n" + call_text(a=3, b=4))
    engine = Recorded([first, written("3 and 7")])
    async with client(engine, store) as api:
        assert await tool_loop(api, "1+2? 3+4?", stream) == "3 and 7"
    (trajectory,) = served(store)
    path = trajectory.path()
    assert len(path) == len(trajectory.nodes) == 5
    assert [node.message.role for node in path] == ["user", "assistant", "tool", "tool", "assistant"]
    header = RENDERER.reply_header()
    assert path[1].tokens == [*header, *first] and path[1].mask == [0] * len(header) + [1] * len(first)
    assert trajectory.tokens() == [*engine.asked[1], *engine.given[1].ids]
    assert engine.asked[1][: len(engine.asked[0]) + len(first)] == [*engine.asked[0], *first]
    assert trajectory.sampled_tokens() == len(first) + len(engine.given[1].ids)
    assert all((v == 3) == (m == 1) for node in path for v, m in zip(node.versions, node.mask, strict=True))
    assert trajectory.outcome.end is End.ANSWERED and trajectory.outcome.reward is None
    assert trajectory.policy == MODEL and len(trajectory.extra["tools"]) == 1
    assert from_msgpack(to_msgpack(trajectory), Trajectory) == trajectory
    assert engine.released == [trajectory.id]


@pytest.mark.parametrize(
    ("reply", "tokens", "reason"),
    [
        (written("prose, then ", call_text(a=1, b=2), call_text(a=3, b=4)), 4096, "tool_calls"),
        (written(call_text(a='"q"\n\\é☃', b={"x": [1, None]})), 4096, "tool_calls"),
        (written("only prose"), 4096, "stop"),
        (written("<think>so</think>answer"), 4096, "stop"),
        (written("cut ", call_text(a=1, b=2)), 12, "length"),
        (written(stop=True), 4096, "stop"),
    ],
)
async def test_stream_equals_whole(store: Store, reply: list[int], tokens: int, reason: str) -> None:
    """F87: pieces add up to the whole reply; indices, ids, string arguments, finish reason and usage agree."""
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "go"}], "tools": [ADD], "max_tokens": tokens}
    async with client(Recorded([reply, reply]), store) as api:
        whole = await api.chat.completions.create(model=MODEL, **ask)
        message, streamed_reason, usage = await streamed(api, **ask)
    choice = whole.choices[0]
    assert choice.finish_reason == streamed_reason == reason
    assert usage == whole.usage and usage.completion_tokens == min(len(reply), tokens)
    expected = choice.message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
    ids = [call.pop("id") for found in (message, expected) for call in found.get("tool_calls", ())]
    assert len(set(ids)) == len(ids), "an id names one call"
    assert {k: v for k, v in message.items() if v is not None} == expected
    for call in expected.get("tool_calls", ()):
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


async def test_ids_and_log_probs_come_with_every_reply(store: Store) -> None:
    """F87, F68: exact ids, log-probs and the version that sampled them, streamed or not."""
    reply = written("he", "llo")
    ask: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "go"}]}
    async with client(Recorded([reply, reply]), store) as api:
        whole = await api.chat.completions.create(**ask)
        chunks = [chunk async for chunk in await api.chat.completions.create(**ask, stream=True)]
    for answer in (whole, chunks[-1]):
        assert answer.model_extra is not None
        exact = answer.model_extra["treadle"]
        assert (exact["token_ids"], exact["versions"]) == (reply, [3] * len(reply))
        assert exact["log_probs"] == [0.0] * len(reply)
    assert whole.system_fingerprint == f"{MODEL}@3"


# ---------------------------------------------------------------- which conversation a request continues


ECHOES: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
    lambda m: m,
    lambda m: {k: v for k, v in m.items() if v is not None},
    lambda m: {**m, "content": m["content"] or ""},
    lambda m: {**m, "content": [{"type": "text", "text": m["content"]}] if m["content"] else None},
    lambda m: {k: v for k, v in m.items() if k != "reasoning_content"},
    lambda m: {
        **m,
        "tool_calls": [
            {
                **c,
                "function": {
                    **c["function"],
                    "arguments": json.dumps(json.loads(c["function"]["arguments"]), indent=1),
                },
            }
            for c in m["tool_calls"]
        ],
    },
]


@pytest.mark.parametrize("echo", ECHOES)
@pytest.mark.parametrize("text", ["", "he", "<think>why</think>he"])
async def test_echoed_messages_keep_their_ids(store: Store, echo: Any, text: str) -> None:
    """F86: null or "", parts or text, arguments spaced anew, reasoning left out: it is still our message."""
    first = written(text, call_text(a=1, b=2), "\n", call_text(a=1, b=2))
    engine = Recorded([first, written("done")])
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "go"}]
    async with client(engine, store) as api:
        answer = await api.chat.completions.create(model=MODEL, messages=messages, tools=[ADD])  # type: ignore[list-item]
        message = echo(answer.choices[0].message.model_dump())
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in message["tool_calls"]]
        await api.chat.completions.create(model=MODEL, messages=[*messages, message, *results], tools=[ADD])  # type: ignore[list-item]
    (trajectory,) = served(store)
    assert trajectory.tokens()[: len(engine.asked[0]) + len(first)] == [*engine.asked[0], *first]
    assert len(trajectory.leaves()) == 1


@pytest.mark.parametrize("change", ["content", "arguments", "id", "reasoning_content"])
async def test_changed_history_is_a_branch(store: Store, change: str) -> None:
    """A reply that the client rewrote was not sampled: it becomes untrained context beside the one that was."""
    engine = Recorded(
        [written(call_text(a=1, b=2)), written("<think>hm</think>", call_text(a=3, b=4)), written("done")]
    )
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with client(engine, store) as api:
        for _ in range(2):
            answer = await api.chat.completions.create(model=MODEL, messages=messages, tools=[ADD])  # type: ignore[list-item]
            message = answer.choices[0].message.model_dump()
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
            messages += [message, result]
        call = messages[3]["tool_calls"][0]
        if change == "arguments":
            call["function"]["arguments"] = '{"a": 3, "b": 5}'
        elif change == "id":
            call["id"] = messages[4]["tool_call_id"] = "call_mine"
        else:
            messages[3][change] = "something else"
        await api.chat.completions.create(model=MODEL, messages=messages, tools=[ADD])  # type: ignore[list-item]
    (trajectory,) = served(store)
    first, second = trajectory.leaves()
    assert trajectory.path(first)[:3] == trajectory.path(second)[:3], "what is shared is held once"
    assert [sum(node.mask) > 0 for node in trajectory.path(second)] == [False, True, False, False, False, True]
    assert trajectory.tokens(second) == [*engine.asked[2], *engine.given[2].ids]


async def test_talk_after_a_final_reply_is_a_new_episode(store: Store) -> None:
    """Stored trajectories never grow. The new one holds the old ids as context, each sampled token trained once."""
    engine = Recorded([written("he", "llo"), written("bye")])
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    async with client(engine, store) as api:
        answer = await api.chat.completions.create(model=MODEL, messages=messages)
        assert len(served(store)) == 1, "stored before the client has the reply"
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "ciao"}]
        await api.chat.completions.create(model=MODEL, messages=messages)
    first, second = served(store)
    assert second.lineage == (first.id,)
    assert second.tokens()[: len(first.tokens())] == first.tokens()
    assert first.sampled_tokens() == len(written("he", "llo"))
    assert second.sampled_tokens() == len(written("bye"))


async def test_a_retry_is_no_second_conversation(store: Store) -> None:
    """The same request again is answered from the same node; a failed one leaves nothing behind."""
    engine = Recorded([written(call_text(a=1, b=2)), EngineError("gone"), written("3"), written("three")])
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with client(engine, store) as api:
        answer = await api.chat.completions.create(model=MODEL, messages=messages, tools=[ADD])  # type: ignore[list-item]
        message = answer.choices[0].message.model_dump()
        messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}]
        with pytest.raises(openai.InternalServerError, match="gone"):
            await api.chat.completions.create(model=MODEL, messages=messages, tools=[ADD])  # type: ignore[list-item]
        await api.chat.completions.create(model=MODEL, messages=messages, tools=[ADD])  # type: ignore[list-item]
    (trajectory,) = served(store)
    assert [node.message.role for node in trajectory.nodes] == ["user", "assistant", "tool", "assistant"]


async def test_many_clients_at_once(store: Store) -> None:
    """The same question from twelve clients makes twelve trajectories, each with its own results."""

    def script(_: str) -> Any:
        async def reply(context: str) -> Message:
            await asyncio.sleep(0)
            if "<|im_start|>tool\n" in context:
                return Message(role="assistant", content=context.rpartition("<|im_start|>tool\n")[2].partition("<")[0])
            call = ToolCall(id="", name="add", arguments={"a": 20, "b": 22})
            return Message(role="assistant", tool_calls=(call,))

        return reply

    async with client(ScriptedEngine(RENDERER, script), store) as api:
        answers = await asyncio.gather(*(tool_loop(api, "20+22?", stream=i % 2 == 0) for i in range(12)))
    assert answers == ["42"] * 12
    assert [len(trajectory.nodes) for trajectory in served(store)] == [4] * 12


async def test_replies_of_one_conversation_are_sampled_in_turn(store: Store) -> None:
    """Two requests that continue one node at once: two branches, and nothing stored while one is being sampled."""
    engine = Recorded([written(call_text(a=1, b=2)), written("one"), written("two")])
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with client(engine, store) as api:
        answer = await api.chat.completions.create(model=MODEL, messages=messages, tools=[ADD])  # type: ignore[list-item]
        message = answer.choices[0].message.model_dump()
        messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}]
        ask = [api.chat.completions.create(model=MODEL, messages=messages, tools=[ADD]) for _ in range(2)]  # type: ignore[list-item]
        await asyncio.gather(*ask)
    trajectories = served(store)
    assert sum(trajectory.sampled_tokens() for trajectory in trajectories) == sum(len(s.ids) for s in engine.given)
    trained = [node.message.content for t in trajectories for node in t.nodes if any(node.mask)]
    assert sorted(trained) == ["", "one", "two"]


# ---------------------------------------------------------------- how an episode ends


async def test_broken_call_is_sent_as_text_and_recorded_as_broken(store: Store) -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>'
    engine = Recorded([written(broken), written("sorry")])
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with client(engine, store) as api:
        answer = await api.chat.completions.create(model=MODEL, messages=messages, tools=[ADD])  # type: ignore[list-item]
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", broken, None)
        messages += [choice.message.model_dump(), {"role": "user", "content": "that was no JSON"}]
        await api.chat.completions.create(model=MODEL, messages=messages, tools=[ADD])  # type: ignore[list-item]
    first, second = served(store)
    for trajectory in (first, second):
        assert trajectory.nodes[1].message.tool_calls[0].arguments is None
        assert trajectory.nodes[1].message.tool_calls[0].error
    assert first.outcome.end is End.INTERRUPTED
    assert len(second.path()) == 4, "the echoed text is known as ours"


async def test_silence_ends_an_episode(store: Store) -> None:
    """What was being waited for is stored as interrupted; a client that comes back later goes on with the same ids."""
    asked = written("he", "llo", call_text(a=1, b=2))
    engine = Recorded([asked, written("later")])
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with client(engine, store, idle_seconds=0.05) as api:
        answer = await api.chat.completions.create(model=MODEL, messages=messages, tools=[ADD])  # type: ignore[list-item]
        while not served(store):
            await asyncio.sleep(0.01)
        message = answer.choices[0].message.model_dump()
        messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}]
        await api.chat.completions.create(model=MODEL, messages=messages, tools=[ADD])  # type: ignore[list-item]
    first, second = served(store)
    assert [first.outcome.end, second.outcome.end] == [End.INTERRUPTED, End.ANSWERED]
    assert second.tokens()[: len(first.tokens())] == first.tokens() == [*engine.asked[0], *asked]


async def test_one_session_that_cannot_be_stored_holds_up_no_other(store: Store, capsys: Any) -> None:
    with sqlite3.connect(store.location) as database:  # as a full disk would
        database.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON trajectories WHEN NEW.policy IS NOT NULL AND "
            "(SELECT count(*) FROM trajectories) = 0 BEGIN SELECT RAISE(ABORT, 'no room'); END"
        )
    engine = Recorded([written(call_text(a=1, b=2))])
    async with client(engine, store, idle_seconds=0.02) as api, httpx.AsyncClient() as http:
        root = str(api.base_url).removesuffix("/v1/")
        await api.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "go"}], tools=[ADD])  # type: ignore[list-item]
        while (await http.get(f"{root}/health")).json()["not_stored"] == 0:
            await asyncio.sleep(0.01)
        assert served(store) == []
        with sqlite3.connect(store.location) as database:
            database.execute("DROP TRIGGER refuse")
        while not served(store):
            await asyncio.sleep(0.01)
    assert len(served(store)) == 1
    assert "could not be stored" in capsys.readouterr().err


async def test_reply_cut_short_is_closed_before_the_next_turn(store: Store) -> None:
    engine = Recorded([written("a long reply"), written("go on")])
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with client(engine, store) as api:
        answer = await api.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        await api.chat.completions.create(model=MODEL, messages=messages)
    first, second = served(store)
    assert first.outcome.end is End.LENGTH and first.nodes[1].stop is StopReason.LENGTH
    assert second.nodes[2].tokens[0] == STOP and second.nodes[2].mask[0] == 0
    assert second.tokens() == RENDERER.prompt([node.message for node in second.nodes])


CONTRACT = Contract(
    environment="sums",
    version="1",
    tools=(
        Tool(name="add", description="Add two numbers.", parameters=ADD["function"]["parameters"], effect=Effect.WRITE),  # type: ignore[index]
    ),
    acts=(Act(end=End.REFUSED, marker="REFUSE"), Act(end=End.ANSWERED, marker="")),
)


async def test_contract_names_what_was_served(store: Store) -> None:
    """Tools that are the contract's carry its fingerprint, and its acts say how the episode ended; others don't."""
    engine = Recorded([written("REFUSE: no"), written("REFUSE: no")])
    ask: list[Any] = [{"role": "user", "content": "go"}]
    other = {"type": "function", "function": {**ADD["function"], "description": "Adds."}}  # type: ignore[dict-item]
    async with client(engine, store, contract=CONTRACT) as api:
        await api.chat.completions.create(model=MODEL, messages=ask, tools=[ADD])  # type: ignore[list-item]
        await api.chat.completions.create(model=MODEL, messages=ask, tools=[other])  # type: ignore[list-item]
    under, beside = served(store)
    assert under.contract == CONTRACT.fingerprint(RENDERER.tool_block(CONTRACT.tools, CONTRACT.acts))
    assert (under.environment, under.outcome.end) == ("sums", End.REFUSED)
    assert (beside.environment, beside.contract, beside.outcome.end) == (None, None, End.ANSWERED)
    assert engine.params[0].max_tokens == CONTRACT.budget.reply_tokens
    asked = RENDERER.delta(Message(role="user", content="go"), first=True, tools=CONTRACT.tools, acts=CONTRACT.acts)
    assert engine.asked[0] == [*asked, *RENDERER.reply_header()], "the prompt is the one that rollouts have"


async def test_a_call_that_is_turned_down_ends_nothing(store: Store) -> None:
    """To give up without a reason is an error that the client answers, in the same episode; with one, it is over."""
    schema = {"type": "object", "properties": {"reason": {"type": "string"}}, "required": ["reason"]}
    stop = Tool(name="give_up", description="Stop.", parameters=schema, effect=Effect.END, end=End.GAVE_UP)
    offered: list[Any] = [
        {"type": "function", "function": {"name": "give_up", "description": "Stop.", "parameters": schema}}
    ]
    engine = Recorded([written(call_text("give_up", text="x")), written(call_text("give_up", reason="x"))])
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with client(engine, store, contract=msgspec.structs.replace(CONTRACT, tools=(stop,))) as api:
        answer = await api.chat.completions.create(model=MODEL, messages=messages, tools=offered)
        assert served(store) == []
        message = answer.choices[0].message.model_dump()
        messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "error"}]
        await api.chat.completions.create(model=MODEL, messages=messages, tools=offered)
        (trajectory,) = served(store)
    assert trajectory.outcome.end is End.GAVE_UP and len(trajectory.nodes) == 4


# ---------------------------------------------------------------- what is refused


USER = [{"role": "user", "content": "go"}]
DEEP: Any = {}
for _ in range(300):
    DEEP = {"anyOf": [DEEP]}
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        ({"messages": USER}, "model"),
        ({"messages": []}, "length >= 1"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "usr"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "content[0]"),
        ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "colour"),
        ({"messages": [*USER, {"role": "assistant", "content": "x"}]}, "last message"),
        ({"messages": [*USER, {"role": "tool", "content": "x", "tool_call_id": "c"}]}, "answers no earlier call"),
        ({"messages": [*USER, CALLED, {"role": "tool", "content": "x", "tool_call_id": "d"}]}, "(calls: c)"),
        ({"messages": [{**CALLED, "role": "user"}]}, "only the assistant"),
        ({"messages": USER, "temprature": 1}, "did you mean 'temperature'?"),
        ({"messages": USER, "temperature": -1}, "temperature"),
        ({"messages": USER, "temperature": "hot"}, "temperature"),
        ({"messages": USER, "max_tokens": 0}, "max_tokens"),
        ({"messages": USER, "max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"messages": USER, "seed": "x"}, "seed"),
        ({"messages": USER, "n": 2}, "n=2 is not supported"),
        ({"messages": USER, "top_p": 0.9}, "top_p=0.9 is not supported"),
        ({"messages": USER, "stop": ["\n"]}, "stop"),
        ({"messages": USER, "logprobs": True}, "treadle.log_probs"),
        ({"messages": USER, "frequency_penalty": 0.5}, "never penalised"),
        ({"messages": USER, "tool_choice": "required"}, "the model chooses"),
        ({"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": USER, "tools": [{"type": "function", "function": {"name": "no good"}}]}, "name"),
        ({"messages": USER, "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"messages": USER, "tools": [ADD, ADD]}, "a second tool named 'add'"),
        (
            {"messages": USER, "tools": [{"function": {"name": "f", "parameters": {"properties": [1]}}}]},
            "tools[0].function.parameters",
        ),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "the model's context holds 256"),
        ({"messages": USER, "temperature": 1e-300}, "temperature 1e-300: give 0"),
        (b'{"messages": ' + b"[" * 2000 + b"]" * 2000 + b"}", "not valid JSON"),
        ({"messages": USER, "tools": [{"function": {"name": "f", "parameters": DEEP}}]}, "nested more than 64 deep"),
        ({"messages": USER, "seed": 10**30}, "can't be recorded"),
    ],
)
async def test_bad_requests_get_one_clear_answer(store: Store, body: Any, says: str) -> None:
    """F91: nothing is ignored silently, and nothing that can't be served reaches the engine or the store."""
    engine = Recorded([], context=256)
    if isinstance(body, dict):
        body = json.dumps(body if says == "model" else {"model": MODEL, **body}).encode()
    app = httpx.ASGITransport(create_app(engine, RENDERER, store, MODEL))
    async with httpx.AsyncClient(transport=app, base_url="http://test", verify=False) as http:
        answer = await http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert not engine.asked and not served(store)


async def test_calls_and_tools_that_are_odd_are_recorded_as_far_as_they_go(store: Store) -> None:
    """A number that no store holds makes a call a broken one; a schema's type may be anything."""
    huge = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": 123456789012345678901234567890}'},
    }
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [huge]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    odd = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": [{"x": 1}, "string"]}}}}}
    app = create_app(Recorded([written("ok")]), RENDERER, store, MODEL)
    async with running(app) as url, httpx.AsyncClient() as http:
        body = {"model": MODEL, "messages": messages, "tools": [odd]}
        answer = await http.post(f"{url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
    (trajectory,) = served(store)
    (call,) = trajectory.nodes[1].message.tool_calls
    assert call.arguments is None and call.error and "123456789012345678901234567890" in call.raw


async def test_harmless_parameters_are_taken(store: Store) -> None:
    neutral = {"n": 1, "top_p": 1.0, "stop": None, "presence_penalty": 0, "logprobs": False, "tool_choice": "auto"}
    labels = {"user": "ann", "metadata": {"case": "7"}}
    options = {"temperature": 0.5, "seed": 11, "max_completion_tokens": 9}
    engine = Recorded([written("ok")])
    async with client(engine, store) as api:
        await api.chat.completions.create(model=MODEL, messages=USER, **neutral, **labels, **options)  # type: ignore[call-overload]
    assert engine.params == [SamplingParams(temperature=0.5, max_tokens=9, stop_ids=(STOP,), seed=11)]
    (trajectory,) = served(store)
    assert trajectory.labels == {"user": "ann", "case": "7"} and trajectory.sampling == engine.params[0]


async def test_another_model_is_not_found(store: Store) -> None:
    """F68: asking for the base by name is an error that names what is served."""
    async with client(Recorded([]), store) as api:
        with pytest.raises(openai.NotFoundError, match=f"ask for '{MODEL}'"):
            await api.chat.completions.create(model="base", messages=USER)  # type: ignore[arg-type]
        assert [model.id for model in (await api.models.list()).data] == [MODEL]


async def test_health_says_what_is_open(store: Store) -> None:
    engine = Recorded([written(call_text(a=1, b=2)), written("done")])
    async with client(engine, store) as api, httpx.AsyncClient() as http:
        for _ in range(2):
            await api.chat.completions.create(model=MODEL, messages=USER, tools=[ADD])  # type: ignore[list-item, arg-type]
        health = (await http.get(str(api.base_url).replace("/v1/", "/health"))).json()
    expected = {
        "status": "ok",
        "model": MODEL,
        "version": 3,
        "open": 1,
        "replies": 2,
        "stored": 1,
        "not_stored": 0,
        "rewritten": 0,
    }
    assert health == expected


async def test_taken_port_is_a_clear_error(store: Store) -> None:
    app = create_app(Recorded([]), RENDERER, store, MODEL)
    async with running(app) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(UserError, match=f"{port}.*choose another port"):
            async with running(app, port=port):
                pass


# ---------------------------------------------------------------- kill -9

SERVER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from test_serve import MODEL, RENDERER, Recorded, Store, written
from treadle.serve.app import create_app, serve
app = create_app(Recorded([written("kept")]), RENDERER, Store({database!r}), MODEL)
asyncio.run(serve(app, "127.0.0.1", 0, lambda url: print(url, flush=True)))
"""


async def test_kill_9_loses_no_finished_episode(tmp_path: Path) -> None:
    database = str(tmp_path / "treadle.db")
    code = SERVER.format(tests=str(Path(__file__).parent), database=database)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as api:
                await api.chat.completions.create(model=MODEL, messages=USER)  # type: ignore[arg-type]
        finally:
            os.kill(server.pid, signal.SIGKILL)
    (trajectory,) = served(Store(database))
    assert trajectory.path()[-1].message.content == "kept"
