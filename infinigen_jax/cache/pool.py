"""The host pool: a host cache with a limit, whose slots are used again (InfiniGen, section 4.4).

Without a limit, a row's slot is its position. With one, the host keeps t rows of each layer,
sequence and KV head, whatever the context, and a directory on the device says which:

    positions  [t]  position of the token in each slot, -1 while it is free
    used       [t]  what the order of eviction goes by, updated by every request

When the recent window is flushed, its rows take free slots, and where there are none, those of the
rows that come first in the order of eviction; of equal ones the oldest:

    fifo     by position
    lru      by the last request; a row that was never requested counts from its own position
    counter  by the number of requests; when a counter is full, all of its KV head's are halved

The first `sinks` tokens and the most recent ones never give way. All of it is per sequence and KV
head, on the device, with static shapes.
"""

import dataclasses
from fractions import Fraction
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from infinigen_jax.cache.hot_set import HotSet
from infinigen_jax.errors import InputError
from infinigen_jax.numeric import check_range
from infinigen_jax.ops.compaction import compact
from infinigen_jax.ops.indexing import look_up, put
from infinigen_jax.ops.top_k import top_mask
from infinigen_jax.selection.select import Request

POOL_EVICTIONS = ("fifo", "lru", "counter")
COUNTER_BITS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """A limit of the host cache.

    Attributes:
        tokens: most rows that the host keeps of a layer, sequence and KV head.
        share: instead of `tokens`, a share of the tokens that the longest sequence can get, in
            (0, 1].
        eviction: one of POOL_EVICTIONS.
        sinks: first tokens that never give way; 0 for none, as in the paper. (Those that a policy
            keeps on the device take no slot and cannot give way at all.)
        recent: share of the slots in which the most recent rows are safe, in [0, 1). Without it, a
            counter that starts at 0 would be the first to go.
    """

    tokens: int | None = None
    share: float | None = None
    eviction: str = "counter"
    sinks: int = 4
    recent: float = 0.5

    def __post_init__(self):
        if (self.tokens is None) == (self.share is None):
            raise InputError("a pool needs a limit: either tokens or a share")
        if self.tokens is not None:
            check_range("--pool-tokens", self.tokens, 1)
        if self.share is not None and not 0 < self.share <= 1:
            raise InputError(
                f"--pool-tokens {100 * self.share:g}%: it must be above 0 % and at most 100 %"
            )
        if self.eviction not in POOL_EVICTIONS:
            raise InputError(f"--pool-eviction {self.eviction}: use {' or '.join(POOL_EVICTIONS)}")
        check_range("--pool-sinks", self.sinks, 0)
        if not 0 <= self.recent < 1:
            raise InputError(f"recent share {self.recent}: it must be at least 0 and below 1")

    @property
    def use_bytes(self) -> int:
        """Of a row in `used`."""
        return {"fifo": 0, "lru": 4, "counter": 1}[self.eviction]

    @property
    def label(self) -> str:
        """The limit, the order of eviction, and what is not the default of the other settings."""
        others = {"sinks": self.sinks, "recent": self.recent}
        others = {n: x for n, x in others.items() if x != getattr(Pool, n)}
        return " ".join([self.limit, self.eviction, *(f"{n} {x:g}" for n, x in others.items())])

    @property
    def limit(self) -> str:
        """As on the command line."""
        return f"{100 * self.share:g}%" if self.share is not None else str(self.tokens)

    def slots(self, tokens: int, sinks: int, window: int) -> int:
        """Slots of a run.

        Args:
            tokens: most that a sequence of the run can get.
            sinks, window: what the policy keeps on the device.

        Raises:
            InputError: if they are too few to flush a window.
        """
        if self.tokens is not None:
            found = min(self.tokens, tokens)
        else:
            assert self.share is not None
            found = int(Fraction(self.share).limit_denominator(1000) * tokens)
        least = window + max(0, self.sinks - sinks)
        if found < min(tokens, least):
            raise InputError(
                f"--pool-tokens {self.limit}: {found} rows of {tokens} tokens are too few for a "
                f"window of {window} recent tokens; use at least {least}"
            )
        return found


class Kept(NamedTuple):
    """What requests leave behind in a layer with a pool; replaced by every step.

    Attributes:
        used: see the module's docstring; None for an order of eviction that takes none.
        hot: the layer's hot set, if it has one.
    """

    used: Shaped[Array, "b k t"] | None
    hot: HotSet | None


def parse_limit(text: str) -> tuple[int | None, float | None]:
    """Tokens or share of an option: "2048" or "80%".

    Raises:
        InputError: for anything else.
    """
    try:
        if text.endswith("%"):
            return None, float(text[:-1]) / 100
        return int(text), None
    except ValueError:
        raise InputError(
            f"--pool-tokens {text}: give a number of tokens, a share such as 80%, or all"
        ) from None


def held(
    positions: Int[Array, "b k t"], current: Int[Array, " b"], window: int
) -> Int[Array, "b k t"]:
    """Positions of the rows that only the host has; -1 in all other slots.

    Args:
        positions: of the rows in the pool.
        current: newest position of each sequence.
        window: recent tokens that the device has too.
    """
    inside = (positions >= 0) & (positions <= current[:, None, None] - window)
    return jnp.where(inside, positions, -1)


def first_used(pool: Pool, positions: Int[Array, "b k t"]) -> Shaped[Array, "b k t"] | None:
    """`used` before any request; None where the order of eviction takes none."""
    if pool.eviction == "fifo":
        return None
    if pool.eviction == "lru":
        return jnp.maximum(positions, 0)
    return jnp.zeros(positions.shape, jnp.uint8)


def touch(
    pool: Pool, used: Shaped[Array, "b k t"], request: Request, current: Int[Array, " b"]
) -> Shaped[Array, "b k t"]:
    """`used` after a request at the positions `current`; in place where donated."""
    slots, valid = request.slots, request.valid
    target = jnp.where(valid, slots, used.shape[2])
    if pool.eviction == "lru":
        return put(used, target, jnp.broadcast_to(current[:, None, None], slots.shape))
    counts = look_up(used, slots) + jnp.uint8(1)
    full = jnp.any(valid & (counts == 2**COUNTER_BITS - 1), axis=-1, keepdims=True)
    used = put(used, target, counts)
    return jnp.where(full, used >> 1, used)


class Insertion(NamedTuple):
    """Where new rows go.

    Attributes:
        slots: of each row; t for a row that the pool is not to get.
        evicted: whose slot was another row's.
        positions, used: the directory afterwards.
    """

    slots: Int[Array, "b k n"]
    evicted: Bool[Array, "b k n"]
    positions: Int[Array, "b k t"]
    used: Shaped[Array, "b k t"] | None


def insert(
    pool: Pool,
    positions: Int[Array, "b k t"],
    used: Shaped[Array, "b k t"] | None,
    new: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    sinks: int,
) -> Insertion:
    """Make room for the rows of a window.

    Rows that the pool has had already, that lie behind a sequence's end, or that the device keeps
    for good, are left out.

    Args:
        used: None for a pool that takes none, or where nothing is ever requested.
        new: positions of the rows, ascending and without gaps.
        lengths: tokens of each sequence.
        sinks: tokens that the device keeps.
    """
    (_, _, t), n = positions.shape, new.shape[1]
    latest = jnp.max(positions, axis=-1, keepdims=True)
    wanted = (new >= sinks) & (new < lengths[:, None])
    fresh = wanted[:, None] & (new[:, None] > latest)
    need = jnp.sum(fresh, axis=-1, dtype=jnp.int32)
    room = compact(_leaving(pool, positions, used, need, lengths, n), n)
    turn = jnp.maximum(jnp.cumsum(fresh, axis=-1, dtype=jnp.int32) - 1, 0)
    chosen = look_up(room, turn)
    evicted = fresh & (look_up(positions, chosen) >= 0)
    slots = jnp.where(fresh, chosen, t)
    arrived = jnp.broadcast_to(new[:, None], slots.shape)
    if used is not None:
        start = arrived if pool.eviction == "lru" else jnp.zeros_like(arrived)
        used = put(used, slots, start.astype(used.dtype))
    return Insertion(slots, evicted, put(positions, slots, arrived), used)


def _leaving(
    pool: Pool,
    positions: Int[Array, "b k t"],
    used: Shaped[Array, "b k t"] | None,
    need: Int[Array, "b k"],
    lengths: Int[Array, " b"],
    window: int,
) -> Bool[Array, "b k t"]:
    """Mark the `need` slots that come first in the order of eviction, free ones before all.

    Those of the window are not among them: the device has their rows still.
    """
    t = positions.shape[2]
    recent = max(min(int(t * pool.recent), t - pool.sinks), window)
    safe = (positions >= 0) & (positions < pool.sinks)
    safe |= positions >= lengths[:, None, None] - recent
    # Exact in float32: positions are below 2^24.
    age = -positions.astype(jnp.float32)
    order = jnp.zeros_like(age) if used is None else -used.astype(jnp.float32)
    order = jnp.where(positions < 0, 1.0, jnp.where(safe, -jnp.inf, order))
    first = top_mask(order, need)
    last = jnp.min(jnp.where(first, order, jnp.inf), axis=-1, keepdims=True)
    strictly = order > last
    rest = need - jnp.sum(strictly, axis=-1, dtype=jnp.int32)
    return strictly | top_mask(jnp.where(order == last, age, -jnp.inf), rest)


def of_prompt(
    pool: Pool, lengths: Int[Array, " b"], heads: int, slots: int, sinks: int
) -> Int[Array, "b k t"]:
    """`positions` after a prompt: its first slots hold all of it, or if it is longer, its end.

    The first `pool.sinks` tokens are kept in any case. One program for prompts of all lengths.

    Args:
        lengths: of the prompts.
        slots: t.
        sinks: tokens that the device keeps.
    """
    slot, lengths = jnp.arange(slots, dtype=jnp.int32)[None], lengths[:, None]
    first = sinks + slot
    begins = (lengths <= sinks + slots) | (first < pool.sinks)
    kept = jnp.where(begins, first, lengths - slots + slot)
    kept = jnp.where(kept < lengths, kept, -1)
    return jnp.broadcast_to(kept[:, None], (len(lengths), heads, slots))
