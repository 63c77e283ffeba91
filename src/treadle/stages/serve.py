"""serve: checkpoint → an OpenAI-compatible endpoint that records what it serves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import numpy as np

from treadle.env.base import Session, ToolResult
from treadle.errors import DataError, InfrastructureError
from treadle.feedback.process import step_signals
from treadle.pool.formats.openai_chat import write_tool
from treadle.pool.formats.openai_messages import Reader
from treadle.rollout import refuse, rollout_seed
from treadle.serve.app import create_app, running
from treadle.serve.app import serve as serve_app
from treadle.types import Checkpoint, Layer, Signal, Task, ToolCall, is_solved
from treadle.workspace import Workspace

CLIENT_SECONDS = 600.0


async def serve(ws: Workspace, checkpoint: Checkpoint) -> None:
    """Answer requests until interrupted."""
    app = create_app(await ws.engine(checkpoint), ws.renderer, ws.store, checkpoint.id, ws.contract)
    settings = ws.config.serve
    await serve_app(
        app, settings.host, settings.port, lambda url: ws.console.print(f"serving {checkpoint.id} at {url}")
    )


async def serve_tasks(ws: Workspace, checkpoint: Checkpoint, turn: int) -> dict[str, Any]:
    """Play training tasks over HTTP as a client would. The sessions are recorded by the server, and so come back.

    Each verdict is added to its recorded session as a signal: the server itself knows of no task and no grader.
    A session that the endpoint, or a sandbox, broke off is counted as lost.
    """
    tasks = ws.training_tasks()
    order = np.random.default_rng([ws.config.seed, turn, 9]).permutation(len(tasks))
    chosen = [tasks[i] for i in order[: ws.config.serve.sessions]]
    app = create_app(await ws.engine(checkpoint), ws.renderer, ws.store, checkpoint.id, ws.contract)
    sessions = [await ws.environment.start(task) for task in chosen]
    try:
        with ws.progress("serve", len(chosen)) as advance:
            async with running(app) as url, httpx.AsyncClient(base_url=url, timeout=CLIENT_SECONDS) as client:

                async def play(task: Task, session: Session) -> Conversation | None:
                    try:
                        return await _converse(ws, client, checkpoint.id, task, session, turn)
                    except (InfrastructureError, httpx.HTTPError) as error:
                        ws.console.print(f"serve: a session of task {task.id} broke off: {error}")
                        return None
                    finally:
                        advance(1)

                played = await asyncio.gather(*map(play, chosen, sessions))
        # the server has stopped, so that every conversation is stored, also those that no reply had ended
        kept = [(talk, session) for talk, session in zip(played, sessions, strict=True) if talk and talk.recorded]
        rewards = [await _judge(ws, talk, session) for talk, session in kept]
    finally:
        for session in sessions:
            await session.close()
    graded = [reward for reward in rewards if reward is not None]
    return {
        "sessions": len(chosen),
        "lost": len(chosen) - len(kept),
        "graded": len(graded),
        "solved": sum(map(is_solved, graded)),
    }


class Conversation(msgspec.Struct):
    """What the client knows of an episode: the record is scrubbed, and doesn't know which calls were turned down."""

    messages: list[dict[str, Any]]
    failures: dict[int, str] = {}  # codes of tool results, by message
    recorded: str = ""  # the id under which the server recorded it; "" while it has given no reply


async def _converse(
    ws: Workspace, client: httpx.AsyncClient, model: str, task: Task, session: Session, turn: int
) -> Conversation:
    """One episode through the endpoint."""
    talk = Conversation([{"role": m.role, "content": m.content} for m in task.messages])
    messages = talk.messages
    tools = [write_tool(tool) for tool in ws.contract.tools]
    for number in range(ws.contract.budget.turns):
        seed = rollout_seed(ws.config.seed, turn, task.id, number)
        metadata = {"task_id": task.id}
        request = {"model": model, "messages": messages, "tools": tools, "metadata": metadata, "seed": seed}
        answer = await client.post("/v1/chat/completions", json=request)
        if answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded":
            break  # the last result left no room for a reply
        reply = answer.raise_for_status().json()
        talk.recorded = reply["treadle"]["session"]
        message = reply["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls") or reply["choices"][0]["finish_reason"] == "length":
            break
        for call in message["tool_calls"]:
            result = await _call(ws, session, call)
            if result.failure:
                talk.failures[len(messages)] = result.failure
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.content})
            if result.ends:
                return talk
    return talk


async def _call(ws: Workspace, session: Session, wire: dict[str, Any]) -> ToolResult:
    function = wire["function"]
    call = ToolCall(id=wire["id"], name=function["name"], arguments=json.loads(function["arguments"]))
    return refuse(ws.contract.tools, call) or await session.call(call)


async def _judge(ws: Workspace, talk: Conversation, session: Session) -> float | None:
    """Grade the environment as the client left it; the verdict and faults of steps go to what the server recorded."""
    trajectory = ws.store.trajectory(talk.recorded)
    if trajectory is None:
        raise DataError(f"the endpoint answered for session {talk.recorded!r} but did not store it")
    reader = Reader(set(), talk.failures)
    reader.read(talk.messages)
    seen = msgspec.structs.replace(trajectory, nodes=reader.nodes)
    try:
        outcome = await session.grade(seen)
    except InfrastructureError as error:
        ws.console.print(f"serve: session {talk.recorded} could not be graded: {error}")
        return None
    verdict = Signal(name="verifier", layer=Layer.VERIFIER, value=outcome.reward, version=outcome.verifier)
    ws.store.add_signals(talk.recorded, [verdict, *step_signals(seen)])
    return outcome.reward
