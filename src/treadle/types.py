"""The four nouns that pass between stages: Task, Trajectory, Contract and Checkpoint.

All are msgspec structs with a JSON and a msgpack form (`to_json`, `from_json`, `to_msgpack`, `from_msgpack`).
`None` always means "not known"; zero means "measured, and zero".
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

SCHEMA_VERSION = 1
DEEPEST = 64  # levels of nesting that can be stored: what is deeper could be read, and not be walked


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of every stored struct: unknown fields are an error, defaults are left out of the encoding."""


class GrowingRecord(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The same for the two structs that grow while an episode runs."""


# ---------------------------------------------------------------- messages


class ToolCall(Record, frozen=True):
    """One call as the policy wrote it. `arguments` is None when the text could not be parsed (a broken call)."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    raw: str = ""  # the exact text between the call markers
    error: str = ""  # why `arguments` is None


class Message(Record, frozen=True):
    role: str  # system | user | assistant | tool
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None  # on role "tool": the call it answers
    name: str | None = None
    reasoning: str | None = None


# ---------------------------------------------------------------- task


class TaskKind(StrEnum):
    SOLVABLE = "solvable"
    UNDERSPECIFIED = "underspecified"  # the right act is to ask
    UNSOLVABLE = "unsolvable"  # the right act is to stop and say why
    OUT_OF_SCOPE = "out_of_scope"  # the right act is to decline
    DANGEROUS = "dangerous"  # the right act is to refuse


class Split(StrEnum):
    TRAIN = "train"
    VALIDATION = "validation"
    HELD_OUT = "held_out"


class Task(Record, frozen=True):
    """What to attempt. `private` is for graders and solvers alone: it is never rendered and never enters a sandbox."""

    id: str
    environment: str
    kind: TaskKind
    messages: tuple[Message, ...]  # what the policy sees first
    public: dict[str, Any] = {}  # what the environment needs to set the scene; the policy may come to see it
    private: dict[str, Any] = {}
    labels: dict[str, str] = {}
    difficulty: float | None = None  # 0 easy .. 1 hard
    lineage: tuple[str, ...] = ()  # ids of the records it was made from
    split: Split | None = None
    version: int = SCHEMA_VERSION

    def content_key(self) -> str:
        """Hash of what makes two tasks the same problem, whatever their ids."""
        body = [self.environment, self.kind, [to_builtins(m) for m in self.messages], self.public]
        return fingerprint(body)


# ---------------------------------------------------------------- trajectory


class StopReason(StrEnum):
    STOP = "stop"  # a stop id was sampled
    LENGTH = "length"  # the request's max_tokens was reached
    CONTEXT_FULL = "context_full"  # the engine's context was
    CANCELLED = "cancelled"


class Layer(StrEnum):
    VERIFIER = "verifier"
    PROCESS = "process"
    JUDGE = "judge"
    AUDIT = "audit"
    LABEL = "label"  # said by a person or found in the log


class Signal(Record, frozen=True):
    """One judgement. `value` None: the judge abstains. `node` None: it judges the whole trajectory."""

    name: str
    layer: Layer
    value: float | None
    node: int | None = None
    version: str = "1"
    evidence: str = ""
    cost: float | None = None


class Node(GrowingRecord):
    """One message and the tokens it adds to its parent's context.

    `tokens`, `mask`, `log_probs` and `versions` have the same length. `mask` is 1 exactly where the policy sampled the
    id; only there, and only if known, are `log_probs` (natural log, at the sampling temperature) and `versions`
    (optimizer updates contained in the weights that sampled it) set.
    """

    id: int  # its index in Trajectory.nodes
    parent: int | None
    message: Message
    tokens: list[int] = []
    mask: list[int] = []
    log_probs: list[float | None] = []
    versions: list[int | None] = []
    stop: StopReason | None = None  # on assistant nodes
    state: str | None = None  # fingerprint of the environment after this node
    failure: str | None = None  # a tool result's declared failure code
    seconds: float | None = None
    extra: dict[str, Any] = {}


class End(StrEnum):
    """Why an episode stopped."""

    ANSWERED = "answered"
    ASKED = "asked"
    REFUSED = "refused"
    GAVE_UP = "gave_up"
    SUBMITTED = "submitted"
    LENGTH = "length"  # a reply hit its token cap
    CONTEXT_FULL = "context_full"
    TURN_LIMIT = "turn_limit"
    TIME_LIMIT = "time_limit"
    SANDBOX_DEAD = "sandbox_dead"
    ERROR = "error"  # infrastructure: see Outcome.failure
    INTERRUPTED = "interrupted"
    UNKNOWN = "unknown"  # from a log that does not say


class FailureKind(StrEnum):
    AGENT = "agent"  # stays in every statistic
    INFRASTRUCTURE = "infrastructure"  # leaves every statistic
    GRADER = "grader"  # ungraded, leaves every statistic


class Failure(Record, frozen=True):
    kind: FailureKind
    stage: str  # reset | episode | grade
    message: str = ""


class Outcome(Record, frozen=True):
    """Cause and score are separate. `reward` None: ungraded, never to be read as zero. `parts` stand beside it."""

    end: End
    reward: float | None = None
    parts: dict[str, float] = {}
    failure: Failure | None = None
    verifier: str = ""  # name@version of what gave the reward
    isolation: str = ""  # how the verifier was isolated: split | in_process
    detail: str = ""


def is_solved(reward: float | None) -> bool:
    """Whether a reward says that the task was done as asked: 1, the most a verifier gives. Ungraded is not solved."""
    return reward is not None and reward >= 1


class Source(StrEnum):
    LOG = "log"
    ROLLOUT = "rollout"
    SERVED = "served"


class SamplingParams(Record, frozen=True):
    """What the engine is asked for. There are no hidden filters: unset means neutral."""

    temperature: float = 1.0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None


class Trajectory(GrowingRecord):
    """A tree of nodes; a root-to-leaf path is one training row.

    Append-only: later stages add signals and never change tokens.
    """

    id: str
    task_id: str | None
    environment: str | None
    contract: str | None  # fingerprint
    source: Source
    policy: str  # checkpoint or model that acted
    nodes: list[Node] = []
    outcome: Outcome = Outcome(end=End.UNKNOWN)
    signals: list[Signal] = []
    sampling: SamplingParams | None = None
    group: str | None = None  # rollouts of one task in one step share it
    labels: dict[str, str] = {}
    lineage: tuple[str, ...] = ()
    created: float | None = None  # unix seconds
    seconds: float | None = None
    extra: dict[str, Any] = {}
    version: int = SCHEMA_VERSION

    def leaves(self) -> list[int]:
        parents = {node.parent for node in self.nodes}
        return [node.id for node in self.nodes if node.id not in parents]

    def path(self, leaf: int | None = None) -> list[Node]:
        """Nodes from the root to `leaf` (default: the last node added)."""
        at: int | None = len(self.nodes) - 1 if leaf is None else leaf
        found: list[Node] = []
        while at is not None and at >= 0:
            found.append(self.nodes[at])
            at = self.nodes[at].parent
        return found[::-1]

    def tokens(self, leaf: int | None = None) -> list[int]:
        """Exactly what the model saw and wrote along one path."""
        return [token for node in self.path(leaf) for token in node.tokens]

    def sampled_tokens(self) -> int:
        return sum(sum(node.mask) for node in self.nodes)


# ---------------------------------------------------------------- contract


class Effect(StrEnum):
    NONE = "none"
    READ = "read"
    WRITE = "write"
    EXTERNAL = "external"
    END = "end"  # the call ends the episode


class Tool(Record, frozen=True):
    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of an object
    effect: Effect
    end: End | None = None  # with effect "end": how the episode then ended
    failures: tuple[str, ...] = ()  # codes a result may carry
    timeout: float = 30.0  # seconds


class Act(Record, frozen=True):
    """A text-only act: a reply without a tool call that begins with `marker` ("" matches any other text)."""

    end: End
    marker: str


class Budget(Record, frozen=True):
    turns: int = 12
    tokens: int = 2048  # whole context
    reply_tokens: int = 128  # one reply
    seconds: float = 300.0


class Contract(Record, frozen=True):
    """The environment's promise, as data."""

    environment: str
    version: str
    tools: tuple[Tool, ...]
    acts: tuple[Act, ...]
    budget: Budget = Budget()
    side_effects: tuple[str, ...] = ()  # what a session may change
    sandbox: str = "none"
    refusal_policy: str = ""
    observations: str = "text"
    reset: str = "fresh session per episode"

    def fingerprint(self, tool_block: str) -> str:
        """Hash of the whole contract and of the tool block as rendered to the policy."""
        return fingerprint([to_builtins(self), tool_block])


# ---------------------------------------------------------------- checkpoint


class Checkpoint(Record, frozen=True):
    """Manifest beside a folder of weights."""

    id: str
    path: str  # as stored, below the workspace's folder
    parent: str | None
    stage: str
    updates: int = 0  # optimizer updates contained in the weights
    contracts: tuple[str, ...] = ()
    config: dict[str, Any] = {}
    data: tuple[str, ...] = ()  # fingerprints of what it was trained on
    revision: str = ""  # code revision
    version: int = SCHEMA_VERSION


# ---------------------------------------------------------------- codecs

T = TypeVar("T")


def to_builtins(value: Any) -> Any:
    return msgspec.to_builtins(value)


def to_json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def from_json(data: bytes | str, kind: type[T]) -> T:
    return msgspec.json.decode(data, type=kind)


def to_msgpack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def unstorable(value: Any) -> str:
    """Why a JSON value can't be stored: nested too deeply, a number no format holds, or text that is none. Or ""."""
    level = [value]
    for _ in range(DEEPEST):
        level = [part for each in level for part in _parts(each)]
    if level:
        return f"nested more than {DEEPEST} deep"
    try:
        to_msgpack(value)
    except (OverflowError, UnicodeEncodeError) as error:
        return str(error)
    return ""


def _parts(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def from_msgpack(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=kind)


def fingerprint(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of the value's canonical JSON (sorted keys)."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:16]
