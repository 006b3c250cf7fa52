"""Full cache: every row moves to the device for every token, as in FlexGen. Exact."""

import dataclasses
from typing import ClassVar

from infinigen_jax.policies.base import Lookup, Policy
from infinigen_jax.selection.select import Request
from infinigen_jax.settings.policy import ResidentSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Full(ResidentSettings, Policy):
    """Policy that attends to every row; host layers stream through the device block by block.

    New rows are flushed to the host in blocks of `window` rows.
    """

    name: ClassVar[str] = "full"
    pools: ClassVar[bool] = True

    def streams(self, layer: int) -> bool:
        return True

    def request_size(self, capacity: int) -> int:
        return capacity

    def select(self, lookup: Lookup) -> Request:
        raise TypeError("the full policy streams every row and selects none")
