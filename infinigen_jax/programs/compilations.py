"""Counting XLA compilations, so that "none after warm-up" can be reported and tested."""

import functools

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


@functools.cache
def _listen() -> None:
    def heard(event: str, duration_secs: float, **kwargs: str | int) -> None:
        global _count
        _count += event == _EVENT

    jax.monitoring.register_event_duration_secs_listener(heard)


def compilations() -> int:
    """Compilations of this process since the first call of this function."""
    _listen()
    return _count
