"""Which layers have their cache where, and how large each part of it is: all static."""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from infinigen_jax.cache.hot_set import HotSet
from infinigen_jax.cache.layers import Slots, Summed
from infinigen_jax.cache.pool import Pool
from infinigen_jax.cache.row_format import RowFormat, row_format
from infinigen_jax.models import Blueprint, ModelConfig, Params, blueprint
from infinigen_jax.ops.bit_storage import kept_dtype
from infinigen_jax.policies.base import Policy
from infinigen_jax.speculation.layer_budgets import Curves, share_out
from infinigen_jax.transfer import Transfer


@dataclasses.dataclass(frozen=True)
class Layout:
    """One model architecture and one set of choices.

    Attributes:
        dense_layers: leading layers whose cache stays on the device. So does that of layers with
            a sliding window.
        mesh: axes "data" (sequences) and "model" (KV heads).
        rows: format of the host's rows, see `row_format`.
        hot_set: entries of the hot set, in multiples of a request; 0 for none, else at least 1.
        pool: the limit of the host's cache, if it has one.
        weights_on_host: see `weights`.
        curves: what layers lose by their share of the rows, if the budget is shared out by that.
    """

    config: ModelConfig
    dtype: jnp.dtype
    policy: Policy
    transfer: Transfer
    dense_layers: int
    mesh: Mesh
    rows: str = "auto"
    hot_set: float = 0.0
    pool: Pool | None = None
    weights_on_host: bool = False
    curves: Curves | None = None

    @property
    def blueprint(self) -> Blueprint:
        return blueprint(self.config, self.dtype)

    @property
    def slots(self) -> Slots:
        return Slots(self.policy.sinks, self.policy.window, self.policy.tail_block)

    @functools.cached_property
    def on_host(self) -> tuple[int, ...]:
        """The layers that have their cache on the host, by their number in the model."""
        layers = range(self.dense_layers, self.config.num_layers)
        return tuple(i for i in layers if self.config.window_of(i) is None)

    @property
    def host_layers(self) -> int:
        """How many layers have their cache on the host."""
        return len(self.on_host)

    def host_number(self, layer: int) -> int:
        """Of a layer of the model, among those on the host; -1 for one that is not."""
        return self.on_host.index(layer) if layer in self.on_host else -1

    def ring_size(self, layer: int, capacity: int) -> int | None:
        """Tokens in the cache of a layer with a sliding window; None for other layers."""
        window = self.config.window_of(layer)
        return None if window is None else min(window, capacity)

    def summed(self, weights: Params) -> Summed:
        """What is summed of the rows that leave the device, for the tail.

        Args:
            weights: of the policy, for this layer.
        """
        return functools.partial(self.policy.tail_values, weights)

    @property
    def row_format(self) -> RowFormat:
        """How the host stores a token's row."""
        return row_format(self.rows, self.dtype, self.config.head_dim, self.as_bits)

    @property
    def as_bits(self) -> bool:
        """Whether rows of two-byte numbers are kept as integers: on the CPU, see `bits`."""
        return self.transfer.in_place

    @property
    def kept_dtype(self) -> jnp.dtype:
        """Of the rows of layers whose cache is on the device."""
        return kept_dtype(self.dtype, self.as_bits)

    def streams(self, number: int) -> bool:
        """Whether this host layer is attended whole, block by block."""
        return self.policy.streams(self.on_host[number])

    @property
    def selecting(self) -> tuple[int, ...]:
        """The host layers whose rows are selected: all but those that are streamed."""
        return tuple(i for i in range(self.host_layers) if not self.streams(i))

    @functools.cached_property
    def budgets(self) -> dict[int, float]:
        """Budgets of the selecting host layers, by host layer; empty if all have the policy's."""
        if self.curves is None or not self.selecting:
            return {}
        layers = [self.on_host[number] for number in self.selecting]
        shares = share_out(self.curves, layers, self._budget)
        return dict(zip(self.selecting, shares, strict=True))

    @property
    def _budget(self) -> float:
        policy: Any = self.policy
        return policy.budget

    def budget_policy(self, number: int) -> Policy:
        """The policy with the budget of one host layer."""
        if number not in self.budgets:
            return self.policy
        policy: Any = self.policy
        return dataclasses.replace(policy, budget=self.budgets[number])

    def request_sizes(self, capacity: int) -> list[int]:
        """Rows that the budgets allow per sequence and KV head, of each selecting layer."""
        return [self.budget_policy(i).request_size(capacity) for i in self.selecting]

    def request_size(self, capacity: int) -> int:
        """Static number of rows in a request: the same for all layers, so that one program serves
        them; counts mask what a layer's own budget does not allow."""
        return max(self.request_sizes(capacity), default=0)

    @property
    def requests_first(self) -> bool:
        """Whether layer 0 is on the host and no layer before it could request its rows."""
        return self.policy.lead > 0 and self.host_number(0) == 0

    def fetches_for(self, layer: int) -> int:
        """The host layer whose rows are requested and awaited in a layer of the model.

        -1 if it is not on the host.
        """
        return self.host_number(layer + self.policy.lead)

    @property
    def in_chunks(self) -> bool:
        """Whether attention takes as many of the fetched rows as are meant, see `in_place`.

        Where the host's memory is the device's: on the CPU a loop costs little, and a request's
        padding as much as its rows. The weights, which some policies observe, are not kept then.
        """
        return self.transfer.in_place and not self.policy.observes and self.mesh.size == 1

    def host_slots(self, tokens: int, capacity: int) -> int:
        """Slots of the host's cache for sequences of up to `tokens`; without a pool the capacity.

        Raises:
            InputError: if a pool is too small.
        """
        if self.pool is None:
            return capacity
        return self.pool.slots(tokens, self.policy.sinks, self.policy.window)

    def padded_rows(self, capacity: int) -> int | None:
        """Rows that a step moves per sequence and KV head, whatever is meant, of all layers.

        A request's padding moves with it, and streamed layers are read to the cache's end. None if
        only what is meant moves.
        """
        streamed = sum(self.streams(number) for number in range(self.host_layers))
        if self.selecting and (self.transfer.masks or self.hot_set):
            return None
        return streamed * capacity + len(self.selecting) * self.request_size(capacity)

    def hot_entries(self, capacity: int) -> int:
        """Entries of a host layer's hot set, per sequence and KV head."""
        return min(capacity, math.ceil(self.hot_set * self.request_size(capacity)))

    def empty_hot_set(self, batch: int, capacity: int) -> HotSet | None:
        """A hot set for a host layer, if there are to be any."""
        size, stored = self.hot_entries(capacity), self.row_format
        if not size:
            return None
        heads = self.config.num_kv_heads
        return HotSet.empty(batch, heads, size, stored.width, capacity, stored.storage)
