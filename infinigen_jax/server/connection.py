"""Connections of clients, with a limit on the time in which headers arrive."""

import asyncio
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from infinigen_jax.server.app import Service

HEADER_SECONDS = 10.0


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


def http_config(app: Any, service: Service, connections: int | None = None) -> uvicorn.Config:
    """Return uvicorn's configuration; more connections than `connections` get status 503."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        limit_concurrency=connections,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=service.drain_seconds,
    )
