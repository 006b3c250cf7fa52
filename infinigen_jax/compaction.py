"""From marks to the places of what is marked, with static shapes and without a sort."""

import functools
import operator

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

WORD = 32  # bits of the words that a selection mask is packed into
GROUPS = 32  # of words that a position is compared with at once
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
    slots = compact_words(pack_marks(mask), size, chunk)
    return jnp.minimum(slots, mask.shape[-1] - 1)


def compact_words(
    words: UInt32[Array, "b k v"], size: int, chunk: int = CHUNK
) -> Int[Array, "b k n"]:
    """`compact`, of packed marks: behind the marked ones is any position of the words."""
    b, k, v = words.shape
    rows = words.reshape(b * k, v)
    slots = lax.platform_dependent(
        rows,
        running_counts(rows),
        cpu=lambda words, ends: compact_together(words, ends, size, min(chunk, b * k * size)),
        default=lambda words, ends: compact_by_row(words, ends, size),
    )
    return slots.reshape(b, k, size)


def pack_marks(mask: Bool[Array, "*b t"]) -> UInt32[Array, "*b v"]:
    """Marks as words of WORD bits, the first mark lowest."""
    *rows, t = mask.shape
    words = -(-t // WORD)
    if t % WORD:
        mask = jnp.pad(mask, [(0, 0)] * len(rows) + [(0, words * WORD - t)])
    # Four marks, bytes of 0 or 1, become four bits at once: the product brings byte i to bit
    # 28 + i, and whatever else is in it stays below, without a carry, or falls off.
    quads = mask.astype(jnp.uint8).reshape(*rows, words * (WORD // 4), 4)
    bits = (lax.bitcast_convert_type(quads, jnp.uint32) * jnp.uint32(0x10204080)) >> jnp.uint32(28)
    places = jnp.arange(0, WORD, 4, dtype=jnp.uint32).reshape(*[1] * (len(rows) + 1), WORD // 4)
    packed = jnp.sum(bits.reshape(*rows, words, WORD // 4) << places, axis=-1, dtype=jnp.uint32)
    group = _group(words)  # `nth_marks` searches whole ones
    return jnp.pad(packed, [(0, 0)] * len(rows) + [(0, -words % group)])


def unpack_marks(words: UInt32[Array, "*b v"], t: int) -> Bool[Array, "*b t"]:
    """The first t marks of packed words."""
    places = jnp.arange(WORD, dtype=jnp.uint32).reshape(*[1] * words.ndim, WORD)
    marks = (words[..., None] >> places) & jnp.uint32(1)
    return marks.reshape(*words.shape[:-1], -1)[..., :t].astype(jnp.bool)


def marked(words: UInt32[Array, "*b v"]) -> Int[Array, "*b"]:
    """How many marks there are."""
    return jnp.sum(lax.population_count(words).astype(jnp.int32), axis=-1)


def running_counts(words: UInt32[Array, "*b v"]) -> Int[Array, "*b v"]:
    """How many marks there are to the end of each word."""
    return jnp.cumsum(lax.population_count(words).astype(jnp.int32), axis=-1)


def compact_by_row(
    words: UInt32[Array, "r v"], ends: Int[Array, "r v"], size: int
) -> Int[Array, "r n"]:
    """Positions of the first n = `size` marks of each row, any behind them.

    The barrier keeps the search out of what uses the positions: a gather of rows would do it again
    for every element of a row.
    """
    rows = jnp.arange(words.shape[0], dtype=jnp.int32)
    nth = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (words.shape[0], size))
    return lax.optimization_barrier(nth_marks(words, ends, rows, nth))


def compact_together(
    words: UInt32[Array, "r v"], ends: Int[Array, "r v"], size: int, chunk: int
) -> Int[Array, "r n"]:
    """Positions of the first n = `size` marks of each row, 0 behind them.

    Rows have very different numbers of marks: all that are wanted are counted through, found
    `chunk` at a time, of whichever rows, and then handed out. The loop keeps the search out of what
    uses the positions, see `compact_by_row`: barriers are gone before XLA fuses for a CPU.
    """
    rows = words.shape[0]
    wanted = jnp.minimum(ends[:, -1], size)
    starts = jnp.cumsum(wanted) - wanted

    def fill(i: Array, places: Array) -> Array:
        index = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        row = jnp.sum(starts[None, 1:] <= index[:, None], axis=-1, dtype=jnp.int32)
        found = nth_marks(words, ends, row, (index - starts[row])[:, None])
        return lax.dynamic_update_slice(places, found[:, 0], (i * chunk,))

    chunks = (starts[-1] + wanted[-1] + (chunk - 1)) // chunk
    places = jnp.zeros((-(-rows * size // chunk) * chunk,), jnp.int32)
    places = lax.fori_loop(jnp.int32(0), chunks, fill, places)
    place = jnp.arange(size, dtype=jnp.int32)[None]
    there = place < wanted[:, None]
    return jnp.where(there, places[jnp.where(there, starts[:, None] + place, 0)], 0)


def nth_marks(
    words: UInt32[Array, "r v"],
    ends: Int[Array, "r v"],
    row: Int[Array, " p"],
    nth: Int[Array, "p c"],
) -> Int[Array, "p c"]:
    """Positions of the nth marks of some rows; any position for marks that there are not.

    Args:
        ends: their `running_counts`.
    """
    row = row[:, None]
    word = jnp.minimum(_first_above(ends, row, nth), words.shape[1] - 1)
    before = jnp.where(word > 0, ends[row, jnp.maximum(word - 1, 0)], 0)

    def halve(step: int, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rest, bits, position = state
        half = WORD // 2 >> step
        lower = lax.population_count(bits & jnp.uint32((1 << half) - 1)).astype(jnp.int32)
        # Not by selecting, which takes twice as long on the CPU.
        upper = (rest >= lower).astype(jnp.int32)
        return (
            rest - lower * upper,
            bits >> (upper * half).astype(jnp.uint32),
            position + upper * half,
        )

    state = (nth - before, words[row, word], word * WORD)
    for step in range(5):
        state = halve(step, state)
    return state[2]


def _first_above(
    ends: Int[Array, "r v"], row: Int[Array, "p 1"], index: Int[Array, "p c"]
) -> Int[Array, "p c"]:
    """For each index, how many of its row's ascending `ends` are not above it."""
    length = ends.shape[1]
    group = _group(length)
    tops = ends[:, group - 1 :: group][row[:, 0]]
    # One after the other, each for all places side by side.
    below = (tops[:, i, None] <= index for i in range(tops.shape[1]))
    found = functools.reduce(operator.add, (x.astype(jnp.int32) for x in below)) * group
    half = group // 2
    while half:
        last = jnp.minimum(found + (half - 1), length - 1)
        found = jnp.where(ends[row, last] <= index, found + half, found)
        half //= 2
    return jnp.minimum(found, length)


def _group(words: int) -> int:
    """Words of a group: a power of two, so that there are at most GROUPS; packed rows are whole."""
    return 1 << max(0, (-(-words // GROUPS) - 1).bit_length())
