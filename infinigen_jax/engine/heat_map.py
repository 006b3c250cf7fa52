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
    before, host = watched.before, watched.host
    if decoder.policy.lead == 0:
        heat = _of_own(decoder, watched.selection, before.x, watched.positions, host)
        return watched.after, heat
    assert before.fetched is not None
    request = before.fetched.request
    return watched.after, _of_request(request.slots, request.count, host)


@jax.jit
def _of_request(slots: Int[Array, "b k n"], count: Int[Array, "b k"], host: Any) -> Any:
    b, _, n = slots.shape
    valid = jnp.arange(n, dtype=jnp.int32)[None, None] < count[..., None]
    sequence = jnp.arange(b, dtype=jnp.int32)[:, None, None]
    heads = jnp.zeros((b, capacity_of(host, b)), jnp.uint8)
    return heads.at[sequence, slots].add(valid.astype(jnp.uint8), mode="drop")


@functools.partial(jax.jit, static_argnums=0)
def _of_own(
    decoder: Decoder,
    target: Target,
    x: Float[Array, "b e"],
    positions: Int[Array, " b"],
    host: Any,
) -> Any:
    a = decoder.blueprint.layer(target.params).attention_input(x)
    request = decoder.select(target, a, positions, capacity_of(host, len(x)))
    return _of_request(request.slots, request.count, host)
