"""A prefix shared by several prompts: read once, and stored once on the host.

    prefix     | read alone, as a batch of one |
    sequence 0                                 | its own tokens |
    sequence 1                                 | its own tokens ....... |

Each sequence has its own copy of the device data: dense layers, the policy's state and recent rows.
On the host, the shared rows are stored once for the batch (see `cache.host_array`). The last rows
of the prefix, at least a window, are copied, as a flush may write them again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.host_array import Placement, allocate_host
from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.engine.batching import copy_sequence
from infinigen_jax.errors import ParameterError
from infinigen_jax.models import ModelConfig

UNIT = 128  # the number of a sequence's unshared slots is a multiple of it


class Sharing(NamedTuple):
    """Layout of a shared prefix in the host's array.

    `sequences` of its sequences hold the shared slots; every sequence has `unshared` slots.
    """

    tokens: int
    sequences: int
    unshared: int

    @property
    def capacity(self) -> int:
        """Number of slots of each sequence, shared or not."""
        return (self.sequences + 1) * self.unshared

    def host_sequences(self, batch: int) -> int:
        """Return the number of sequences of the host's array for a batch size."""
        return batch + self.sequences


def common_prefix(prompts: Sequence[list[int]]) -> int:
    """Return the length of the common prefix of all prompts, less than the shortest prompt."""
    least = min(map(len, prompts)) - 1
    first, last = min(prompts), max(prompts)  # lexicographic order: all others lie between them
    return next((i for i in range(least) if first[i] != last[i]), least)


def may_share(config: ModelConfig, longest: int) -> bool:
    """Return whether the keys of a prefix are independent of the prompt's length, up to `longest`.

    They are not if the frequencies of the rotary embedding vary with the length.
    """
    rope = config.rope
    return rope is None or not rope.varies or longest <= rope.original_positions


def choose_sharing(decoder: Decoder, prefix: int, tokens: int, batch: int) -> Sharing:
    """Choose the layout with the fewest slots for sequences of up to `tokens` tokens."""
    if decoder.pool is not None:
        raise ParameterError("pool", "not with a shared prefix; leave one of them out")
    if decoder.mesh.shape["data"] > 1:
        raise ParameterError("prefix", "not for sequences on several devices; give whole prompts")
    slots = -(-max(tokens, decoder.policy.window) // UNIT) * UNIT
    choices = [Sharing(prefix, 0, slots)]
    for unshared in range(UNIT, slots, UNIT):
        sequences = max(0, prefix - decoder.policy.window) // unshared
        choices.append(Sharing(prefix, sequences, unshared))
    return min(
        (choice for choice in choices if choice.capacity >= slots),
        key=lambda choice: (choice.host_sequences(batch) * choice.unshared, choice.sequences),
    )


def broadcast(decoder: Decoder, one: Cache, batch: int, sharing: Sharing) -> Cache:
    """Return the cache of `batch` sequences with the prefix cached in `one`.

    `one` is a cache of a single sequence, with the capacity of `sharing`; not donated.
    """
    at = Placement(decoder.mesh)
    cache = _repeat(decoder, one._replace(host=None), batch=batch)
    if one.host is None:
        return cache
    layers, _, heads, _, width = one.host.shape
    sequences, slots = sharing.host_sequences(batch), sharing.unshared
    host = allocate_host((layers, sequences, heads, slots, width), one.host.dtype, decoder.mesh)
    # First slot of `one` that each sequence holds.
    starts = [sharing.sequences * slots] * batch
    starts += [i * slots for i in range(sharing.sequences)]
    for sequence, start in enumerate(starts):
        count = min(slots, sharing.tokens - start)
        numbers = (jax.device_put(np.int32(i), at.whole) for i in (sequence, start, count))
        host = _copy(decoder, host, one.host, *numbers)
    return cache._replace(host=host)


@compiled(
    lambda at: Cache(None, at.rows, at.rows, at.batch, at.rows, at.rows, at.rows),
    static_argnames="batch",
)
def _repeat(decoder: Decoder, one: Cache, *, batch: int) -> Cache:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), one)


_copy = compiled(lambda at: at.host, donate_argnums=0)(copy_sequence)
