"""Full cache: every row crosses to the device for every token, as in FlexGen. Exact."""

import dataclasses
from typing import Any, ClassVar

from jaxtyping import Array, Float, Int

from infinigen_jax.models.base import ModelConfig, Params
from infinigen_jax.ops.span import Span
from infinigen_jax.policies.base import Defaults, Lookup
from infinigen_jax.selection.select import Request
from infinigen_jax.settings.policy import ResidentSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(ResidentSettings, Defaults):
    """Policy that attends to every row; host layers stream through the device block by block.

    New rows are flushed to the host in blocks of `window` rows.
    """

    name: ClassVar[str] = "full"
    pools: ClassVar[bool] = True

    def streams(self, layer: int) -> bool:
        return True

    def request_size(self, capacity: int) -> int:
        return capacity

    def init(self, config: ModelConfig, batch: int, capacity: int) -> tuple[()]:
        return ()

    def select(self, lookup: Lookup) -> Request:
        raise TypeError("the full policy streams every row and selects none")

    def append(
        self,
        weights: Params,
        state: Any,
        keys: Float[Array, "b k n d"],
        span: Span,
        slots: Int[Array, "b k n"] | None = None,
    ) -> tuple[()]:
        return ()
