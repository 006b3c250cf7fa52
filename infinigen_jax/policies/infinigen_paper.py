"""InfiniGen with the settings of the paper (OSDI 2024, sections 4 and 5) and of its released code.

Layers 0 and 1 are streamed whole from the host. No sinks or recent tokens stay on the device, a row
is moved again in every step that requests it, and all heads and sequences fetch the same number of
rows. Only the defaults differ from `InfiniGen`, and basis "auto" is svd, the paper's, if it exists.
"""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from infinigen_jax.models.base import Params
from infinigen_jax.policies.infinigen import InfiniGen

if TYPE_CHECKING:
    from infinigen_jax.loading.load import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfiniGenPaper(InfiniGen):
    """InfiniGen with the paper's defaults. The paper's alpha is 4 for OPT and 5 for LLaMA."""

    name: ClassVar[str] = "infinigen-paper"
    dense_layers: ClassVar[int | None] = 0
    reuses: ClassVar[bool] = False

    alpha: float = 4.0
    partial_ratio: float = 0.3
    budget: float = 0.2
    sinks: int = 0
    window: int = 1
    count: str = "mean"
    streamed_layers: int = 2
    index_dtype: str = "auto"
    query: str = "plain"
    speculate_from: str = "input"
    layer_budgets: str = "equal"
    tail: bool = False

    def prepare(self, model: "Model", layer: int) -> Params:
        # A balanced conversion also stores the paper's basis.
        paper = self.basis == "auto" and model.svd_bases is not None
        chosen = dataclasses.replace(self, basis="svd") if paper else self
        return InfiniGen.prepare(chosen, model, layer)
