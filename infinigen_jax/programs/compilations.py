"""Counts of compilations, of which none happens after the warm-up, and of cache hits in JAX."""

import collections
import functools
from typing import Any

import jax

_counts = collections.Counter[str]()


@functools.cache
def _listen() -> None:
    def count(event: str, *durations: float, **details: Any) -> None:
        _counts[event] += 1

    jax.monitoring.register_event_listener(count)
    jax.monitoring.register_event_duration_secs_listener(count)


def compilations() -> int:
    """Return the number of XLA compilations since the first call of a function of this module."""
    _listen()
    return _counts["/jax/core/compile/backend_compile_duration"]


def cache_hits() -> int:
    """Return the number of hits in JAX's compilation cache, counted from the same call."""
    _listen()
    return _counts["/jax/compilation_cache/cache_hits"]
