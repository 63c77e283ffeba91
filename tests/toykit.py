"""The toy kit of the fault list: a 40-token word-level tokenizer, ChatML on it, a variant that forgets reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from treadle.render.chatml import ChatML
from treadle.types import Act, Effect, Message, Tool

CALL_TOKEN = '{"name":"look","arguments":{}}'
VOCABULARY = (
    *("<|im_start|>", "<|im_end|>", "<pad>", "\n", " ", "<unk>"),
    *("system", "user", "assistant", "tool", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("he", "llo", "hello", CALL_TOKEN, '{"name":"look",', '"arguments":{}}', "hi", "yes", "no", "ok"),
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("plus", "is", "look", "SECRET=4", "done", "wait"),
)
ID = {token: i for i, token in enumerate(VOCABULARY)}
START, END, PAD, NEWLINE = 0, 1, 2, 3

LOOK = Tool(name="look", description="look around", parameters={"type": "object", "properties": {}}, effect=Effect.READ)


def toy_tokenizer(special_calls: bool = False) -> Tokenizer:
    """Words, spaces and newlines are tokens of their own. `special_calls` registers the call tags as special tokens."""
    assert len(VOCABULARY) == 40
    tokenizer = Tokenizer(models.WordLevel(ID, unk_token="<unk>"))
    tags = r"</?think>" if special_calls else r"</?think>|</?tool_call>"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(rf"\n| |{tags}|<|[^\s<]+"), "isolated"
    )  # "<|im_end|>" is unknown
    tokenizer.decoder = decoders.Fuse()
    special = ["<|im_start|>", "<|im_end|>", "<pad>", *(["<tool_call>", "</tool_call>"] if special_calls else [])]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def toy_renderer(special_calls: bool = False) -> ChatML:
    return ChatML(toy_tokenizer(special_calls))


def ids(text: str) -> list[int]:
    """Ids of words parted by spaces, without ids for the spaces: `ids("he llo")` are two ids."""
    return [ID[word] for word in text.split(" ")]


class ForgetfulChatML(ChatML):
    """A "thinking" template: reasoning of all replies but the last one is dropped, so history is rewritten."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), acts: Sequence[Act] = ()) -> list[int]:
        replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
        kept = [replace(m, reasoning=None) if i in replies[:-1] else m for i, m in enumerate(messages)]
        return super().prompt(kept, tools, acts)
