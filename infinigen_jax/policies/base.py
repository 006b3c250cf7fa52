"""Base of policies, which choose the cached rows that a layer attends to.

A policy is a frozen dataclass (static under jit) with pure functions over device state. The engine
keeps that state, one per layer on the host; docs/policies.md has the order of its calls. A policy
derived from `Budgeted` needs `name` and `select`, and with a state `init` and `append`.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from infinigen_jax import cuda
from infinigen_jax.cache.layers import Slots, values_of
from infinigen_jax.cuda import calls
from infinigen_jax.errors import ParameterError
from infinigen_jax.models.base import ModelConfig, Params
from infinigen_jax.numeric import check_range, listed
from infinigen_jax.ops.span import Span
from infinigen_jax.policies.lookup import Attended, Lookup
from infinigen_jax.selection.select import (
    Request,
    Rest,
    budget_fraction,
    budget_rows,
    select,
    share_of,
)
from infinigen_jax.settings.policy import SOURCES, BudgetSettings
from infinigen_jax.settings.setting import Settings
from infinigen_jax.speculation.index import IndexFormat, write_entries
from infinigen_jax.speculation.query import partial_keys

if TYPE_CHECKING:
    from infinigen_jax.loading.load import Model

Keys = Float[Array, "b k n d"]
PoolSlots = Int[Array, "b k n"]


class Policy:
    """Base of all policies, with common defaults.

    Attributes:
        name: name on the command line.
        sinks: number of first tokens that stay on the device.
        window: most recent tokens that stay on the device, including the current one; at least 1.
        dense_layers: leading layers that stay on the device in full, unless set on the engine;
            None uses the model's measured `Model.dense_layers`.
        lead: 1 if `select` sees the attention input of the previous layer, so that the transfer
            overlaps with that layer; 0 if it sees the layer's own input and waits for its rows.
        source: hidden state that `select` sees with `lead` 1, one of `settings.policy.SOURCES`:
            the previous layer's attention "input"; or the hidden state after attention to its
            "resident" rows alone, normalised with the selected layer's parameters.
        observes: whether `observe` and `observe_queries` are called; needs a `lead` of 1 and no
            `tail_block`.
        reuses: default of the engine's hot set: whether fetched rows stay on the device.
        paged: whether the selection depends on when rows were flushed, as with pages filled row
            by row. A sequence then joins a batch only at a flush.
        pools: whether the host cache may be limited (`cache.pool`). The policy's state must then
            be indexed by slot and independent of positions.
        has_tail: whether attention includes the weight of the rows left out, `Request.rest`.
        tail_block: number of positions that share one mean, scored by `own_rest` unless `select`
            returns a `Request.rest`. 0 for one mean of all or no tail.
    """

    name: ClassVar[str]
    sinks: int
    window: int
    dense_layers: ClassVar[int | None] = 2
    reuses: ClassVar[bool] = True
    observes: ClassVar[bool] = False
    paged: ClassVar[bool] = False
    pools: ClassVar[bool] = False
    lead: ClassVar[int] = 1
    source: ClassVar[str] = "input"
    has_tail: ClassVar[bool] = False
    tail_block: ClassVar[int] = 0

    def check(self) -> None:
        """Raise ParameterError if flags of the policy are wrong or exclude each other."""
        problem = ""
        if self.lead not in (0, 1):
            problem = f"its `lead` is {self.lead}; use 0 or 1"
        elif self.source not in SOURCES:
            problem = f"its `source` is {self.source}; use {listed(SOURCES)}"
        elif self.observes and not self.lead:
            problem = "one that `observes` needs a `lead` of 1"
        elif self.observes and self.tail_block:
            problem = "one that `observes` has no `tail_block`; use one mean or no tail"
        if problem:
            raise ParameterError("policy", problem, self.name)
        if isinstance(self, Settings):  # a class with a `__post_init__` of its own may omit it
            Settings.__post_init__(self)
        if self.dense_layers is not None:
            check_range("policy.dense_layers", self.dense_layers, 0)

    def check_observed(self, state: Any, before: Any) -> None:
        """Raise ParameterError unless `observe` kept structure, shapes and dtypes of the state."""

        def kinds(state: Any) -> Any:
            leaves, structure = jax.tree.flatten(state)
            return structure, [(jnp.shape(x), jnp.result_type(x)) for x in leaves]

        if kinds(state) != kinds(before):
            problem = "`observe` returned a state of other arrays than `init`"
            raise ParameterError("policy", problem, self.name)

    def streams(self, layer: int) -> bool:
        """Whether this layer of the model, if on the host, attends to all rows there, by block.

        It then selects nothing and has no state.
        """
        return False

    def request_size(self, capacity: int) -> int:
        """Return the static number of rows in a request per sequence, KV head and layer.

        `capacity` is the number of slots of the host cache: tokens it can hold, or rows of a pool.
        """
        raise NotImplementedError

    def fitted(self, model: "Model", in_place: bool, pooled: bool) -> "Policy":
        """Return the policy with all settings resolved that depend on the model and the engine.

        The result is stable: fitting it again, even to another engine, keeps these settings.

        Args:
            in_place: attention reads rows in host memory, or copies them without overlap, so that
                a prefetch has nothing to hide.
            pooled: the host cache is limited; its slots are in no order.
        """
        return self

    def prepare(self, model: "Model", layer: int) -> Params:
        """Return the constant arrays for selection in a layer of the model; empty for none.

        Traced once for all layers: `model` has the parameters of one layer, and `layer` is 0. For
        arrays that depend on the layer's number, return all layers', and index them by
        `Lookup.number`. The name "share" is reserved.
        """
        return {}

    def init(self, config: ModelConfig, batch: int, capacity: int) -> Any:
        """Return the state of a host layer without tokens, for `capacity` slots.

        A tree of arrays whose first axes are sequences and KV heads, [b, k, ...].
        """
        return ()

    def append(
        self, weights: Params, state: Any, keys: Keys, span: Span, slots: PoolSlots | None = None
    ) -> Any:
        """Add the keys of some tokens to the state; the result must not depend on padding.

        A flush brings the whole recent window, so the same tokens may come twice: the second time
        changes nothing. Only entries of these tokens change, unless the policy `observes`.

        Args:
            weights: arrays from `prepare`.
            keys: [b, k, n, d], rotated.
            span: positions of the tokens. For a pool's prompt, slots: all, from the first; those in
                use, at the front, are the only ones with a meaning.
            slots: with a pool after the prompt, slot of each row [b, k, n], replacing the entry of
                the slot's earlier row; t for a token that is left out.
        """
        return state

    def observe_queries(
        self,
        state: Any,
        queries: Float[Array, "b c h d"],
        mass: Float[Array, "b k t"] | None,
        span: Span,
    ) -> Any:
        """Update the state after `append` of a prompt chunk, if the policy `observes`.

        With `lossless`, the tokens that a verification accepts are such a chunk as well.

        Args:
            queries: queries of the chunk, scaled and rotated; padding after `span.count`.
            mass: attention weight of each slot, summed over these queries and the query heads of
                the KV head. None with a pool, whose slots are in no order.
        """
        return state

    def select(self, lookup: Lookup) -> Request:
        """Return the rows that a layer requests in the current step."""
        raise NotImplementedError

    def observe(self, state: Any, attended: Attended) -> Any:
        """Update the state after the attention of a step, if the policy `observes`."""
        return state

    def own_rest(
        self,
        weights: Params,
        state: Any,
        query: Float[Array, "b k g d"],
        request: Request,
        positions: Int[Array, " b"],
    ) -> Rest:
        """Return an approximate `log_rest` of each `tail_block`, if `select` returned no rest."""
        raise NotImplementedError

    def tail_values(
        self, weights: Params, rows: Float[Array, "b k n w"]
    ) -> Float[Array, "b k n d"]:
        """Return the values of rows (K and V concatenated) that the tail sums.

        It may leave out the part that it predicts from the index, which `Rest.entry` restores.
        """
        return values_of(rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budgeted(BudgetSettings, Policy):
    """Policy that fetches a fixed share of the rows."""

    def request_size(self, capacity: int) -> int:
        share = budget_fraction(self.budget)
        return max(1, capacity * share.numerator // share.denominator)

    def eligible(
        self, positions: Int[Array, " b"], capacity: int, held: Int[Array, "b k t"] | None = None
    ) -> Bool[Array, "b kv t"]:
        """Return slots of host-only tokens, per KV head or, with kv = 1, for all heads."""
        if held is not None:
            return held >= 0
        return Slots(self.sinks, self.window).eligible(positions, capacity)

    def most_rows(
        self,
        positions: Int[Array, " b"],
        capacity: int,
        held: Int[Array, "b k t"] | None = None,
        share: Int[Array, "*n 2"] | None = None,
    ) -> Int[Array, " b"]:
        """Return the rows that the budget allows each sequence, per KV head.

        The budget applies to the cached tokens, at most a pool's size. `share` is the budget of one
        layer, see `Lookup`.
        """
        tokens = positions if held is None else jnp.minimum(positions, capacity)
        if share is None:
            return budget_rows(self.budget, tokens)
        return share_of(tokens, share[..., 0], share[..., 1])

    def choose(
        self,
        scores: Float[Array, "b k g t"],
        lookup: Lookup,
        alpha: float = math.inf,
        mode: str = "head",
        masked: bool = False,
    ) -> Request:
        """Select rows within the budget among the host-only rows.

        Args:
            scores: float32; the highest are selected. They are attention logits of g query heads,
                or any order of the slots with g = 1.
            alpha, mode: see `selection.select`.
            masked: whether the scores of all ineligible rows are already -inf.
        """
        # t or fewer scores: slots in use come first.
        b, k, t = len(lookup.positions), lookup.config.num_kv_heads, lookup.capacity
        if scores.ndim != 4 or scores.shape[:2] != (b, k) or scores.shape[3] > t:
            problem = f"scores have the shape {scores.shape}; give [{b}, {k}, query heads, {t}]"
            raise ParameterError("policy", problem, self.name)
        common = lookup.positions, lookup.size, lookup.held, lookup.share
        return self.best(scores, *common, alpha=alpha, mode=mode, masked=masked)

    def best(
        self,
        scores: Float[Array, "b k g t"],
        positions: Int[Array, " b"],
        size: int,
        held: Int[Array, "b k t"] | None = None,
        share: Int[Array, "*n 2"] | None = None,
        *,
        alpha: float = math.inf,
        mode: str = "head",
        masked: bool = False,
    ) -> Request:
        """Select rows as `choose` does, without a lookup."""
        scores = scores.astype(jnp.float32)  # as the kernel reads them
        capacity = scores.shape[3]
        most = self.most_rows(positions, capacity, held, share)
        by_position = held is None  # required by the kernel
        if cuda.in_use() and by_position and mode == "head" and scores.shape[2] <= calls.MAX_GROUP:
            given = scores, positions, most, size, alpha, self.sinks, self.window
            return Request(*calls.select_rows(*given))
        eligible = None if masked else self.eligible(positions, capacity, held)
        return select(scores, eligible, alpha, most, size, mode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Indexed(Budgeted):
    """Policy whose state is an index of the keys."""

    def index_format(self, head_dim: int) -> IndexFormat:
        """Return the format of the index, of whole keys by default."""
        return IndexFormat("float32", head_dim)

    def init(self, config: ModelConfig, batch: int, capacity: int) -> Shaped[Array, "b k w t"]:
        return self.index_format(config.head_dim).empty(batch, config.num_kv_heads, capacity)

    def append(
        self, weights: Params, state: Any, keys: Keys, span: Span, slots: PoolSlots | None = None
    ) -> Any:
        index = self.index_format(keys.shape[3])
        entries = index.encode(partial_keys(weights, keys, index.columns))
        return write_entries(state, entries, span, slots)
