"""An OpenAI-compatible endpoint that records what it serves.

A reply is sampled whole before its first byte is sent; a stream is the same reply in pieces.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from treadle.engine.base import Engine
from treadle.errors import InfrastructureError, UserError
from treadle.render.base import Renderer
from treadle.serve.sessions import Sessions
from treadle.serve.wire import Reply, Request, RequestError, error_body, read_request
from treadle.store import Store
from treadle.types import Contract


def create_app(
    engine: Engine,
    renderer: Renderer,
    store: Store,
    model_name: str,
    contract: Contract | None = None,
    idle_seconds: float = 60.0,
) -> Starlette:
    """The endpoint as an ASGI app. Requests whose tools are the contract's are recorded under it.

    A conversation that has been silent for `idle_seconds` is stored as interrupted.
    """
    sessions = Sessions(engine, renderer, store, model_name, contract, idle_seconds)

    async def chat(http: HttpRequest) -> Response:
        try:
            request = read_request(await http.body(), model_name)
            reply = await sessions.reply(request)
        except RequestError as error:
            return JSONResponse(error.body, status_code=error.status)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is left to read it
        except InfrastructureError as error:
            return JSONResponse(error_body(str(error), "server_error"), status_code=503)
        if request.stream:
            return StreamingResponse(_events(request, reply), media_type="text/event-stream")
        return JSONResponse(reply.whole())

    async def models(_: HttpRequest) -> Response:
        model = {"id": model_name, "object": "model", "created": 0, "owned_by": "treadle"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(_: HttpRequest) -> Response:
        return JSONResponse(sessions.health())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(_sweep(sessions))
        yield
        sweeper.cancel()
        await sessions.close()

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


@asynccontextmanager
async def running(app: Starlette, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """The app served from this event loop while the block runs; gives its URL. Port 0: any free one."""
    server, listener, url = _bind(app, host, port)
    task = asyncio.create_task(server.serve([listener]))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    try:
        yield url
    finally:
        server.should_exit = True
        await task


async def serve(app: Starlette, host: str, port: int, on_start: Callable[[str], None]) -> None:
    """Serve until interrupted (SIGINT or SIGTERM); open conversations are stored on the way out.

    `on_start` is given the URL. Raises UserError when the address can't be had.
    """
    server, listener, url = _bind(app, host, port)
    on_start(url)
    await server.serve([listener])


def _bind(app: Starlette, host: str, port: int) -> tuple[uvicorn.Server, socket.socket, str]:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except (OSError, TypeError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a host name"
        raise UserError(f"can't listen on {host}:{port} ({why}): choose another port, or serve.host") from None
    url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on")), listener, url


def _events(request: Request, reply: Reply) -> Iterator[str]:
    include_usage = request.stream_options is not None and request.stream_options.include_usage
    for piece in reply.pieces(include_usage):
        yield f"data: {json.dumps(piece, ensure_ascii=False)}\n\n"
    yield "data: [DONE]\n\n"


async def _sweep(sessions: Sessions) -> None:
    while True:
        await asyncio.sleep(min(5.0, sessions.idle_seconds / 2))
        await sessions.sweep()
