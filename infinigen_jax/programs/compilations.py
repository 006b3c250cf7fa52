"""A counter of XLA compilations, which shows that none happens after the warm-up."""

import functools

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


@functools.cache
def _listen() -> None:
    def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
        global _count
        _count += event == _EVENT

    jax.monitoring.register_event_duration_secs_listener(count)


def compilations() -> int:
    """Return the number of XLA compilations since the first call of this function."""
    _listen()
    return _count
