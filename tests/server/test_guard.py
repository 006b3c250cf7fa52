"""Names that clients may call a server without a key."""

import asyncio
import socket
from typing import Any

import pytest
from starlette.responses import Response

from infinigen_jax.server.guard import Guard


@pytest.mark.parametrize(
    ("host", "settings", "status"),
    [
        *((host, {}, 200) for host in ("127.0.0.1:80", "[::1]", "localhost:80", "")),
        *((host, {}, 403) for host in ("stranger:80", "127.0.0.1.stranger", "[")),
        ("stranger", {"api_key": "secret"}, 200),
        ("friend:80", {"origins": ("http://friend",)}, 200),
        ("stranger", {"origins": ("http://friend",)}, 403),
        ("stranger", {"origins": ("*",)}, 200),
        ("stranger", {"server": "10.0.0.2"}, 200),
        ("stranger", {"server": "::ffff:127.0.0.1"}, 403),
        (socket.gethostname(), {}, 200),
    ],
)
def test_a_page_whose_name_leads_to_this_machine(host, settings, status):
    """It would read answers as its own, whatever origins are allowed (DNS rebinding)."""
    settings = {"server": "127.0.0.1", "api_key": None, "origins": ()} | settings
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/health"}
    scope |= {"server": (settings.pop("server"), 80), "headers": [(b"host", host.encode())]}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    app: Any = Guard(Response(), **settings)
    asyncio.run(app(scope, None, send))
    assert sent[0]["status"] == status
