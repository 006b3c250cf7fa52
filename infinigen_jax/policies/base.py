"""What a policy is: the choice of the cached rows that a layer attends to.

A policy is a frozen dataclass (static under jit) with pure functions over device state. The engine
keeps that state, one per layer on the host, and calls, in this order:

    prepare(model, layer)        once: arrays needed to select for a layer, beside its own weights
    init(config, batch, ...)     in prefill: empty state
    observe_prefill(...)         in prefill: the prompt's keys
    select(...)                  each step, one layer ahead: which rows the layer is to get
    append(...)                  when the recent window is flushed: the keys of its rows
"""

from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from infinigen_jax.models.base import Layer, ModelConfig, Params
from infinigen_jax.selection import Request

if TYPE_CHECKING:
    from infinigen_jax.checkpoint import Model


@runtime_checkable
class Policy(Protocol):
    """See the module's docstring.

    Attributes:
        name: as on the command line.
        sinks: first tokens that stay on the device.
        dense_layers: leading layers that stay on the device in full, unless the engine is told.
        reuses: whether rows that were fetched are kept on the device, unless the engine is told.
        window: most recent tokens that stay on the device, the current one included; at least 1.
    """

    name: ClassVar[str]
    dense_layers: ClassVar[int]
    reuses: ClassVar[bool]

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

    def prepare(self, model: "Model", layer: int) -> Params: ...

    def init(self, config: ModelConfig, batch: int, capacity: int) -> Any: ...

    def observe_prefill(
        self, weights: Params, state: Any, keys: Float[Array, "b k s d"]
    ) -> Any: ...

    def select(
        self,
        config: ModelConfig,
        layer: Layer,
        weights: Params,
        state: Any,
        a: Float[Array, "b e"],
        positions: Int[Array, " b"],
    ) -> Request:
        """Rows for `layer` at the step whose tokens are at `positions`.

        Args:
            layer: the module of the layer that is selected for.
            a: the attention input of the layer before it (its own, if it is the first).
        """
        ...

    def append(
        self,
        weights: Params,
        state: Any,
        keys: Float[Array, "b k n d"],
        positions: Int[Array, " b"],
    ) -> Any:
        """Take in the keys of n tokens per sequence, from `positions` on."""
        ...
