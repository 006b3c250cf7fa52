"""Remedies for too little memory: the parameters that apply to a generation."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from infinigen_jax.decode.layer import Decoder
from infinigen_jax.numeric import listed

if TYPE_CHECKING:
    from infinigen_jax.engine.memory_plan import MemoryPlan

LEAST = 0.05  # smallest share of the memory for which a parameter is suggested
LENGTHS = ("the prompt length", "`max_new_tokens`")


@dataclasses.dataclass(frozen=True)
class Remedies:
    """Remedies of a generation.

    Attributes:
        lengths: parameters, in backticks, that determine the capacity.
        waiting: whether further prompts are admitted later, each prefilled outside the batch.
    """

    decoder: Decoder
    lengths: tuple[str, ...] = LENGTHS
    batch: int = 1
    waiting: bool = False
    may_pool: bool = True

    def for_host(self, plan: "MemoryPlan", *, unified: bool) -> str:
        """Return the advice for too little host memory."""
        decoder = self.decoder
        prefixes = ["`prefix_bytes`"] * bool(plan.prefixes)
        lower, use = [*self.lengths, *prefixes, *self._batch()], []
        stored = decoder.row_format
        if plan.host_cache and stored.exact and dataclasses.replace(stored, name="int8").groups:
            use.append("`rows` int8")
        use += self._pool()
        if unified:
            smaller = not stored.exact or decoder.pool is not None  # a host layer needs less
            lower += self._parts(plan, plan.total, dense=smaller)
        else:
            use += ["more `dense_layers`"] * bool(decoder.host_layers)
            use += ["`weights` device"] * decoder.weights_on_host
        return advice(lower, use)

    def for_device(self, plan: "MemoryPlan") -> str:
        """Return the advice for too little device memory."""
        decoder = self.decoder
        lower = [*self.lengths, *self._batch(), *self._parts(plan, plan.device, dense=True)]
        use = [*(["`weights` host"] * (not decoder.weights_on_host)), *self._pool()]
        return advice(lower, use)

    def _batch(self) -> Iterator[str]:
        if self.batch > 1:
            yield "`batch`"
        elif self.waiting:
            yield "the number of prompts to 1"

    def _pool(self) -> Iterator[str]:
        decoder = self.decoder
        if self.may_pool and decoder.host_layers and decoder.policy.pools and decoder.pool is None:
            yield "`pool.tokens`"

    def _parts(self, plan: "MemoryPlan", whole: int, *, dense: bool) -> Iterator[str]:
        """Return the parameters that determine the larger parts of the memory.

        `dense` states whether a dense layer needs more memory than a host layer.
        """
        sizes = {
            "`dense_layers`": plan.dense_cache if dense and self.decoder.dense_layers else 0,
            # With a pool, prompts are read in one piece.
            "`prefill_chunk`": plan.workspace if self.decoder.pool is None else 0,
            "`hot_set`": plan.hot,
            "`partial_ratio`": plan.index if hasattr(self.decoder.policy, "partial_ratio") else 0,
        }
        return (name for name, size in sizes.items() if size > LEAST * whole)


def advice(lower: Sequence[str], use: Sequence[str]) -> str:
    """Join parameters to lower and parameters to use into one clause."""
    parts = [f"{verb} {listed(names)}" for verb, names in (("lower", lower), ("use", use)) if names]
    return ", or ".join(parts)
