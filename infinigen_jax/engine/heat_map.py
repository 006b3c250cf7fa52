"""Heat map: how many KV heads fetch each cached token in a step, for every layer that selects rows.

It is computed between the layers of a step of the layerwise schedule, from the step's own requests.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from infinigen_jax.cache.host_array import capacity_of
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Carry, Target
from infinigen_jax.decode.steps import Watched


def watch_heat(decoder: Decoder, watched: Watched) -> tuple[Carry, UInt8[Array, "b t"] | None]:
    """Return a layer's heads by token; a `Watch` function."""
    if watched.selection is None:
        return watched.after, None
    assert watched.host is not None
    run, before = _programs(decoder), watched.before
    if decoder.policy.lead == 0:
        heat = run.own(watched.selection, before.x, watched.positions, watched.host)
        return watched.after, heat
    assert before.fetched is not None
    request = before.fetched.request
    return watched.after, run.requested(request.slots, request.count, watched.host)


class _Programs:
    """Compiled functions of a decoder."""

    def __init__(self, decoder: Decoder):
        def requested(slots: Int[Array, "b k n"], count: Int[Array, "b k"], host: Any) -> Any:
            b, _, n = slots.shape
            valid = jnp.arange(n, dtype=jnp.int32)[None, None] < count[..., None]
            sequence = jnp.arange(b, dtype=jnp.int32)[:, None, None]
            heads = jnp.zeros((b, capacity_of(host, b)), jnp.uint8)
            return heads.at[sequence, slots].add(valid.astype(jnp.uint8), mode="drop")

        def own(
            target: Target, x: Float[Array, "b e"], positions: Int[Array, " b"], host: Any
        ) -> Any:
            a = decoder.blueprint.layer(target.params).attention_input(x)
            request = decoder.select(target, a, positions, capacity_of(host, len(x)))
            return requested(request.slots, request.count, host)

        self.requested, self.own = jax.jit(requested), jax.jit(own)


@functools.lru_cache(maxsize=16)
def _programs(decoder: Decoder) -> _Programs:
    return _Programs(decoder)
