"""Counts, from this module's import on, of compilations, of which none happens after the warm-up.

Hits in JAX's compilation cache are counted as well.
"""

import collections
from typing import Any

import jax

_counts = collections.Counter[str]()


def _count(event: str, *durations: float, **details: Any) -> None:
    _counts[event] += 1


jax.monitoring.register_event_listener(_count)
jax.monitoring.register_event_duration_secs_listener(_count)


def compilations() -> int:
    """Return the number of XLA compilations."""
    return _counts["/jax/core/compile/backend_compile_duration"]


def cache_hits() -> int:
    """Return the number of hits in JAX's compilation cache."""
    return _counts["/jax/compilation_cache/cache_hits"]
