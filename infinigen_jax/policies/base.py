"""What a policy is: the choice of the cached rows that a layer attends to.

A policy is a frozen dataclass (static under jit) with pure functions over device state. The engine
keeps that state, one per layer on the host, and calls, in this order:

    fitted(model, ...)           once: the policy, with what its settings leave to the engine
    prepare(model, layer)        once: arrays needed to select for a layer, beside its own weights
    init(config, batch, ...)     before prefill: empty state
    append(...)                  keys: of each chunk of a prompt, and later of the recent window,
                                 when it is flushed
    observe_queries(...)         behind that for a chunk, if it `observes`: its queries
    select(...)                  each step: which rows the layer is to get
    observe(...)                 each step behind the attention, if it `observes`
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax import cuda
from infinigen_jax.cache.layers import Slots, values_of
from infinigen_jax.cuda import calls
from infinigen_jax.errors import InputError
from infinigen_jax.models.base import Layer, ModelConfig, Params
from infinigen_jax.numeric import check_range
from infinigen_jax.ops.span import Span
from infinigen_jax.selection.select import (
    Request,
    Rest,
    budget_fraction,
    budget_rows,
    select,
    share_rows,
)

if TYPE_CHECKING:
    from infinigen_jax.loading.load import Model


class Attended(NamedTuple):
    """What a layer attended to in a step, once it is known.

    Attributes:
        query: of the current tokens, scaled and rotated.
        slots: of the host that were attended to, as requested; of those beyond the request's count
            the weight is 0.
        weights: the attention weights of these slots, summed over each KV head's query heads.
        resident: positions of the rows that stay on the device, -1 where there is none.
        resident_weights: their attention weights, summed likewise.
    """

    query: Float[Array, "b k g d"]
    slots: Int[Array, "b k n"]
    weights: Float[Array, "b k n"]
    resident: Int[Array, "b m"]
    resident_weights: Float[Array, "b k m"]


@dataclasses.dataclass(frozen=True)
class Lookup:
    """What a policy sees when it selects rows for one layer in one step.

    Attributes:
        config: the model's.
        layer: the module of the layer that rows are selected for.
        weights: what `Policy.prepare` made for it.
        state: the policy's state of it.
        a: the attention input of the layer `lead` before it; see `Policy.source`.
        positions: of the current tokens.
        size: static number of rows in a request; the same for all layers.
        share: numerator and denominator of the layer's own budget; None where every layer has the
            policy's.
        held: with a pool, the position of the row in each slot, -1 where there is none to fetch.
            Without one slot = position, and what only the host has may be fetched.
    """

    config: ModelConfig
    layer: Layer
    weights: Params
    state: Any
    a: Float[Array, "b e"]
    positions: Int[Array, " b"]
    size: int
    share: Int[Array, " 2"] | None = None
    held: Int[Array, "b k t"] | None = None

    @property
    def query(self) -> Float[Array, "b k g d"]:
        """The query of `a`, scaled and rotated: the layer's true one where `lead` is 0."""
        return self.config.grouped(self.layer.query(self.a, self.positions))


@runtime_checkable
class Policy(Protocol):
    """See the module's docstring.

    Attributes:
        name: as on the command line.
        sinks: first tokens that stay on the device.
        dense_layers: leading layers that stay on the device in full, unless the engine is told;
            None: those that lose too much otherwise, see `Model.dense_layers`.
        lead: 1 if `select` sees the attention input of the layer before, so that the transfer
            overlaps with that layer; 0 if it sees the layer's own, and the layer waits for its
            rows.
        source: what `select` sees of a layer before, one of `speculation.SOURCES`: its attention
            "input"; or the hidden state after attention to its "resident" rows alone, under the
            norm of the layer that is selected for.
        observes: `observe` is called and returns the next state. It is not for policies that
            need the layer's own input.
        reuses: whether rows that were fetched are kept on the device, unless the engine is told.
        paged: what is selected depends on when rows were flushed, as where pages are filled row by
            row; a sequence then joins a batch only at a flush.
        window: most recent tokens that stay on the device, the current one included; at least 1.
        pools: whether the host's cache may have a limit (`pool`): what the policy keeps of a token
            is by slot, and says nothing of positions.
    """

    name: ClassVar[str]
    dense_layers: ClassVar[int | None]
    reuses: ClassVar[bool]
    observes: ClassVar[bool]
    paged: ClassVar[bool]
    pools: ClassVar[bool]

    @property
    def lead(self) -> int: ...

    @property
    def source(self) -> str: ...

    @property
    def has_tail(self) -> bool:
        """Whether requests say how much is left out (`Request.rest`), to be attended as a mean."""
        ...

    @property
    def tail_block(self) -> int:
        """Tokens of a block, if what is left out is attended as a mean for each block of positions.

        By `own_rest` then, unless `Request.rest` says it already. 0 if it is one mean or nothing.
        """
        ...

    @property
    def sinks(self) -> int: ...
    @property
    def window(self) -> int: ...

    def streams(self, layer: int) -> bool:
        """Whether this layer, if it is on the host, is attended whole, block by block.

        Nothing is selected for such a layer, and it has no state. Layers count from the model's
        first.
        """
        ...

    def request_size(self, capacity: int) -> int:
        """Static number of rows fetched per (sequence, KV head, layer) at this capacity."""
        ...

    def fitted(self, model: "Model", in_place: bool, pooled: bool) -> "Policy":
        """The policy for an engine, with every setting decided that depends on it.

        Fitted again, to whatever, such a setting stays.

        Args:
            in_place: rows are attended to where the host has them, or copied there anyway: a
                prefetch would have nothing to hide.
            pooled: the host's cache has a limit; its slots are in no order.
        """
        ...

    def prepare(self, model: "Model", layer: int) -> Params: ...

    def init(self, config: ModelConfig, batch: int, capacity: int) -> Any: ...

    def observe_queries(
        self,
        state: Any,
        queries: Float[Array, "b c h d"],
        received: Float[Array, "b k t"],
        span: Span,
    ) -> Any:
        """Take in a chunk's queries, scaled and rotated; called only if the policy `observes`.

        Args:
            received: the attention weight of each slot, summed over these queries.
        """
        ...

    def observe(self, state: Any, seen: Attended) -> Any:
        """Take in what was attended to; called only if the policy `observes`."""
        ...

    def select(self, lookup: Lookup) -> Request:
        """Rows for a layer in the current step."""
        ...

    def own_rest(
        self,
        weights: Params,
        state: Any,
        query: Float[Array, "b k g d"],
        request: Request,
        positions: Int[Array, " b"],
    ) -> Rest:
        """`log_rest` of each block of a `tail_block`, nearly, by the layer's own query."""
        ...

    def tail_values(
        self, weights: Params, rows: Float[Array, "b k n w"]
    ) -> Float[Array, "b k n d"]:
        """Of rows, key and value side by side, what the tail's sums are of: the values.

        Or the values less what is predicted of them from the index, which `Rest.entry` brings back.
        """
        ...

    def append(
        self,
        weights: Params,
        state: Any,
        keys: Float[Array, "b k n d"],
        span: Span,
        slots: Int[Array, "b k n"] | None = None,
    ) -> Any:
        """Take in the keys of some tokens; what their padding holds must not matter.

        Args:
            slots: with a pool, where their rows are, in place of those that were there; t for a
                token that is left out.
        """
        ...


class Defaults:
    """What most policies have in common; see `Policy`."""

    dense_layers: ClassVar[int | None] = 2
    reuses: ClassVar[bool] = True
    observes: ClassVar[bool] = False
    paged: ClassVar[bool] = False
    pools: ClassVar[bool] = False

    @property
    def lead(self) -> int:
        return 1

    @property
    def source(self) -> str:
        return "input"

    @property
    def has_tail(self) -> bool:
        return False

    @property
    def tail_block(self) -> int:
        return 0

    def own_rest(
        self,
        weights: Params,
        state: Any,
        query: Float[Array, "b k g d"],
        request: Request,
        positions: Int[Array, " b"],
    ) -> Rest:
        raise TypeError(f"{type(self).__name__} has no tail in blocks to be scored")

    def tail_values(
        self, weights: Params, rows: Float[Array, "b k n w"]
    ) -> Float[Array, "b k n d"]:
        return values_of(rows)

    def streams(self, layer: int) -> bool:
        return False

    def fitted(self, model: "Model", in_place: bool, pooled: bool) -> Any:
        return self

    def prepare(self, model: "Model", layer: int) -> Params:
        return {}

    def observe_queries(
        self,
        state: Any,
        queries: Float[Array, "b c h d"],
        received: Float[Array, "b k t"],
        span: Span,
    ) -> Any:
        return state

    def observe(self, state: Any, seen: Attended) -> Any:
        return state


def check_resident(sinks: int, window: int) -> None:
    """Refuse numbers of resident tokens that there cannot be."""
    check_range("--policy: sinks", sinks, 0)
    check_range("--policy: window", window, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budgeted(Defaults):
    """A policy that fetches a fixed share of the rows.

    Attributes:
        budget: rows fetched, as a share of the tokens cached, in (0, 1].
        sinks: first tokens kept on the device.
        window: recent tokens kept on the device, the current one included.
    """

    budget: float = 0.1
    sinks: int = 4
    window: int = 32

    def __post_init__(self):
        check_budget(self.budget)
        check_resident(self.sinks, self.window)

    def request_size(self, capacity: int) -> int:
        share = budget_fraction(self.budget)
        return max(1, capacity * share.numerator // share.denominator)

    def eligible(
        self, positions: Int[Array, " b"], capacity: int, held: Int[Array, "b k t"] | None = None
    ) -> Bool[Array, "b kv t"]:
        """Slots of tokens that are on the host only, for each KV head or, kv = 1, for all."""
        if held is not None:
            return held >= 0
        return Slots(self.sinks, self.window).eligible(positions, capacity)[:, None]

    def cached(
        self, positions: Int[Array, " b"], capacity: int, held: Int[Array, "b k t"] | None = None
    ) -> Int[Array, " b"]:
        """Tokens that a budget is a share of: those cached, with a pool at most its size."""
        return positions if held is None else jnp.minimum(positions, capacity)

    def most_rows(
        self,
        positions: Int[Array, " b"],
        capacity: int,
        held: Int[Array, "b k t"] | None = None,
        share: Int[Array, " 2"] | None = None,
    ) -> Int[Array, " b"]:
        """Rows that the budget allows each sequence, per KV head.

        Args:
            share: a layer's own budget, see `Lookup`.
        """
        tokens = self.cached(positions, capacity, held)
        return budget_rows(self.budget, tokens) if share is None else share_rows(share, tokens)

    def choose(
        self,
        scores: Float[Array, "b k g t"],
        lookup: Lookup,
        alpha: float = math.inf,
        mode: str = "head",
        masked: bool = False,
    ) -> Request:
        """Select rows within the budget, of those that are on the host only.

        Args:
            masked: the scores of all others are -inf already.
        """
        given = lookup.positions, lookup.size, lookup.held, lookup.share
        return self.best(scores, *given, alpha=alpha, mode=mode, masked=masked)

    def best(
        self,
        scores: Float[Array, "b k g t"],
        positions: Int[Array, " b"],
        size: int,
        held: Int[Array, "b k t"] | None = None,
        share: Int[Array, " 2"] | None = None,
        *,
        alpha: float = math.inf,
        mode: str = "head",
        masked: bool = False,
    ) -> Request:
        """`choose` without a lookup; see `selection.select`."""
        capacity = scores.shape[3]
        most = self.most_rows(positions, capacity, held, share)
        by_position = held is None  # as the kernel takes it
        if cuda.in_use() and by_position and mode == "head" and scores.shape[2] <= calls.MAX_GROUP:
            slots, count = calls.select_rows(
                scores, positions, most, size, alpha, self.sinks, self.window
            )
            return Request(slots, count)
        eligible = None if masked else self.eligible(positions, capacity, held)
        return select(scores, eligible, alpha, most, size, mode)


LEAST_BUDGET = 1e-9  # its inverse is a number of 32 bits


def check_budget(budget: float) -> None:
    """Refuse a budget that is not in (0, 1], or too small to be told from nothing."""
    if not 0 < budget <= 1:
        raise InputError(f"--budget {budget}: it must be above 0 and at most 1")
    if budget < LEAST_BUDGET:
        raise InputError(f"--budget {budget}: the smallest budget is {LEAST_BUDGET}")
