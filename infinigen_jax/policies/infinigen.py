"""InfiniGen: prefetch the rows that a later layer is predicted to need (OSDI 2024, section 4).

The index keeps a slice of every cached key on the device: the leading columns in the skewed basis.
The input of layer l, multiplied with the query projection and the index of layer l+1, gives
speculated scores. Tokens within alpha of the best score are fetched, up to a budget.

Each part of the paper is available as a setting (`infinigen_paper` sets them all). The defaults are
the settings that measure best, see docs/policies-infinigen.md.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from infinigen_jax import cuda
from infinigen_jax.cache.layers import Slots, values_of
from infinigen_jax.models.base import Params
from infinigen_jax.ops.compaction import marked_words
from infinigen_jax.ops.used_slots import over_used, padded
from infinigen_jax.policies.base import Indexed, Lookup
from infinigen_jax.selection.select import Request, Rest, log_rest
from infinigen_jax.settings.policy import SOURCES, InfiniGenSettings
from infinigen_jax.speculation.index import IndexFormat
from infinigen_jax.speculation.query import (
    choose_basis,
    choose_query,
    choose_source,
    own_query,
    soft_cap,
    speculate_query,
    speculation_weights,
)
from infinigen_jax.speculation.tail import fit_slope, without_predicted

if TYPE_CHECKING:
    from infinigen_jax.loading.load import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfiniGen(InfiniGenSettings, Indexed):
    """InfiniGen policy with its settings, `settings.policy.InfiniGenSettings`."""

    name: ClassVar[str] = "infinigen"
    dense_layers: ClassVar[int | None] = None
    pools: ClassVar[bool] = True

    @property
    def lead(self) -> int:
        return int(self.query != "own")

    @property
    def source(self) -> str:
        return self.speculate_from if self.lead and self.speculate_from in SOURCES else SOURCES[0]

    @property
    def has_tail(self) -> bool:
        return self.tail

    @property
    def tail_block(self) -> int:
        return self.tail_tokens if self.tail else 0

    def streams(self, layer: int) -> bool:
        return layer < self.streamed_layers

    def fitted(self, model: "Model", in_place: bool, pooled: bool) -> "InfiniGen":
        choose_basis(model, self.basis)  # refuses one that the model lacks
        query = self.query
        if query == "auto":
            query = "own" if in_place else choose_query(model, query)
        lead, source = 0, "input"
        if query != "own":
            lead, source = 1, choose_source(model, query, self.speculate_from)
        layer_budgets = self.layer_budgets
        if layer_budgets == "auto":
            has_curves = model.has_curves and model.measured(lead, source)
            layer_budgets = "calibrated" if has_curves else "equal"
        tail_tokens = 0 if pooled or not self.tail else self.tail_tokens
        tail_columns = 0
        # A block of one token has its exact value; no prediction is needed.
        if tail_tokens > 1 and model.tail_moments is not None:
            index = self.index_format(model.config.head_dim)
            tail_columns = min(self.tail_columns, index.columns)
        return dataclasses.replace(
            self,
            # Settings without effect are normalised, so that equal behaviour means equal settings.
            query=query,
            speculate_from=source,
            layer_budgets=layer_budgets,
            tail_tokens=tail_tokens,
            tail_columns=tail_columns,
        )

    def index_format(self, head_dim: int) -> IndexFormat:
        return IndexFormat.of_share(self.index_dtype, head_dim, self.partial_ratio)

    def prepare(self, model: "Model", layer: int) -> Params:
        config = model.config
        index = self.index_format(config.head_dim)
        centred = index.quantised or self.tail
        true = bool(self.tail_block) or not self.lead
        weights = speculation_weights(
            model, layer, index.columns, centred, self.basis, self.query, true
        )
        if self.tail_block and self.tail_columns and model.tail_moments is not None:
            if "key" in weights:
                columns = weights["leading"] = weights["key"][..., : self.tail_columns]
            else:
                unchanged = jnp.eye(config.head_dim)[None, :, : self.tail_columns]
                columns = jnp.repeat(unchanged, config.num_kv_heads, axis=0)
            keys, cross = (moment[layer] for moment in model.tail_moments)
            weights["slope"] = fit_slope(keys, cross, columns)
        if config.attention_softcap is not None:
            weights["softcap"] = jnp.float32(config.attention_softcap)
        return weights

    def select(self, lookup: Lookup) -> Request:
        if lookup.held is not None:
            return self._select(lookup)
        capacity = lookup.state.shape[-1]

        def select(slots: int) -> Request:
            state, size = lookup.state[..., :slots], min(lookup.size, slots)
            request = self._select(dataclasses.replace(lookup, state=state, size=size))
            rest, marks = request.rest, request.marks
            if marks is not None:
                marks = padded(marks, marked_words(capacity), 0)
            if rest is not None and self.tail_block:
                blocks = capacity // self.tail_block
                rest = rest._replace(score=padded(rest.score, blocks, -jnp.inf))
            chosen = padded(request.slots, lookup.size, 0)
            return Request(chosen, request.count, rest, marks=marks)  # the mask follows from them

        return over_used(select, jnp.max(lookup.positions), capacity, lookup.exceeded)

    def _select(self, lookup: Lookup) -> Request:
        """Select among the leading slots that `state` has entries for."""
        config, weights, state = lookup.config, lookup.weights, lookup.state
        index = self.index_format(config.head_dim)
        true = None if self.lead else lookup.query
        # The GPU kernel for selection applies the mask itself.
        masked, capacity = not cuda.in_use(), state.shape[-1]
        with jax.named_scope("speculate"):
            eligible = self.eligible(lookup.positions, capacity, lookup.held)
            if true is None:
                inputs = lookup.layer, weights, lookup.a, lookup.positions, index.columns
                query = speculate_query(config, *inputs)
            else:
                query = own_query(weights, true, index.columns)
            cap = soft_cap(weights, query, true)
            scores = index.scores(query, state, eligible if masked else None, cap)
        with jax.named_scope("select"):
            request = self.choose(scores, lookup, self.alpha, self.count, masked)
        if not self.tail or (self.tail_block and true is None):  # blocks: see `own_rest`
            return request
        with jax.named_scope("tail"):
            blocks = capacity // self.tail_block if self.tail_block else 1
            entries = None
            if columns := _predicting(weights):
                entries = functools.partial(index.sums, index=state, columns=columns)
            rest = log_rest(scores, None if masked else eligible, request, blocks, entries)
            return request._replace(rest=rest)

    def own_rest(
        self,
        weights: Params,
        state: Shaped[Array, "b k w t"],
        query: Float[Array, "b k g d"],
        request: Request,
        positions: Int[Array, " b"],
    ) -> Rest:
        index = self.index_format(query.shape[-1])
        partial_query = own_query(weights, query, index.columns)
        slots = Slots(self.sinks, self.window, self.tail_block)
        columns, cap = _predicting(weights), soft_cap(weights, partial_query, query)
        return index.log_rest(partial_query, state, request, positions, slots, columns, cap)

    def tail_values(
        self, weights: Params, rows: Float[Array, "b k n w"]
    ) -> Float[Array, "b k n d"]:
        if not _predicting(weights):
            return values_of(rows)
        keys, values = jnp.split(rows, 2, axis=-1)
        return without_predicted(weights, keys, values)


def _predicting(weights: Params) -> int:
    """Return the number of index columns that predict the tail's values; 0 for none."""
    return weights["slope"].shape[1] if "slope" in weights else 0
