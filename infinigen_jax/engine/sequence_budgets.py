"""Budgets of the sequences in a live batch. They are data, so that a change compiles nothing."""

from typing import Any

import jax
import numpy as np

from infinigen_jax.cache.host_array import Placement
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.engine.runtime import Runtime
from infinigen_jax.models import Params
from infinigen_jax.policies.base import Budgeted
from infinigen_jax.selection.select import budget_fraction


def budget_limit(decoder: Decoder) -> float | None:
    """Return the policy's budget, the limit of a sequence's; None if they cannot differ."""
    policy = decoder.policy
    if not isinstance(policy, Budgeted) or policy.observes or not decoder.selecting:
        return None
    return policy.budget


class SequenceBudgets:
    """Budgets by sequence, at most the policy's; `weights` are the policy's arrays with these."""

    def __init__(self, runtime: Runtime, batch: int):
        self._decoder, self._most = runtime.decoder, budget_limit(runtime.decoder)
        self._policy = self.weights = runtime.weights.policy
        self._at = Placement(runtime.mesh).batch
        if self._most is not None:
            self._budgets = np.full(batch, self._most)
            self.weights = self._with_budgets()

    def replace(self, sequence: int, budget: float | None) -> None:
        """Set the budget of a sequence; None for the policy's."""
        budget = budget or self._most
        if budget is not None and budget != self._budgets[sequence]:
            self._budgets[sequence] = budget
            self.weights = self._with_budgets()

    def of(self, sequence: int) -> float | None:
        """Return the budget of a sequence; None if sequences cannot differ."""
        return None if self._most is None else float(self._budgets[sequence])

    def _with_budgets(self) -> tuple[Params, ...]:
        assert self._most is not None
        layers, shares = list(self._policy), {}
        for number in self._decoder.selecting:
            budget = self._decoder.budgets.get(number, self._most)
            if budget not in shares:
                shares[budget] = self._shares(budget)
            layers[number] = layers[number] | {"share": shares[budget]}
        return tuple(layers)

    def _shares(self, budget: float) -> Any:
        """Return a layer's budget for each sequence, scaled as the sequence's budget is."""
        scaled = [budget_fraction(budget * (each / self._most)) for each in self._budgets]
        pairs = np.array([share.as_integer_ratio() for share in scaled], np.int32)
        return jax.device_put(pairs, self._at)
