"""InfiniGen: fetch what the next layer is speculated to attend to (OSDI 2024, section 4).

The index is a slice of every cached key, kept on the device: the leading columns in the skewed
basis. Layer l's input, the next layer's query projection and the index give the speculated scores;
tokens above the best score minus alpha are fetched, up to a budget.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from infinigen_jax.cache import Slots
from infinigen_jax.errors import InputError
from infinigen_jax.models.base import Layer, ModelConfig, Params
from infinigen_jax.selection import Request, budget_fraction, budget_rows, select
from infinigen_jax.speculation import (
    partial_columns,
    partial_keys,
    speculate_query,
    speculate_scores,
    speculation_weights,
)

if TYPE_CHECKING:
    from infinigen_jax.checkpoint import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfiniGen:
    """Settings of the speculation.

    Attributes:
        alpha: allowed distance below the best speculated logit (the paper: 4 for OPT, 5 for
            LLaMA); `inf` leaves the choice to the budget alone.
        partial_ratio: share of a key's columns in the index (the paper: 0.3).
        budget: most rows fetched, as a share of the tokens cached, in (0, 1] (the paper: 0.2).
        sinks: first tokens kept on the device.
        window: recent tokens kept on the device, the current one included.
        index_dtype: of the index, "bfloat16", "float32" or "auto": bfloat16, but float32 on the
            CPU, where XLA would convert the whole index to float32 for every token.
        count: "head", each KV head its own number of rows, or "mean", one number for all heads
            and sequences of the batch, as in the paper's code.
    """

    name: ClassVar[str] = "infinigen"
    streams: ClassVar[bool] = False

    alpha: float = 4.0
    partial_ratio: float = 0.25
    budget: float = 0.1
    sinks: int = 4
    window: int = 32
    index_dtype: str = "auto"
    count: str = "head"

    def __post_init__(self):
        if not 0 < self.budget <= 1:
            raise InputError(f"--budget {self.budget}: it must be above 0 and at most 1")
        if budget_fraction(self.budget) == 0:
            raise InputError(f"--budget {self.budget}: the smallest budget is 0.001")
        if not 0 < self.partial_ratio <= 1:
            raise InputError(
                f"--partial-ratio {self.partial_ratio}: it must be above 0 and at most 1"
            )
        if math.isnan(self.alpha) or self.alpha < 0:
            raise InputError(f"--alpha {self.alpha}: it must be 0 or more")
        if self.sinks < 0 or self.window < 1:
            raise InputError("sinks must be 0 or more, and the window 1 or more")
        if self.index_dtype not in ("auto", "bfloat16", "float32"):
            raise InputError(f"index dtype {self.index_dtype!r}: use auto, bfloat16 or float32")
        if self.count not in ("head", "mean"):
            raise InputError(f"count {self.count!r}: use head or mean")

    def request_size(self, capacity: int) -> int:
        share = budget_fraction(self.budget)
        return max(1, capacity * share.numerator // share.denominator)

    def prepare(self, model: "Model", layer: int) -> Params:
        columns = partial_columns(model.config.head_dim, self.partial_ratio)
        return speculation_weights(model, layer, columns)

    def init(self, config: ModelConfig, batch: int, capacity: int) -> Float[Array, "b k r t"]:
        columns = partial_columns(config.head_dim, self.partial_ratio)
        dtype = self.index_dtype
        if dtype == "auto":
            dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        return jnp.zeros((batch, config.num_kv_heads, columns, capacity), dtype)

    def observe_prefill(
        self, weights: Params, state: Float[Array, "b k r t"], keys: Float[Array, "b k s d"]
    ) -> Float[Array, "b k r t"]:
        new = partial_keys(weights, keys, state.shape[2], state.dtype)
        return jax.lax.dynamic_update_slice(state, new, (0, 0, 0, 0))

    def select(
        self,
        config: ModelConfig,
        layer: Layer,
        weights: Params,
        state: Float[Array, "b k r t"],
        a: Float[Array, "b e"],
        positions: Int[Array, " b"],
    ) -> Request:
        with jax.named_scope("speculate"):
            query = speculate_query(config, layer, weights, a, positions, state.shape[2])
            scores = speculate_scores(query, state)
        capacity = state.shape[3]
        eligible = Slots(self.sinks, self.window).eligible(positions, capacity)
        cap = budget_rows(self.budget, positions)
        size = self.request_size(capacity)
        with jax.named_scope("select"):
            return select(scores, eligible, self.alpha, cap, size, self.count)

    def append(
        self,
        weights: Params,
        state: Float[Array, "b k r t"],
        keys: Float[Array, "b k n d"],
        positions: Int[Array, " b"],
    ) -> Float[Array, "b k r t"]:
        new = partial_keys(weights, keys, state.shape[2], state.dtype)
        zero = jnp.int32(0)
        for sequence in range(state.shape[0]):
            at = (jnp.int32(sequence), zero, zero, positions[sequence])
            state = jax.lax.dynamic_update_slice(state, new[sequence : sequence + 1], at)
        return state
