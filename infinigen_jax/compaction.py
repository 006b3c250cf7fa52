"""From marks to the places of what is marked, with static shapes and without a sort."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

WORD = 32  # bits of the words that a selection mask is packed into
GROUPS = 16  # of words that a position is compared with at once
CHUNK = 2048  # places that are filled at once where only those that are marked are


def compact(mask: Bool[Array, "b k t"], size: int, chunk: int = CHUNK) -> Int[Array, "b k n"]:
    """Positions of the marked entries, ascending, in the first places of n = `size`.

    Marks are packed into 32-bit words; the i-th mark is found by comparing with the running counts
    of a few groups of words, by a binary search inside the group, and by halving inside the word.
    What is behind the marked ones is any position.

    Args:
        chunk: on the CPU only places that a mark is found for are filled, so many at once, of
            whichever rows. (A loop whose length is not known is a round trip to the host on a GPU.)
    """
    b, k, t = mask.shape
    slots = lax.platform_dependent(
        *pack_marks(mask.reshape(b * k, t)),
        cpu=lambda packed, ends: compact_together(packed, ends, size, min(chunk, b * k * size)),
        default=lambda packed, ends: compact_by_row(packed, ends, size),
    )
    return jnp.minimum(slots, t - 1).reshape(b, k, size)


def pack_marks(mask: Bool[Array, "r t"]) -> tuple[UInt32[Array, "r v"], Int[Array, "r v"]]:
    """Marks as words of WORD bits, and how many marks there are to the end of each."""
    rows, t = mask.shape
    words = -(-t // WORD)
    mask = jnp.pad(mask, ((0, 0), (0, words * WORD - t)))
    weights = jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32)
    marks = jnp.where(mask.reshape(rows, words, WORD), weights[None, None], jnp.uint32(0))
    packed = jnp.sum(marks, axis=-1, dtype=jnp.uint32)
    return packed, jnp.cumsum(lax.population_count(packed).astype(jnp.int32), axis=-1)


def compact_by_row(
    packed: UInt32[Array, "r v"], ends: Int[Array, "r v"], size: int
) -> Int[Array, "r n"]:
    """Positions of the first n = `size` marks of each row, any behind them.

    The barrier keeps the search out of what uses the positions: a gather of rows would do it again
    for every element of a row.
    """
    nth_marks = jax.vmap(_nth_marks, in_axes=(0, 0, None))
    return lax.optimization_barrier(nth_marks(packed, ends, jnp.arange(size, dtype=jnp.int32)))


def compact_together(
    packed: UInt32[Array, "r v"], ends: Int[Array, "r v"], size: int, chunk: int
) -> Int[Array, "r n"]:
    """Positions of the first n = `size` marks of each row, 0 behind them.

    Rows have very different numbers of marks: all that are wanted are found as if they were of one
    long row, `chunk` at a time, and then handed out. The loop keeps the search out of what uses the
    positions, see `compact_by_row`: barriers are gone before XLA fuses for a CPU.
    """
    rows, words = packed.shape
    marks = ends[:, -1]
    before = jnp.cumsum(marks) - marks
    wanted = jnp.minimum(marks, size)
    starts = jnp.cumsum(wanted) - wanted
    together = (ends + before[:, None]).reshape(-1)

    def fill(i: Array, places: Array) -> Array:
        index = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        row = jnp.sum(starts[None, 1:] <= index[:, None], axis=-1, dtype=jnp.int32)
        nth = before[row] + index - starts[row]
        found = _nth_marks(packed.reshape(-1), together, nth) - row * (words * WORD)
        return lax.dynamic_update_slice(places, found, (i * chunk,))

    chunks = (starts[-1] + wanted[-1] + (chunk - 1)) // chunk
    places = jnp.zeros((-(-rows * size // chunk) * chunk,), jnp.int32)
    places = lax.fori_loop(jnp.int32(0), chunks, fill, places)
    place = jnp.arange(size, dtype=jnp.int32)[None]
    there = place < wanted[:, None]
    return jnp.where(there, places[jnp.where(there, starts[:, None] + place, 0)], 0)


def _nth_marks(packed: Array, ends: Array, index: Int[Array, " n"]) -> Int[Array, " n"]:
    word = jnp.minimum(_first_above(ends, index), len(ends) - 1)
    before = jnp.where(word > 0, ends[jnp.maximum(word - 1, 0)], 0)

    def halve(step: int, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rest, bits, position = state
        half = WORD // 2 >> step
        shift = jnp.uint32(half)
        lower = lax.population_count(bits & jnp.uint32((1 << half) - 1)).astype(jnp.int32)
        upper = rest >= lower
        return (
            jnp.where(upper, rest - lower, rest),
            jnp.where(upper, bits >> shift, bits),
            jnp.where(upper, position + half, position),
        )

    state = (index - before, packed[word], word * WORD)
    for step in range(5):
        state = halve(step, state)
    return state[2]


def _first_above(ends: Int[Array, " m"], index: Int[Array, " n"]) -> Int[Array, " n"]:
    """For each index, how many of the ascending `ends` are not above it."""
    group = 1 << max(0, (-(-len(ends) // GROUPS) - 1).bit_length())
    size = -(-len(ends) // group) * group
    ends = jnp.pad(ends, (0, size - len(ends)), constant_values=jnp.iinfo(jnp.int32).max)
    groups = jnp.sum(ends[None, group - 1 :: group] <= index[:, None], axis=-1, dtype=jnp.int32)

    found = jnp.minimum(groups, size // group - 1) * group
    half = group // 2
    while half:
        found = jnp.where(ends[found + (half - 1)] <= index, found + half, found)
        half //= 2
    return jnp.where(groups == size // group, len(ends), found)
