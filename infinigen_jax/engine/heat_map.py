"""Heat map: number of KV heads that fetch each cached token in a step, by layer that selects rows.

It is computed between the layers of a layerwise step, from the step's own requests.
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
from infinigen_jax.selection.select import Request


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
    return watched.after, _of_request(before.fetched.request, host)


@jax.jit
def _of_request(request: Request, host: Any) -> UInt8[Array, "b t"]:
    requested = request.mask(capacity_of(host, len(request.count)))
    return jnp.sum(requested, axis=1, dtype=jnp.uint8)


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
    return _of_request(request, host)
