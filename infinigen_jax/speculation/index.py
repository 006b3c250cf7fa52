"""Index: a partial, quantised copy of every cached key on the device, and scores computed from it.

One array [b, k, e, t] with the token on the last axis, so that a step reads it sequentially. With
float entries, e = r columns. With int4, each token has its own step and lowest value
(`quantize.affine_codes`, over the r columns), and the array consists of 32-bit words:

    words 0 .. e-2    codes, 8 of 4 bits to a word, the first column lowest
    word  e-1         the step (upper half) and the lowest value (lower half), as bfloat16

Rounding errors of the codes would increase the expected attention weights, and the many tokens of a
tail would weigh too much. Scores are therefore reduced by `rounding_bias`.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from infinigen_jax import cuda
from infinigen_jax.cache.layers import Slots
from infinigen_jax.cuda import calls
from infinigen_jax.ops.barriers import compute_once
from infinigen_jax.ops.quantize import affine_codes
from infinigen_jax.ops.reductions import summed
from infinigen_jax.ops.span import Span, put_span
from infinigen_jax.ops.used_slots import padded
from infinigen_jax.selection.select import Request, Rest, log_rest

BITS = 4  # bits of a code
CODES = 32 // BITS  # codes in a word
Cap = Callable[[Array], Array]
WORDS_AT_ONCE = 8  # words of a token's codes whose products are added before the sums are stored


@dataclasses.dataclass(frozen=True)
class IndexFormat:
    """Storage format of the index.

    Attributes:
        name: one of `settings.policy.INDEX_DTYPES`; "auto" is bfloat16, but float32 on the CPU,
            where XLA would convert the whole index to float32 for every token.
        columns: number r of key columns in the index.
    """

    name: str
    columns: int

    @classmethod
    def of_share(cls, name: str, head_dim: int, ratio: float) -> "IndexFormat":
        """Return the format of a share of a key's columns; int4 rounds up to whole words."""
        columns = max(1, int(head_dim * ratio + 1e-9))  # floor, exact for ratios such as 0.3
        if name == "int4":
            columns = min(-(-columns // CODES) * CODES, head_dim)
        return cls(name, columns)

    @property
    def quantised(self) -> bool:
        return self.name == "int4"

    @property
    def dtype(self) -> jnp.dtype:
        if self.quantised:
            return jnp.dtype(jnp.uint32)
        if self.name == "auto":
            return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
        return jnp.dtype(self.name)

    @property
    def code_words(self) -> int:
        """Words of a token's codes."""
        return -(-self.columns // CODES)

    @property
    def entries(self) -> int:
        """Number e of array elements for a token."""
        return self.code_words + 1 if self.quantised else self.columns

    @property
    def by_kernel(self) -> bool:
        """Whether programs traced now compute scores with a CUDA kernel."""
        return self.quantised and self.columns <= calls.MAX_COLUMNS and cuda.in_use()

    def empty(self, batch: int, kv_heads: int, capacity: int) -> Shaped[Array, "b k e t"]:
        """Return an index without entries, for `capacity` tokens."""
        return jnp.zeros((batch, kv_heads, self.entries, capacity), self.dtype)

    def encode(self, keys: Float[Array, "b k r n"]) -> Shaped[Array, "b k e n"]:
        """Return the index entries of keys, given as float32."""
        if not self.quantised:
            return keys.astype(self.dtype)
        b, k, _, n = keys.shape
        codes, step, low = affine_codes(keys, BITS, axis=2)
        padding = self.code_words * CODES - self.columns
        codes = jnp.pad(codes.astype(jnp.uint32), ((0, 0), (0, 0), (0, padding), (0, 0)))
        shifts = jnp.arange(0, 32, BITS, dtype=jnp.uint32)[:, None]
        codes = codes.reshape(b, k, self.code_words, CODES, n) << shifts[None, None, None]
        words = jnp.sum(codes, axis=3, dtype=jnp.uint32)
        step, low = (lax.bitcast_convert_type(x, jnp.uint32) for x in (step, low))
        return jnp.concatenate([words, step | (low >> 16)], axis=2)

    def scores(
        self,
        query: Float[Array, "b k g r"],
        index: Shaped[Array, "b k e t"],
        eligible: Bool[Array, "b kv t"] | None = None,
        cap: Cap | None = None,
    ) -> Float[Array, "b k g t"]:
        """Return the speculated attention logits of all slots in float32; -inf if not eligible."""
        if cap is not None:
            scores = cap(self.scores(query, index))
        elif not self.quantised:
            query = query.astype(index.dtype)
            scores = jnp.einsum("bkgr,bkrt->bkgt", query, index, preferred_element_type=jnp.float32)
        elif self.by_kernel:
            scores = calls.index_scores(query.astype(jnp.float32), index)
        else:
            return self.scores_of_codes(query.astype(jnp.float32), index, eligible)
        return _masked(scores, eligible)

    # One trace serves all layers; it takes half the time of tracing a layer.
    @functools.partial(jax.jit, static_argnums=0)
    def scores_of_codes(
        self,
        query: Float[Array, "b k g r"],
        index: UInt32[Array, "b k e t"],
        eligible: Bool[Array, "b kv t"] | None,
    ) -> Float[Array, "b k g t"]:
        """Return `scores` by an int4 index, computed by XLA."""
        by_word = padded(query, self.code_words * CODES, 0)
        by_word = by_word.reshape(*query.shape[:3], self.code_words, CODES)
        masked = functools.partial(_masked, eligible=eligible)

        def begin() -> tuple[Array, Array]:
            """Return the tokens' steps, and the part of the scores that is independent of codes."""
            step, low = _step(index[:, :, -1]), _low(index[:, :, -1])
            low, square = low[:, :, None], jnp.square(step)[:, :, None]
            start = low * jnp.sum(query, axis=-1, keepdims=True)
            start = start - square * rounding_bias(query)
            return step[:, :, None], start

        return lax.platform_dependent(
            cpu=lambda: self._in_passes(by_word, index, begin, masked),
            default=lambda: masked(self._reduced(by_word, index, begin)),
        )

    def log_rest(
        self,
        query: Float[Array, "b k g r"],
        index: Shaped[Array, "b k e t"],
        request: Request,
        positions: Int[Array, " b"],
        slots: Slots,
        columns: int = 0,
        cap: Cap | None = None,
    ) -> Rest:
        """Return `log_rest` of the scores of host-only rows, by block of `slots`.

        `columns` is the width of `Rest.entry`; 0 for none.
        """
        capacity = index.shape[3]
        blocks = slots.blocks(capacity)
        if cap is None and self.by_kernel and capacity // blocks in calls.TAIL_BLOCKS:
            sizes = blocks, slots.sinks, slots.window, columns
            query = query.astype(jnp.float32)
            return calls.index_rest(query, index, positions, request.slots, request.count, *sizes)
        eligible = slots.eligible(positions, capacity)
        entries = functools.partial(self.sums, index=index, columns=columns) if columns else None
        scores = self.scores(query, index, cap=cap)
        return log_rest(scores, eligible, request, blocks, entries)

    @functools.partial(jax.jit, static_argnums=(0, 3))
    def sums(
        self, weights: Float[Array, "b k g t"], index: Shaped[Array, "b k e t"], columns: int
    ) -> Float[Array, "b k g c"]:
        """Return weighted sums over all slots of the c leading columns; float32."""
        if not self.quantised:
            leading = index[:, :, :columns].astype(jnp.float32)
            return jnp.einsum("bkgt,bkct->bkgc", weights, leading, precision="highest")
        words, parameters = index[:, :, : -(-columns // CODES)], index[:, :, -1:]
        shifts = jnp.arange(0, 32, BITS, dtype=jnp.uint32)[None, None, None, None, :, None]

        # A dot product would first write the codes in float32. Multiplying every code by its step
        # is cheaper than storing products.
        def term(weight: Array, last: Array, word: Array) -> Array:
            codes = (word >> shifts) & jnp.uint32(2**BITS - 1)
            # Through int32, which every vector unit can convert.
            return weight * _step(last) * codes.astype(jnp.int32).astype(jnp.float32)

        codes = summed(
            term,
            weights[:, :, :, None, None],
            parameters[:, :, :, None, None],
            words[:, :, None, :, None],
        )
        lows = summed(lambda weight, last: weight * _low(last), weights, parameters)
        return codes.reshape(*lows.shape, -1)[..., :columns] + lows[..., None]

    def _products(
        self, query: Float[Array, "*w c"], words: UInt32[Array, "*v t"]
    ) -> Float[Array, "*x t"]:
        """Return the sum of query * code over the columns c of each word, with broadcasting."""
        terms = []
        for column in range(CODES):
            shift = BITS * column
            if column < CODES - 1:
                # Without a shift the code is 2^shift too large, by which the query is divided.
                code = words & jnp.uint32((2**BITS - 1) << shift)
            else:
                code, shift = words >> shift, 0  # these bits include the sign bit
            # Through int32, which every vector unit can convert.
            term = query[..., column, None] * jnp.float32(2.0**-shift)
            terms.append(term * code.astype(jnp.int32).astype(jnp.float32))
        return sum(terms[1:], terms[0])

    def _in_passes(
        self,
        query: Float[Array, "b k g w c"],
        index: UInt32[Array, "b k e t"],
        begin: Callable[[], tuple[Array, Array]],
        masked: Callable[[Array], Array],
    ) -> Float[Array, "b k g t"]:
        """Return scores on the CPU, in one pass over the index or one per few words of each token.

        A dot product would first write the codes in float32, several times the size of the index.
        """
        at_once = max(n for n in range(1, WORDS_AT_ONCE + 1) if self.code_words % n == 0)

        def add(i: int | Array, step: Array, scores: Array) -> Array:
            sums = jnp.float32(0.0)
            for word in range(at_once):
                place = i * at_once + word
                codes = lax.dynamic_index_in_dim(index, place, axis=2)
                part = lax.dynamic_index_in_dim(query, place, axis=3, keepdims=False)
                sums = sums + self._products(part, codes)
            return scores + step * sums

        if at_once == self.code_words:
            return compute_once(lambda: masked(add(0, *begin())))
        step, start = begin()
        rounds = jnp.int32(self.code_words // at_once)
        return masked(lax.fori_loop(jnp.int32(0), rounds, lambda i, x: add(i, step, x), start))

    def _reduced(
        self,
        query: Float[Array, "b k g w c"],
        index: UInt32[Array, "b k e t"],
        begin: Callable[[], tuple[Array, Array]],
    ) -> Float[Array, "b k g t"]:
        """Return scores on a GPU without our kernels; the barrier keeps consumers out of fusion."""
        step, start = begin()
        sums = jnp.sum(self._products(query, index[:, :, None, :-1]), axis=3)
        return lax.optimization_barrier(sums) * step + start


def _step(parameters: UInt32[Array, "*b t"]) -> Float[Array, "*b t"]:
    """Return the factor of a token's codes."""
    return lax.bitcast_convert_type(parameters >> 16 << 16, jnp.float32)


def _low(parameters: UInt32[Array, "*b t"]) -> Float[Array, "*b t"]:
    """Return the lowest value, which is added to a token's scaled codes."""
    return lax.bitcast_convert_type(parameters << 16, jnp.float32)


def _masked(
    scores: Float[Array, "b k g t"], eligible: Bool[Array, "b kv t"] | None
) -> Float[Array, "b k g t"]:
    return scores if eligible is None else jnp.where(eligible[:, :, None], scores, -jnp.inf)


def rounding_bias(query: Float[Array, "*b r"]) -> Float[Array, "*b 1"]:
    """Return the mean increase of scores by the codes' rounding, over the squared step.

    A code's error is uniform over a step, with variance step^2 / 12, which multiplies the mean of
    e^score by e^(variance / 2).
    """
    return jnp.sum(jnp.square(query), axis=-1, keepdims=True) / 24


def write_entries(
    index: Shaped[Array, "b k e t"],
    new: Shaped[Array, "b k e n"],
    span: Span,
    slots: Int[Array, "b k n"] | None = None,
) -> Shaped[Array, "b k e t"]:
    """Write the entries of a chunk's tokens; in place if donated.

    `slots` replaces `span`: a slot per KV head, t for an entry that is not written.
    """
    if slots is None:
        return put_span(index, new, span, axis=3)
    batch = lax.broadcasted_iota(jnp.int32, slots.shape, 0)
    head = lax.broadcasted_iota(jnp.int32, slots.shape, 1)
    at = index.at[batch, head, :, slots]
    return at.set(new.swapaxes(2, 3), mode="drop", unique_indices=True)
