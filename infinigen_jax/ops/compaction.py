"""Compaction: positions of the marked entries of a mask, with static shapes and without sorting.

Rows need very different numbers of places, and static shapes are as large as any row may need. On a
CPU the places needed are cut into work items of CHUNK places of one row, and a loop processes some
items at a time, from all rows. (On a GPU a loop of unknown length costs a round trip to the host.)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from infinigen_jax.ops.barriers import compute_once

BITS = 5
WORD = 1 << BITS  # marks in a word of a packed mask
QUAD = 4  # words whose marks are counted together
CHUNK_BITS = 6
CHUNK = 1 << CHUNK_BITS  # places of a work item
ITEMS = 32  # most work items of a loop iteration
FEW_ITEMS = 8  # work items of an iteration with few rows


class WorkItems(NamedTuple):
    """Number of work items of each of r rows, and up to the end of each row; sizes of the loop."""

    counts: Int[Array, " r"]
    ends: Int[Array, " r"]
    most: int  # items of a row
    at_once: int  # items of an iteration, for rows that need about two items each

    @property
    def begin(self) -> Int[Array, " r"]:
        """Index of the first item of each row, or the index it would have."""
        return self.ends - self.counts

    @property
    def room(self) -> int:
        """Number of items for which the results of all iterations have room."""
        return len(self.counts) * self.most + self.at_once

    @property
    def loops(self) -> Int[Array, ""]:
        """Number of iterations that process all items."""
        return (self.ends[-1] + (self.at_once - 1)) // self.at_once

    def places(self, loop: Int[Array, ""]) -> tuple[Int[Array, " p"], Int[Array, "p c"]]:
        """Return the p = `at_once` items of an iteration: their rows, and their places in the row.

        Items after the last one belong to the last row, with places beyond its request.
        """
        item = loop * self.at_once + jnp.arange(self.at_once, dtype=jnp.int32)
        row = jnp.sum(self.ends[None] <= item[:, None], axis=-1, dtype=jnp.int32)
        row = jnp.minimum(row, self.ends.shape[0] - 1)
        first = (item - self.begin[row]) * CHUNK
        return row, first[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)[None]


def cut_items(requested: Int[Array, " r"], places: int) -> WorkItems:
    """Cut the requested number of places of each row, at most `places`, into work items."""
    rows, most = len(requested), -(-places // CHUNK)
    counts = (requested + (CHUNK - 1)) // CHUNK
    at_once = min(max(FEW_ITEMS, 2 * rows), ITEMS, rows * most)
    return WorkItems(counts, jnp.cumsum(counts), most, at_once)


def compact(mask: Bool[Array, "b k t"], size: int) -> Int[Array, "b k n"]:
    """Return positions of the marked entries, ascending, 0 after the last.

    On the CPU, marks are packed into 32-bit words. A mark's word is located by the running counts
    of the words, its place in the word by bisection, in work items from all rows.
    """
    return compact_words(pack_marks(mask), size)


def compact_words(words: UInt32[Array, "b k v"], size: int) -> Int[Array, "b k n"]:
    """Return `compact` of packed marks."""
    b, k, v = words.shape
    slots = lax.platform_dependent(
        words.reshape(b * k, v),
        cpu=lambda rows: compact_together(rows, size),
        default=lambda rows: compact_by_row(rows, size),
    )
    return slots.reshape(b, k, size)


def pack_marks(mask: Bool[Array, "*b t"]) -> UInt32[Array, "*b v"]:
    """Pack marks into words of WORD bits, the first mark lowest."""
    *rows, t = mask.shape
    words = -(-t // WORD)
    if t % WORD:
        mask = jnp.pad(mask, [(0, 0)] * len(rows) + [(0, words * WORD - t)])
    # Four marks, bytes of 0 or 1, become four bits with one product, which moves byte i to bit
    # 28 + i. All other terms stay below without a carry, or overflow.
    quads = mask.astype(jnp.uint8).reshape(*rows, words * (WORD // 4), 4)
    bits = (lax.bitcast_convert_type(quads, jnp.uint32) * jnp.uint32(0x10204080)) >> jnp.uint32(28)
    places = jnp.arange(0, WORD, 4, dtype=jnp.uint32).reshape(*[1] * (len(rows) + 1), WORD // 4)
    packed = jnp.sum(bits.reshape(*rows, words, WORD // 4) << places, axis=-1, dtype=jnp.uint32)
    return jnp.pad(packed, [(0, 0)] * len(rows) + [(0, marked_words(t) - words)])


def marked_words(t: int) -> int:
    """Return the number of words of t packed marks: whole quads, which `running_counts` needs."""
    return -(-t // (QUAD * WORD)) * QUAD


def unpack_marks(words: UInt32[Array, "*b v"], t: int) -> Bool[Array, "*b t"]:
    """Return the first t marks of packed words."""
    places = jnp.arange(WORD, dtype=jnp.uint32).reshape(*[1] * words.ndim, WORD)
    marks = (words[..., None] >> places) & jnp.uint32(1)
    return marks.reshape(*words.shape[:-1], -1)[..., :t].astype(jnp.bool)


def marked(words: UInt32[Array, "*b v"]) -> Int[Array, "*b"]:
    return jnp.sum(lax.population_count(words).astype(jnp.int32), axis=-1)


def running_counts(words: UInt32[Array, "*b v"]) -> Int[Array, "*b v"]:
    """Return the number of marks up to the end of each word."""
    counts = lax.population_count(words)
    # XLA's cumulative sum takes O(n) additions per element. Four counts are therefore summed inside
    # one product, which leaves a quarter of the elements.
    quads = counts.reshape(*words.shape[:-1], -1, QUAD)
    places = 8 * jnp.arange(QUAD, dtype=jnp.uint32).reshape(*[1] * words.ndim, QUAD)
    inside = jnp.sum(quads << places, axis=-1, dtype=jnp.uint32) * jnp.uint32(0x01010101)
    total = (inside >> jnp.uint32(24)).astype(jnp.int32)
    before = jnp.cumsum(total, axis=-1) - total
    inside = ((inside[..., None] >> places) & jnp.uint32(0xFF)).astype(jnp.int32)
    return (before[..., None] + inside).reshape(words.shape)


def compact_by_row(words: UInt32[Array, "r v"], size: int) -> Int[Array, "r n"]:
    """Return positions of the first n = `size` marks of each row, 0 after them, by a scatter."""
    marks = unpack_marks(words, words.shape[1] * WORD)
    place = jnp.where(marks, jnp.cumsum(marks, axis=1, dtype=jnp.int32) - 1, size)
    positions = lax.broadcasted_iota(jnp.int32, marks.shape, 1)
    row = lax.broadcasted_iota(jnp.int32, (len(words), 1), 0)
    empty = jnp.zeros((len(words), size), jnp.int32)
    return empty.at[row, place].set(positions, mode="drop")


def compact_together(words: UInt32[Array, "r v"], size: int) -> Int[Array, "r n"]:
    """Return positions of the first n = `size` marks of each row, 0 after them.

    The loop keeps the search out of its consumers; XLA:CPU would drop a barrier before fusion.
    """
    counts = running_counts(words)
    requested = jnp.minimum(counts[:, -1], size)
    items = cut_items(requested, size)
    starts = mark_starts(words, counts, requested, items)

    def fill(i: Array, positions: Array) -> Array:
        first = i * items.at_once
        row, _ = items.places(i)
        marks = marks_at(words, lax.dynamic_slice_in_dim(starts, first, items.at_once), row)
        return lax.dynamic_update_slice_in_dim(positions, marks, first, axis=0)

    positions = jnp.zeros((items.room, CHUNK), jnp.int32)
    positions = lax.fori_loop(jnp.int32(0), items.loops, fill, positions)
    place = jnp.arange(size, dtype=jnp.int32)[None]
    valid = place < requested[:, None]
    place = jnp.where(valid, items.begin[:, None] * CHUNK + place, 0)
    return jnp.where(valid, positions.reshape(-1)[place], 0)


def mark_starts(
    words: UInt32[Array, "r v"],
    counts: Int[Array, "r v"],
    requested: Int[Array, " r"],
    items: WorkItems,
) -> Int[Array, "j c"]:
    """Return the places of the work items at which the marks of another word begin, for `marks_at`.

    An entry is nonzero where a word holds the mark of this place but not of the previous one, or
    where a work item begins. It encodes 1 + the word, the number of its marks before the place, and
    the place in the item, so the entry that applies to a place is the largest up to it. A scatter
    of these few thousand numbers replaces a search per place. int32 suffices for rows of less than
    2^25 tokens. Each row has its `requested` leading marks. j, the items' `room`, is above their
    number: the last place receives discarded writes.
    """
    word = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    begin = items.begin[:, None] * CHUNK
    unused = items.room * CHUNK - 1  # discarded writes go here, which avoids a branch

    def entries() -> tuple[tuple[Array, Array], ...]:
        before = counts - lax.population_count(words).astype(jnp.int32)
        item = (before | (CHUNK - 1)) + 1  # a word spans at most two items: WORD <= CHUNK

        def entry(place: Array, marks_before: Array | int) -> tuple[Array, Array]:
            needed = (counts > place) & (place < requested[:, None])
            entry = 1 + ((word * WORD + marks_before) * CHUNK + (place & (CHUNK - 1)))
            return jnp.where(needed, begin + place, unused), entry

        return entry(before, 0), entry(item, item - before)

    starts = jnp.zeros((items.room * CHUNK,), jnp.int32)
    # Without `compute_once` XLA would compute each entry again, without vectors.
    for place, entry in compute_once(entries):
        put_at = starts.at[place.reshape(-1)]
        starts = put_at.set(entry.reshape(-1), mode="promise_in_bounds")
    return starts.reshape(items.room, CHUNK)


def marks_at(
    words: UInt32[Array, "r v"], starts: Int[Array, "p c"], row: Int[Array, " p"]
) -> Int[Array, "p c"]:
    """Return positions of the marks in work items of `mark_starts`; arbitrary beyond a request."""

    def latest() -> Array:
        latest, reach = starts, 1
        while reach < CHUNK:
            before = jnp.pad(latest[:, :-reach], ((0, 0), (reach, 0)))
            latest, reach = jnp.maximum(latest, before), 2 * reach
        return latest

    entry = jnp.maximum(compute_once(latest) - 1, 0)
    word = entry >> (BITS + CHUNK_BITS)
    place = jnp.arange(CHUNK, dtype=jnp.int32)[None]
    nth = place - (entry & (CHUNK - 1)) + (entry >> CHUNK_BITS & (WORD - 1))
    bits = compute_once(lambda: words.at[row[:, None], word].get(mode="promise_in_bounds"))
    return _in_word(bits, nth) + word * WORD


def _in_word(bits: UInt32[Array, "*b"], nth: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """Return the place of the nth mark of a word by bisection; arbitrary if it has no such mark."""
    position = jnp.zeros_like(nth)
    half = WORD // 2
    while half:
        lower = lax.population_count(bits & jnp.uint32((1 << half) - 1)).astype(jnp.int32)
        # Arithmetic instead of `where`, which takes twice as long on the CPU.
        upper = (nth >= lower).astype(jnp.int32)
        nth = nth - lower * upper
        bits = bits >> (upper * half).astype(jnp.uint32)
        position = position + upper * half
        half //= 2
    return position
