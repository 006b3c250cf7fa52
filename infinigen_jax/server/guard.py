"""Checks before a request is read: headers, host, API key, size and time of the body."""

import asyncio
import hmac
import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

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
    """ASGI middleware of these checks. The page, its files and /health need no key."""

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
            return
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES:
            message = f"the headers are larger than {HEADER_BYTES} bytes"
            await refusal(431, message, headers=CLOSE)(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if (name := self._foreign_host(scope, headers.get(b"host", b""))) is not None:
            remedy = "use the server's address, or start it with --allow-origin or --api-key"
            message = f"the host {name} is unknown; {remedy}"
            await refusal(403, message, headers=CLOSE)(scope, receive, send)
            return
        if not self._admits(scope, headers.get(b"authorization", b"")):
            message, code = "the API key is missing or wrong", "invalid_api_key"
            asked = {"www-authenticate": "Bearer"} | CLOSE
            await refusal(401, message, code=code, headers=asked)(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > BODY_BYTES:
            message = f"the body is larger than {BODY_BYTES} bytes"
            await refusal(413, message, headers=CLOSE)(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

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
