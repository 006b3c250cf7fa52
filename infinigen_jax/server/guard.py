"""Checks of requests (host, API key, sizes and times), and uvicorn's configuration with them."""

import asyncio
import hmac
import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
HEADER_BYTES = 16 << 10
BODY_BYTES = 8 << 20  # as objects of Python, some bodies take thirty times as much
BODY_SECONDS = 30.0
CLOSE = {"connection": "close"}
KINDS = {401: "authentication_error", 429: "rate_limit_error"}


def refusal(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """Return an error in OpenAI's format."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status, headers)


class Guard:
    """ASGI middleware that checks headers, host, API key, and the size and time of the body.

    The page, its files and /health need no key.
    """

    def __init__(self, app: Any, api_key: str | None, origins: tuple[str, ...]):
        self._app, self._key = app, None if api_key is None else api_key.encode()
        # Names of this machine; None for any.
        names = {urlsplit(origin).hostname for origin in origins}
        self._names = (
            None if "*" in origins else names | {"localhost", socket.gethostname().lower()}
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif (refused := self._refused(scope)) is not None:
            await refused(scope, receive, send)
        else:
            await self._app(scope, self._limited(receive), send)

    def _refused(self, scope: Any) -> Response | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES:
            message = f"the headers are larger than {HEADER_BYTES} bytes"
            return refusal(431, message, headers=CLOSE)
        headers = dict(scope["headers"])
        if (name := self._foreign_host(scope, headers.get(b"host", b""))) is not None:
            remedy = "use the server's address, or start it with --allow-origin or --api-key"
            return refusal(403, f"the host {name} is unknown; {remedy}", headers=CLOSE)
        if not self._admits(scope, headers.get(b"authorization", b"")):
            message, code = "the API key is missing or wrong", "invalid_api_key"
            return refusal(401, message, code=code, headers={"www-authenticate": "Bearer"} | CLOSE)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > BODY_BYTES:
            return refusal(413, f"the body is larger than {BODY_BYTES} bytes", headers=CLOSE)
        return None

    def _admits(self, scope: Any, presented: bytes) -> bool:
        guarded = scope["path"].startswith(("/v1", "/metrics", "/version", "/docs", "/openapi"))
        if self._key is None or not guarded or scope["method"] == "OPTIONS":
            return True
        scheme, _, key = presented.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)

    def _foreign_host(self, scope: Any, host: bytes) -> str | None:
        """Return the name that a client calls this machine, if it may be a web page's.

        A page whose name leads to this machine reads answers as its own (DNS rebinding).
        """
        address = _address(scope["server"][0]) if scope["server"] else None
        local = address is not None and address.is_loopback
        if self._key is not None or self._names is None or not local:
            return None
        try:
            name = urlsplit(f"//{host.decode('latin-1')}").hostname or "localhost"
        except ValueError:
            name = "?"  # malformed
        return None if name in self._names or _address(name) else name

    def _limited(self, receive: Any) -> Any:
        """Return `receive` with limits on the size and the time of the whole body."""
        loop = asyncio.get_running_loop()
        deadline, size, complete = loop.time() + BODY_SECONDS, 0, False

        async def limited() -> Any:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body did not arrive in time", CLOSE) from None
            size += len(message.get("body", b""))
            if size > BODY_BYTES:
                raise HTTPException(413, f"the body is larger than {BODY_BYTES} bytes", CLOSE)
            complete = not message.get("more_body", False)
            return message

        return limited


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an IP address, one of version 4 as such; None for other names."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


class Connection(H11Protocol):
    """HTTP connection, closed if a request's headers are incomplete for too long.

    Uvicorn limits the time between two requests, but not that of headers: idle clients could use up
    all connections. `Guard` limits the time of a body.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None:
            self._start_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # the rest of an unread body
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None


def http_config(app: Any, drain_seconds: int, connections: int | None = None) -> uvicorn.Config:
    """Return uvicorn's configuration; more connections than `connections` get status 503."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        limit_concurrency=connections,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=drain_seconds,
    )
