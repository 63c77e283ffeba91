from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toykit import CALL_TOKEN, END, ID, toy_renderer
from treadle.errors import DataError
from treadle.render.hermes import MARKERS, read_reply, write_reply
from treadle.types import Message, ToolCall, to_msgpack


def asks(*calls: ToolCall) -> Message:
    return Message(role="assistant", tool_calls=calls)


# ---------------------------------------------------------------- calls as text (F18 F19)


def test_arguments_are_written_once_and_unescaped() -> None:
    """F18 F19"""
    text = write_reply(asks(ToolCall(id="c", name="weather", arguments={"city": "北京", "n": {"a": [1]}})))
    assert '"arguments": {"city": "北京", "n": {"a": [1]}}' in text and "\\u" not in text


def test_sampled_spacing_and_key_order_are_kept() -> None:
    """F18"""
    text = '<tool_call> {"arguments":{"b":1, "a":2},"name":"f"}</tool_call>'
    assert write_reply(read_reply(text)) == text


def test_a_broken_call_without_its_text_cannot_be_rendered() -> None:
    with pytest.raises(DataError, match="'c9' has neither"):
        write_reply(asks(ToolCall(id="c9", name="f", arguments=None)))


# ---------------------------------------------------------------- reading calls (F22 - F27)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"name": "f", "arguments": {"cmd": "ls', "not valid JSON"),
        ('{"name": "f", "arguments": {"a": 1}', "not valid JSON"),
        ('{"name": "f", "arguments": {"a": "x\ny"}}', "not valid JSON"),
        ('{"name": "f", "arguments": {"a": "say "hi""}}', "not valid JSON"),
        ('{"name": "f", "arguments": {"a": 1}}}', "expected </tool_call>"),
        ("", "not valid JSON"),
        ("f(1)", "not valid JSON"),
        ("[1]", "expected a JSON object, found list"),
        ('{"arguments": {}}', '"name" must be'),
        ('{"name": "", "arguments": {}}', '"name" must be'),
        ('{"name": " ", "arguments": {}}', '"name" must be'),
        ('{"name": null, "arguments": {}}', '"name" must be'),
        ('{"name": ["f"], "arguments": {}}', '"name" must be'),
        ('{"name": "f", "arguments": [1]}', "must be an object, found list"),
        ('{"name": "f", "arguments": 0}', "must be an object, found int"),
        ('{"name": "f", "arguments": false}', "must be an object, found bool"),
        ('{"name": "f", "arguments": "ls -l"}', "not valid JSON"),
        ('{"name": "f", "arguments": "{} x"}', "found text"),
        ('{"name": "f", "arguments": "\\"{}\\""}', "expected a JSON object, found str"),
        ('{"name": "f", "args": {"a": 1}}', "\"arguments\" is missing \\(found 'args'"),
        ('{"name": "f", "name": "g", "arguments": {}}', "same key twice"),
        ('{"name": "f", "arguments": {"a": NaN}}', "not a finite number"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "not a finite number"),
        ('{"name": "f", "arguments": {"a": 99999999999999999999999}}', "not valid JSON"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "not valid JSON"),
        ('{"name": "f", "arguments": ' + "[" * 100_000, "not valid JSON"),
    ],
)
def test_broken_call_is_kept_with_its_error(body: str, error: str) -> None:
    """F22 F23 F27: neither an exception, nor plain text, nor a call with empty arguments; text around it survives."""
    message = read_reply(f'so\n<tool_call>{body}</tool_call><tool_call>{{"name": "g"}}</tool_call>')
    broken, good = message.tool_calls
    assert message.content == "so"
    assert broken.arguments is None and broken.raw == body
    assert re.search(error, broken.error)
    assert (good.name, good.arguments, good.id) == ("g", {}, "call_1")
    to_msgpack(message)


def test_missing_close_marker_is_a_broken_call() -> None:
    """F23: at the end of the reply, and before another call."""
    one = '{"name": "f", "arguments": {}}'
    (cut,) = read_reply(f"<tool_call>{one}").tool_calls
    assert (cut.name, cut.arguments, cut.raw) == ("f", None, one) and "</tool_call>" in cut.error
    first, second = read_reply(f"<tool_call>{one}\n<tool_call>{one}</tool_call>").tool_calls
    assert first.arguments is None and second.arguments == {}


def test_three_outcomes_are_distinct() -> None:
    """F23: no call, good call, broken call."""
    texts = ["no call", '<tool_call>{"name": "f"}</tool_call>', "<tool_call>{</tool_call>"]
    found = [[c.arguments is None for c in read_reply(text).tool_calls] for text in texts]
    assert found == [[], [False], [True]]


@pytest.mark.parametrize(
    ("text", "names", "reasoning"),
    [
        ("<think>{A}</think>{B}", ["B"], "{A}"),
        ("so <think>{A}</think>{B}", ["B"], "{A}"),
        ("<think>{A}</think><think>{A}{A}</think>{B}", ["B"], "{A}\n{A}{A}"),
        ("{B}<think>{A}</think>{C}", ["B", "C"], "{A}"),
        ("<think>{A}", [], "{A}"),
        ("<think></think>", [], ""),
    ],
)
def test_drafts_inside_reasoning_are_not_calls(text: str, names: list[str], reasoning: str) -> None:
    """F24"""
    for name in "ABC":
        body = f'<tool_call>{{"name": "{name}"}}</tool_call>'
        text, reasoning = text.replace(f"{{{name}}}", body), reasoning.replace(f"{{{name}}}", body)
    message = read_reply(text)
    assert [c.name for c in message.tool_calls] == names
    assert message.reasoning == reasoning


@pytest.mark.parametrize("special", [False, True])
def test_calls_are_found_whether_or_not_tags_are_special(special: bool) -> None:
    """F25: and a log's call renders to those very ids; the text view has no end token."""
    toy = toy_renderer(special_calls=special)
    sampled = [ID["<tool_call>"], ID[CALL_TOKEN], ID["</tool_call>"], END]
    message = toy.parse(sampled)
    assert [(c.name, c.arguments) for c in message.tool_calls] == [("look", {})]
    header = len(toy.reply_header())
    assert toy.reply(message)[0][header:] == sampled
    assert "<|im_end|>" not in toy.text(message)
    assert (ID["<tool_call>"] in toy.delta(Message(role="tool", content="<tool_call>"), first=True)) == (not special)


def test_parallel_calls_keep_order_ids_and_prose() -> None:
    """F26"""
    calls = [
        {"name": "f", "arguments": {"a": {"b": [1, {"c": "</tool_call>"}]}}},
        {"name": "f", "arguments": {"ü": "北京"}},
    ]
    blocks = [f"<tool_call>\n{json.dumps(c, ensure_ascii=False)}\n</tool_call>" for c in calls]
    message = read_reply(f"text\n{blocks[0]}\nand\n{blocks[1]}\nend")
    assert message.content == "text\nand\nend"
    assert [(c.id, c.arguments) for c in message.tool_calls] == [
        (f"call_{i}", c["arguments"]) for i, c in enumerate(calls)
    ]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [('"{\\"a\\":1}"', {"a": 1}), ("null", {}), ("{}", {}), ('" {} "', {})],
)
def test_arguments_of_the_wrong_type_are_read_once(written: str, arguments: dict[str, Any]) -> None:
    """F27"""
    (found,) = read_reply(f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>').tool_calls
    assert found.arguments == arguments and found.error == ""


@given(
    st.lists(st.sampled_from([*MARKERS, "{", "}", '"name"', ":", '"f"', ",", "\n", "x", "\\"]), max_size=25).map(
        "".join
    )
)
@settings(max_examples=300, deadline=None)
def test_reading_never_raises_and_is_stable(text: str) -> None:
    """F22 F23: each opened call outside reasoning is accounted for, and what is read can be stored and written."""
    message = read_reply(text)
    assert message == read_reply(text)
    assert len({c.id for c in message.tool_calls}) == len(message.tool_calls)
    assert bool(message.tool_calls) or "<tool_call>" not in text or message.reasoning is not None
    to_msgpack(message)
    write_reply(message)
