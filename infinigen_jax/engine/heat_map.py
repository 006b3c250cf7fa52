"""Heat map: number of KV heads that fetch each cached token in a step, by layer that selects rows.

It is computed between the layers of a layerwise step, from the step's own requests.
"""

import jax.numpy as jnp
from jaxtyping import Array, UInt8

from infinigen_jax.cache.host_array import capacity_of
from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Carry
from infinigen_jax.decode.steps import Watched


def watch_heat(decoder: Decoder, watched: Watched) -> tuple[Carry, UInt8[Array, "b t"] | None]:
    """Return a layer's heads by token; a `Watch` function."""
    return watched.after, None if watched.selection is None else _heat(decoder, watched)


@compiled(lambda at: at.batch)
def _heat(decoder: Decoder, watched: Watched) -> UInt8[Array, "b t"]:
    assert watched.host is not None
    capacity = capacity_of(watched.host, len(watched.positions))
    requested = watched.request(decoder, capacity).mask(capacity)
    return jnp.sum(requested, axis=1, dtype=jnp.uint8)
