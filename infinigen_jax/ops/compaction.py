"""From marks to the places of what is marked, with static shapes and without a sort."""

import functools
import operator

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from infinigen_jax.ops.barriers import apart
from infinigen_jax.ops.work_items import CHUNK, CHUNK_BITS, JOBS, Jobs, cut, most_jobs

BITS = 5
WORD = 1 << BITS  # marks of the words that a selection mask is packed into
GROUPS = 32  # of words that a position is compared with at once


def compact(mask: Bool[Array, "b k t"], size: int) -> Int[Array, "b k n"]:
    """Positions of the marked entries, ascending, in the first places of n = `size`.

    Marks are packed into 32-bit words; a mark's word is found by the words' running counts, and the
    mark by halving inside the word. What is behind the marked ones is any position. On the CPU only
    places that a mark is found for are filled, some at a time, of whichever rows.
    """
    return jnp.minimum(compact_words(pack_marks(mask), size), mask.shape[-1] - 1)


def compact_words(words: UInt32[Array, "b k v"], size: int) -> Int[Array, "b k n"]:
    """`compact`, of packed marks: behind the marked ones is any position of the words."""
    b, k, v = words.shape
    slots = lax.platform_dependent(
        words.reshape(b * k, v),
        cpu=lambda rows: compact_together(rows, size),
        default=lambda rows: compact_by_row(rows, size),
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
    group = _group(words)  # `_first_above` searches whole ones
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
    counts = lax.population_count(words)
    if words.shape[-1] % 4:
        return jnp.cumsum(counts.astype(jnp.int32), axis=-1)
    # XLA adds up as many numbers for each as it is told to have running sums of. Those of four
    # words are the bytes of one product, which leaves a quarter of them.
    quads = counts.reshape(*words.shape[:-1], -1, 4)
    places = 8 * jnp.arange(4, dtype=jnp.uint32).reshape(*[1] * words.ndim, 4)
    inside = jnp.sum(quads << places, axis=-1, dtype=jnp.uint32) * jnp.uint32(0x01010101)
    total = (inside >> jnp.uint32(24)).astype(jnp.int32)
    before = jnp.cumsum(total, axis=-1) - total
    inside = ((inside[..., None] >> places) & jnp.uint32(0xFF)).astype(jnp.int32)
    return (before[..., None] + inside).reshape(words.shape)


def compact_by_row(words: UInt32[Array, "r v"], size: int) -> Int[Array, "r n"]:
    """Positions of the first n = `size` marks of each row, any behind them.

    Each is found by itself: by comparing with the running counts of a few groups of words, and by a
    binary search inside the group. The barrier keeps that out of what uses the positions: a gather
    of rows would do it again for every element of a row.
    """
    rows, v = words.shape
    ends = running_counts(words)
    nth = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (rows, size))
    word = jnp.minimum(_first_above(ends, nth), v - 1)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    before = jnp.where(word > 0, ends[row, jnp.maximum(word - 1, 0)], 0)
    return lax.optimization_barrier(_in_word(words[row, word], nth - before) + word * WORD)


def compact_together(words: UInt32[Array, "r v"], size: int) -> Int[Array, "r n"]:
    """Positions of the first n = `size` marks of each row, 0 behind them.

    Rows have very different numbers of marks: those that are wanted are found in jobs, see `jobs`,
    and then handed out. The loop keeps the search out of what uses the positions, see
    `compact_by_row`: barriers are gone before XLA fuses for a CPU.
    """
    rows = words.shape[0]
    at_once = min(JOBS, rows * most_jobs(size))
    counts = running_counts(words)
    wanted = jnp.minimum(counts[:, -1], size)
    jobs = cut(wanted)
    room = rows * most_jobs(size) + at_once
    starts = mark_starts(words, counts, wanted, jobs, room)

    def fill(i: Array, positions: Array) -> Array:
        first = i * at_once
        row, _ = jobs.places(i, at_once)
        found = marks_at(words, lax.dynamic_slice_in_dim(starts, first, at_once), row)
        return lax.dynamic_update_slice_in_dim(positions, found, first, axis=0)

    positions = jnp.zeros((room, CHUNK), jnp.int32)
    positions = lax.fori_loop(jnp.int32(0), jobs.loops(at_once), fill, positions)
    place = jnp.arange(size, dtype=jnp.int32)[None]
    there = place < wanted[:, None]
    place = jnp.where(there, jobs.begin[:, None] * CHUNK + place, 0)
    return jnp.where(there, positions.reshape(-1)[place], 0)


def mark_starts(
    words: UInt32[Array, "r v"],
    counts: Int[Array, "r v"],
    wanted: Int[Array, " r"],
    jobs: Jobs,
    room: int,
) -> Int[Array, "j c"]:
    """At which places of the jobs the marks of another word begin, for `marks_at`.

    Where a word has a place's mark and not the one's before, or where a job begins: 1 + the word,
    how many of its marks are before the place, and the place in the job; 0 elsewhere. So the one
    that counts for a place is the largest up to it. A few thousand numbers written wherever they
    belong, which XLA's scatter is quick at, in place of a search for each place. In int32, which is
    enough for rows of less than 2^25 tokens.

    Args:
        counts: the words' `running_counts`.
        wanted: so many marks of each row, the first ones; it must have as many.
        jobs: of the wanted ones.
        room: j, above the number of all jobs: the last place of the last one takes what is dropped.
    """
    word = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    begin = jobs.begin[:, None] * CHUNK
    unused = room * CHUNK - 1  # where numbers go that are not to be written, without a branch

    def entries() -> tuple[tuple[Array, Array], ...]:
        before = counts - lax.population_count(words).astype(jnp.int32)
        job = (before | (CHUNK - 1)) + 1  # no word has marks in three: WORD <= CHUNK

        def entry(place: Array, marks_before: Array | int) -> tuple[Array, Array]:
            there = (counts > place) & (place < wanted[:, None])
            entry = 1 + ((word * WORD + marks_before) * CHUNK + (place & (CHUNK - 1)))
            return jnp.where(there, begin + place, unused), entry

        return entry(before, 0), entry(job, job - before)

    starts = jnp.zeros((room * CHUNK,), jnp.int32)
    for place, entry in apart(entries):  # or each would be computed again, without vectors
        put_at = starts.at[place.reshape(-1)]
        starts = put_at.set(entry.reshape(-1), mode="promise_in_bounds")
    return starts.reshape(room, CHUNK)


def marks_at(
    words: UInt32[Array, "r v"], starts: Int[Array, "p c"], row: Int[Array, " p"]
) -> Int[Array, "p c"]:
    """Positions of the marks at all places of some jobs; any where no mark is wanted.

    Args:
        starts: of these jobs, see `mark_starts`.
        row: that each job is of.
    """

    def latest() -> Array:
        latest, reach = starts, 1
        while reach < CHUNK:
            before = jnp.pad(latest[:, :-reach], ((0, 0), (reach, 0)))
            latest, reach = jnp.maximum(latest, before), 2 * reach
        return latest

    entry = jnp.maximum(apart(latest) - 1, 0)
    word = entry >> (BITS + CHUNK_BITS)
    place = jnp.arange(CHUNK, dtype=jnp.int32)[None]
    nth = place - (entry & (CHUNK - 1)) + (entry >> CHUNK_BITS & (WORD - 1))
    bits = apart(lambda: words.at[row[:, None], word].get(mode="promise_in_bounds"))
    return _in_word(bits, nth) + word * WORD


def _in_word(bits: UInt32[Array, "*b"], nth: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """Place of the nth mark of a word, by halving; any if it has no such mark."""
    position = jnp.zeros_like(nth)
    half = WORD // 2
    while half:
        lower = lax.population_count(bits & jnp.uint32((1 << half) - 1)).astype(jnp.int32)
        # Not by selecting, which takes twice as long on the CPU.
        upper = (nth >= lower).astype(jnp.int32)
        nth = nth - lower * upper
        bits = bits >> (upper * half).astype(jnp.uint32)
        position = position + upper * half
        half //= 2
    return position


def _first_above(ends: Int[Array, "r v"], index: Int[Array, "r n"]) -> Int[Array, "r n"]:
    """For each index, how many of its row's ascending `ends` are not above it."""
    length = ends.shape[1]
    group = _group(length)
    tops = ends[:, group - 1 :: group]
    # One after the other, each for all places side by side.
    below = (tops[:, i, None] <= index for i in range(tops.shape[1]))
    found = functools.reduce(operator.add, (x.astype(jnp.int32) for x in below)) * group
    row = jnp.arange(ends.shape[0], dtype=jnp.int32)[:, None]
    half = group // 2
    while half:
        last = jnp.minimum(found + (half - 1), length - 1)
        found = jnp.where(ends[row, last] <= index, found + half, found)
        half //= 2
    return jnp.minimum(found, length)


def _group(words: int) -> int:
    """Words of a group: a power of two, so that there are at most GROUPS; packed rows are whole."""
    return 1 << max(0, (-(-words // GROUPS) - 1).bit_length())
