"""HTTP interface: OpenAI's completions and chat completions, health, metrics and the page."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from pydantic_core import to_json
from starlette.exceptions import HTTPException as StarletteHTTPException

import infinigen_jax
from infinigen_jax.server.answer import Job, Piece, RefusedError
from infinigen_jax.server.guard import Guard, refusal
from infinigen_jax.server.prompts import Prompts
from infinigen_jax.server.protocol import NEUTRAL, UNSUPPORTED, ChatCompletion, Completion
from infinigen_jax.server.scheduler import Scheduler
from infinigen_jax.server.wire import Wire

PAGE = Path(__file__).parent / "page"
UNREAD = 8  # pieces of a slow client that may hold heat maps, which are large
Pieces = AsyncGenerator[tuple[int, Piece], None]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Service:
    """Settings of the HTTP interface."""

    model: str  # its name, which requests may repeat
    drain_seconds: int  # for unfinished requests at shutdown
    api_key: str | None = None  # that requests must present
    origins: tuple[str, ...] = ()  # of web pages that may send requests


def create_app(scheduler: Scheduler, service: Service) -> FastAPI:
    """Return the application; its start starts the scheduler, its end stops it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        yield
        await asyncio.to_thread(scheduler.stop, service.drain_seconds)

    app = FastAPI(
        title="infinigen_jax", version=infinigen_jax.__version__, lifespan=lifespan, redoc_url=None
    )
    app.add_middleware(Guard, api_key=service.api_key, origins=service.origins)
    if service.origins:
        from fastapi.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware, allow_origins=service.origins, allow_methods=["*"], allow_headers=["*"]
        )
    _add_error_handlers(app)
    _add_status(app, scheduler, service)
    _add_completions(app, scheduler, service)
    for path in PAGE.iterdir() if scheduler.limits.heat_maps else ():
        route = "/" if path.name == "index.html" else f"/{path.name}"
        app.add_route(route, lambda request, path=path: FileResponse(path), include_in_schema=False)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Answer every error in OpenAI's format, without paths or traces."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = _reason(error.errors())
        path = [str(x) for x in first["loc"] if x not in ("body", "str") and "[" not in str(x)]
        if first["type"] == "unsupported":
            path.append(first["ctx"]["name"])
        field, message = (path or ["body"])[0], first["msg"].removeprefix("Value error, ")
        if first["type"] == "json_invalid":
            return refusal(400, "body: it is not JSON")
        form = request.headers.get("content-type", "")
        if not path and first["type"] != "value_error" and "json" not in form.lower():
            return refusal(400, "body: it is not JSON; send Content-Type: application/json")
        if field in NEUTRAL:
            message = UNSUPPORTED
        if field == "prompt":
            message, path = "give a text, token ids, or a list of either", [field]
        named, separator, _ = message.partition(": ")
        if not path and separator:  # of a check of several fields
            return refusal(400, message, named)
        return refusal(400, f"{'.'.join(path) or field}: {message}", field if path else None)

    @app.exception_handler(StarletteHTTPException)
    @app.exception_handler(RefusedError)
    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return _failure(error)


def _reason(errors: Sequence[Any]) -> Any:
    """Return the first error; of what may be a text or a list, and is a list, that of the list."""
    first, *others = errors
    if first["loc"][-1] == "str":
        return next((error for error in others if error["type"] != "list_type"), first)
    return first


def _failure(error: Exception) -> Response:
    if isinstance(error, RefusedError):
        later = {"Retry-After": "1"} if error.status in (429, 503) else None  # seconds
        return refusal(error.status, str(error), error.param, error.code, later)
    if isinstance(error, StarletteHTTPException):
        return refusal(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    # uvicorn closes the connection after an unexpected error, and clients must not use it again.
    return refusal(500, "internal error", headers={"Connection": "close"})


def _add_status(app: FastAPI, scheduler: Scheduler, service: Service) -> None:
    created = int(time.time())

    @app.head("/health", include_in_schema=False)  # monitors send it
    @app.get("/health")
    async def health() -> Response:
        """200 once the server is warm, else 503."""
        if scheduler.failure is not None:
            return JSONResponse({"status": "failed"}, 503)
        ready = scheduler.ready.is_set()
        return JSONResponse({"status": "ok" if ready else "starting"}, 200 if ready else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": infinigen_jax.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(scheduler.metrics_text(), media_type="text/plain; version=0.0.4")

    entry = {
        "id": service.model,
        "object": "model",
        "created": created,
        "owned_by": "infinigen_jax",
        "max_model_len": scheduler.limits.context,
        "has_chat_template": bool(scheduler.engine.model.tokenizer.chat_template),
    }

    @app.get("/v1/models/", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(name, service)
        return entry


def _check_model(name: str | None, service: Service) -> None:
    if name not in (None, service.model):
        problem = f"{name!r} is not served here; use {service.model!r}"
        raise RefusedError(problem, "model", 404, "model_not_found")


def _add_completions(app: FastAPI, scheduler: Scheduler, service: Service) -> None:
    prompts = Prompts(scheduler.engine, scheduler.limits)
    scheduler.prepare = lambda: prompts.matcher({})  # makes the tables that every schema needs
    compiler = concurrent.futures.ThreadPoolExecutor(1, "grammar")

    @app.post("/v1/completions")
    async def completions(body: Completion, request: Request) -> Response:
        """Continue one or several prompts."""
        _check_model(body.model, service)
        scheduler.check(len(body.prompts))  # before they are tokenised, which takes long
        encoded = await asyncio.to_thread(prompts.completion, body)
        wire = Wire(service.model, body, prompts.tokenizer, encoded)
        return await _answer(scheduler, request, wire, prompts.jobs(body, encoded))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletion, request: Request) -> Response:
        """Answer a conversation."""
        _check_model(body.model, service)
        scheduler.check(1)
        encoded = [await asyncio.to_thread(prompts.chat, body)]
        wire = Wire(service.model, body, prompts.tokenizer, encoded)
        matcher = None
        if (schema := body.schema_of_answer) is not None:
            # This takes long. In a separate thread, it delays no request without a schema.
            loop = asyncio.get_running_loop()
            matcher = await loop.run_in_executor(compiler, prompts.matcher, schema)
        return await _answer(scheduler, request, wire, prompts.jobs(body, encoded, matcher))


async def _answer(scheduler: Scheduler, request: Request, wire: Wire, jobs: list[Job]) -> Response:
    """Submit the jobs of a request, and stream or collect their pieces."""
    pieces = _submit(scheduler, request, jobs)
    if wire.body.stream:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        events = _events(pieces, wire, jobs)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    try:
        async for prompt, piece in pieces:
            wire.add(prompt, piece)
    except ConnectionAbortedError:
        return Response(status_code=499)
    # Log-probabilities take long, so they are made in a thread. Only `to_json` holds the
    # interpreter's lock meanwhile; it is five times as fast as `json`.
    content = await asyncio.to_thread(lambda: to_json(wire.whole(jobs)))
    return Response(content, media_type="application/json")


async def _events(pieces: Pieces, wire: Wire, jobs: list[Job]) -> AsyncIterator[str]:
    """Yield server-sent events; an error is one of them, as the status was sent before."""

    def event(content: Any) -> str:
        # Escaped: some clients split lines at characters such as U+2028.
        return f"data: {json.dumps(content)}\n\n"

    try:
        for part in await asyncio.to_thread(wire.opening):
            yield event(part)
        async for prompt, piece in pieces:
            if (part := wire.part(prompt, piece)) is not None:
                yield event(part)
        if wire.body.with_usage:
            yield event(wire.usage_part(jobs))
    except ConnectionAbortedError:
        return
    except Exception as error:
        if not isinstance(error, RefusedError):
            logger.exception("a stream failed")
        yield event(json.loads(bytes(_failure(error).body)))
    yield "data: [DONE]\n\n"


def _submit(scheduler: Scheduler, request: Request, jobs: list[Job]) -> Pieces:
    """Submit the jobs of a request; return their pieces with the number of their job.

    The jobs are cancelled if the iterator is closed early, and if the client goes away, where it
    raises ConnectionAbortedError.
    """
    queue: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()
    for number, job in enumerate(jobs):
        # Of nothing that refers to the jobs: a cycle would live until a collection.
        job.send = functools.partial(_send, queue, asyncio.get_running_loop(), number)
    scheduler.submit(jobs)

    def cancel() -> None:
        for job in jobs:
            scheduler.cancel(job)

    async def watch() -> None:
        """Cancel the jobs when the client goes away, whether or not its answer has begun."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        cancel()
        queue.put_nowait((0, ConnectionAbortedError()))

    async def pieces() -> Pieces:
        left = sum(job.answers for job in jobs)
        try:
            while left:
                number, piece = await queue.get()
                if isinstance(piece, Exception):
                    raise piece
                left -= piece.finish is not None
                yield number, piece
        finally:
            watching.cancel()
            if left:
                cancel()

    watching = asyncio.ensure_future(watch())
    return pieces()


def _send(
    queue: "asyncio.Queue[tuple[int, Piece | Exception]]",
    loop: asyncio.AbstractEventLoop,
    number: int,
    piece: Piece | Exception,
) -> None:
    """Put a piece into a queue, from another thread; without its heat map if many are unread."""
    if isinstance(piece, Piece) and piece.heat is not None and queue.qsize() > UNREAD:
        piece = dataclasses.replace(piece, heat=None)
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(queue.put_nowait, (number, piece))
