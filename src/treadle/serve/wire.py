"""The OpenAI chat-completions wire format, read into our nouns and written from them.

What a request asks for is honoured or refused with a reason. Two things that clients send by default are read and left
at that: a tool's `strict`, and `include_obfuscation`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from treadle.engine.base import SMALLEST_TEMPERATURE, Sample
from treadle.errors import UserError, unknown
from treadle.pool.formats.openai_messages import read_call, write_call
from treadle.render.base import same_message
from treadle.types import Effect, Message, StopReason, Tool, unstorable

# parameters that may be sent with the value that changes nothing, and why another value is refused
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "one choice a request"),
    "top_p": ((1,), "sampling is never filtered"),
    "top_k": ((-1, 0), "sampling is never filtered"),
    "presence_penalty": ((0,), "sampling is never penalised"),
    "frequency_penalty": ((0,), "sampling is never penalised"),
    "repetition_penalty": ((1,), "sampling is never penalised"),
    "logit_bias": (({},), "sampling is never biased"),
    "stop": (([],), "a reply ends at the model's own stop ids"),
    "logprobs": ((False,), "every reply already carries `treadle.log_probs`"),
    "tool_choice": (("auto",), "the model chooses"),
    "parallel_tool_calls": ((True,), "the model chooses"),
    "response_format": (({"type": "text"},), "replies are text and tool calls"),
}


class RequestError(UserError):
    """A request that can't be served, as an HTTP status and an OpenAI error body."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, "invalid_request_error", param, code)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


# ---------------------------------------------------------------- request


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what a client may send."""


class TextPart(Wire, frozen=True):
    text: str
    type: Literal["text"]


class FunctionCall(Wire, frozen=True):
    name: str
    arguments: str


class Call(Wire, frozen=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None


class WireMessage(Wire, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    # clients echo these back, empty
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None

    def message(self) -> Message:
        content = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content
        return Message(
            role="system" if self.role == "developer" else self.role,
            content=content or "",
            tool_calls=tuple(read_call(c.id, c.function.name, c.function.arguments) for c in self.tool_calls or ()),
            tool_call_id=self.tool_call_id,
            name=self.name,
            reasoning=self.reasoning_content or None,
        )


class Parameters(msgspec.Struct, frozen=True):
    """The part of a JSON schema that has to be there for a tool to be shown to the model."""

    properties: dict[str, Any] = {}
    required: list[str] = []


class Function(Wire, frozen=True):
    name: Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool | None = None  # replies are not forced into the schema: a call that breaks it comes as it was written


class WireTool(Wire, frozen=True):
    function: Function
    type: Literal["function"] = "function"


class StreamOptions(Wire, frozen=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class Request(Wire, frozen=True):
    """The parameters that are honoured."""

    model: str
    messages: Annotated[list[WireMessage], msgspec.Meta(min_length=1)]
    tools: list[WireTool] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    def read_messages(self) -> list[Message]:
        messages = [message.message() for message in self.messages]
        _check_order(messages)
        return messages

    def read_tools(self, known: Sequence[Tool] = ()) -> tuple[Tool, ...]:
        """A tool that a contract knows keeps the contract's effect, failures and time limit."""
        found: dict[str, Tool] = {}
        for i, wire in enumerate(self.tools or ()):
            function = wire.function
            if function.name in found:
                raise RequestError(f"tools[{i}]: a second tool named {function.name!r}", "tools")
            try:
                msgspec.convert(function.parameters, Parameters)
            except msgspec.ValidationError as error:
                raise RequestError(f"tools[{i}].function.parameters: {error}", "tools") from None
            tool = Tool(function.name, function.description, function.parameters, Effect.READ)
            found[tool.name] = next((t for t in known if _same_tool(t, tool)), tool)
        return tuple(found.values())

    def labels(self) -> dict[str, str]:
        return {**(self.metadata or {}), **({"user": self.user} if self.user else {})}


def read_request(body: bytes, model: str) -> Request:
    """Raises RequestError: 400 for what can't be read or honoured, 404 for another model's name."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise RequestError("the request body must be a JSON object")
    if fault := unstorable(data):
        raise RequestError(f"the request holds what can't be recorded: {fault}")
    honoured = {field.name for field in msgspec.structs.fields(Request)}
    for key, value in list(data.items()):
        if key in NEUTRAL:
            allowed, why = NEUTRAL[key]
            if value is not None and value not in allowed:
                raise RequestError(f"{key}={json.dumps(value)} is not supported ({why}): leave it out", key)
            del data[key]
        elif key not in honoured:
            raise RequestError(unknown("parameter", key, [*honoured, *NEUTRAL]), key)
    try:
        request = msgspec.convert(data, Request)
    except msgspec.ValidationError as error:
        raise RequestError(str(error)) from None
    if request.temperature and request.temperature < SMALLEST_TEMPERATURE:
        message = f"temperature {request.temperature}: give 0 (greedy) or at least {SMALLEST_TEMPERATURE:g}"
        raise RequestError(message, "temperature")
    if request.model != model:
        raise RequestError(f"no model {request.model!r} here: ask for {model!r}", "model", 404, "model_not_found")
    return request


def _same_tool(a: Tool, b: Tool) -> bool:
    return (a.name, a.description, a.parameters) == (b.name, b.description, b.parameters)


def _check_order(messages: Sequence[Message]) -> None:
    """The last message is for the model to answer, and every tool result answers a call made before it."""
    if messages[-1].role == "assistant":
        raise RequestError("the last message is the assistant's: end with a user or tool message", "messages")
    calls: set[str] = set()
    for i, message in enumerate(messages):
        calls.update(call.id for call in message.tool_calls)
        if message.tool_calls and message.role != "assistant":
            raise RequestError(f"messages[{i}]: only the assistant can have tool_calls", "messages")
        if message.role == "tool" and message.tool_call_id not in calls:
            known = ", ".join(sorted(calls)) or "none"
            raise RequestError(
                f"messages[{i}].tool_call_id {message.tool_call_id!r} answers no earlier call (calls: {known})",
                "messages",
            )


# ---------------------------------------------------------------- reply


def as_sent(message: Message, text: str) -> Message:
    """The message a client gets. `text` is the reply as written: a reply with a broken call goes out as plain text."""
    if all(call.arguments is not None for call in message.tool_calls):
        return message
    return Message(role=message.role, content=text)


def echoes(sent: Message, echoed: Message) -> bool:
    """Whether a client's message is one it had from us or sent before.

    Ids add no tokens, but they tell two conversations apart that say the same.
    """
    ids = [call.id for call in sent.tool_calls], sent.tool_call_id
    return ids == ([call.id for call in echoed.tool_calls], echoed.tool_call_id) and same_message(sent, echoed)


class Reply(msgspec.Struct, frozen=True):
    """One answer, ready to be written whole or in pieces."""

    id: str
    model: str
    created: int
    session: str
    message: Message
    sample: Sample
    prompt_tokens: int

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.message.content, "refusal": None}
        if self.message.reasoning is not None:
            message["reasoning_content"] = self.message.reasoning
        if self.message.tool_calls:
            message["content"] = self.message.content or None
            message["tool_calls"] = [write_call(call) for call in self.message.tool_calls]
        choice = {"index": 0, "message": message, "finish_reason": self._finish_reason(), "logprobs": None}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage(), "treadle": self._exact()}

    def pieces(self, include_usage: bool) -> Iterator[dict[str, Any]]:
        """Chunks that add up to `whole()`."""
        yield self._piece({"role": "assistant", "content": ""})
        if self.message.reasoning is not None:
            yield self._piece({"reasoning_content": self.message.reasoning})
        if self.message.content:
            yield self._piece({"content": self.message.content})
        for index, call in enumerate(map(write_call, self.message.tool_calls)):
            function = call["function"]
            yield self._piece({"tool_calls": [{"index": index, **call, "function": {**function, "arguments": ""}}]})
            yield self._piece({"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]})
        yield {**self._piece({}, self._finish_reason()), "treadle": self._exact()}
        if include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def _piece(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        version = max((version for version in self.sample.versions if version is not None), default="unknown")
        fingerprint = f"{self.model}@{version}"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": fingerprint,
        }

    def _finish_reason(self) -> str:
        if self.sample.stop is not StopReason.STOP:
            return "length"
        return "tool_calls" if self.message.tool_calls else "stop"

    def _usage(self) -> dict[str, int]:
        prompt, completion = self.prompt_tokens, len(self.sample.ids)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _exact(self) -> dict[str, Any]:
        """The sampled ids and what is known of them: an addition to the OpenAI form."""
        sample = self.sample
        exact = {"token_ids": sample.ids, "log_probs": sample.log_probs, "versions": sample.versions}
        return {"session": self.session, **exact}
