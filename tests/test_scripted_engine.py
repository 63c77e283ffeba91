from __future__ import annotations

import pytest

from toykit import CALL_TOKEN, END, ID, ids, toy_renderer
from treadle.engine.base import Engine, Sample
from treadle.engine.scripted import FixedEngine, Reply, Script, ScriptedEngine
from treadle.errors import EngineError
from treadle.types import Message, SamplingParams, StopReason, ToolCall

PARAMS = SamplingParams(stop_ids=(END,))


async def test_a_script_reads_the_context_and_has_probability_one() -> None:
    renderer = toy_renderer()
    engine: Engine = ScriptedEngine(renderer, lambda session: lambda prompt: "yes" if "hello" in prompt else "no", 3)
    context = [*renderer.delta(Message(role="user", content="hello"), first=True), *renderer.reply_header()]
    sample = await engine.sample(context, PARAMS, "a")
    assert sample == Sample(ids=[ID["yes"], END], log_probs=[0.0, 0.0], versions=[3, 3], stop=StopReason.STOP)


async def test_each_session_has_its_own_script_until_released() -> None:
    made: list[str] = []

    def script(session: str) -> Script:
        made.append(session)
        words = iter(["one", "two"])
        return lambda prompt: next(words)

    engine = ScriptedEngine(toy_renderer(), script)
    said = [(await engine.sample([0], PARAMS, session)).ids[0] for session in ("a", "b", "a")]
    assert said == ids("one one two") and made == ["a", "b"]
    await engine.release("a")
    await engine.release("never seen")
    assert (await engine.sample([0], PARAMS, "a")).ids[0] == ID["one"]


async def test_a_script_may_wait_and_may_answer_with_a_message() -> None:
    """F25: a call's tags become the special ids that the model would have sampled."""
    look = Message(role="assistant", tool_calls=(ToolCall(id="x", name="look", arguments={}, raw=CALL_TOKEN),))

    async def later(prompt: str) -> Reply:
        return look

    renderer = toy_renderer(special_calls=True)
    sample = await ScriptedEngine(renderer, lambda session: later).sample([0], PARAMS, "a")
    assert sample.ids == [ID["<tool_call>"], ID[CALL_TOKEN], ID["</tool_call>"], END]
    assert renderer.parse(sample.ids).tool_calls[0].name == "look"


@pytest.mark.parametrize(
    ("context", "max_tokens", "written", "stop"),
    [
        (8, 8, "he llo", StopReason.STOP),
        (8, 3, "he llo", StopReason.STOP),  # exactly full
        (8, 2, "he llo", StopReason.LENGTH),
        (4, 8, "he llo", StopReason.CONTEXT_FULL),
        (4, 2, "he llo", StopReason.LENGTH),
        (2, 8, "", StopReason.CONTEXT_FULL),
        (1, 8, "", StopReason.CONTEXT_FULL),  # the context is over-full already
    ],
)
async def test_a_reply_is_cut_and_says_why(context: int, max_tokens: int, written: str, stop: StopReason) -> None:
    """F8: the stop reason and the text written so far survive."""
    engine = FixedEngine({"a": [[*ids("he llo"), END]]}, context=context)
    sample = await engine.sample([0, 3], SamplingParams(stop_ids=(END,), max_tokens=max_tokens), "a")
    expected = [*(ids(written) if written else []), *([END] if stop is StopReason.STOP else [])]
    assert (sample.ids, sample.stop) == (expected, stop)
    assert len(sample.log_probs) == len(sample.versions) == len(sample.ids)


async def test_any_stop_id_ends_a_reply() -> None:
    engine = FixedEngine({"a": [ids("one two three")]})
    sample = await engine.sample([0], SamplingParams(stop_ids=(END, ID["two"])), "a")
    assert sample.ids == ids("one two") and sample.stop is StopReason.STOP


async def test_fixed_replies_come_in_order_and_what_was_asked_is_kept() -> None:
    """F12: a test can compare the next context with the ids that were sampled."""
    cut = Sample(ids=ids("no"), log_probs=[-0.5], versions=[7], stop=StopReason.LENGTH)
    engine = FixedEngine({"a": [[*ids("he llo"), END], cut], "b": [[END]]}, version=1)
    first = await engine.sample([0], PARAMS, "a")
    assert await engine.sample([0, *first.ids], PARAMS, "a") == cut
    assert (await engine.sample([5], PARAMS, "b")).versions == [1]
    assert engine.seen == {"a": [[0], [0, *ids("he llo"), END]], "b": [[5]]}
    with pytest.raises(EngineError, match="session 'a' has 2 fixed replies; request 3 has none"):
        await engine.sample([0], PARAMS, "a")
    with pytest.raises(EngineError, match="session 'c' has 0 fixed replies"):
        await engine.sample([0], PARAMS, "c")


async def test_loaded_weights_move_the_version() -> None:
    for engine in (ScriptedEngine(toy_renderer(), lambda session: lambda prompt: "ok"), FixedEngine({"a": [[END]]})):
        await engine.load_weights({}, 4)
        assert engine.version == 4 and (await engine.sample([0], PARAMS, "a")).versions[0] == 4
        await engine.close()
