"""Static layout of a decode step: where each layer keeps its cache, and the size of each part."""

import dataclasses
import functools
import math
from typing import Any, Self

import jax.numpy as jnp
from jax.sharding import Mesh

from infinigen_jax.cache.hot_set import HotSet
from infinigen_jax.cache.layers import Slots, Summed
from infinigen_jax.cache.row_format import RowFormat, row_format
from infinigen_jax.cuda import calls
from infinigen_jax.models import Blueprint, ModelConfig, Params, blueprint
from infinigen_jax.ops.bit_storage import kept_dtype
from infinigen_jax.policies.base import Policy
from infinigen_jax.policies.full import Full
from infinigen_jax.settings.pool import Pool
from infinigen_jax.speculation.layer_budgets import Curves, share_out
from infinigen_jax.transfer import Transfer


@dataclasses.dataclass(frozen=True)
class Layout:
    """Model architecture and engine settings that determine the programs of a step."""

    config: ModelConfig
    dtype: jnp.dtype
    policy: Policy
    transfer: Transfer
    dense_layers: int  # leading layers on the device; those with a sliding window are there as well
    mesh: Mesh  # axes "data" (sequences) and "model" (KV heads)
    rows: str = "auto"
    hot_set: float = 0.0  # entries in multiples of a request; 0 for none, else at least 1
    pool: Pool | None = None
    weights_on_host: bool = False
    curves: Curves | None = None  # loss of each layer by budget, if budgets depend on it
    # Number of leading slots that some sequence always exceeds, see `ops.used_slots.largest_below`:
    # no step has work for so few.
    exceeded: int = 0

    @functools.cached_property
    def of_chunks(self) -> Self:
        """The layout without the settings that do not affect a prompt's layers.

        Engines that differ only in these settings share the programs, also those on disk.
        """
        return dataclasses.replace(
            self, policy=Full(), dense_layers=0, hot_set=0.0, pool=None, curves=None, exceeded=0
        )

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __hash__(self) -> int:
        return self._hash  # of many settings, for programs are looked up by decoder

    @property
    def blueprint(self) -> Blueprint:
        return blueprint(self.config, self.dtype)

    @property
    def slots(self) -> Slots:
        return Slots(self.policy.sinks, self.policy.window, self.policy.tail_block)

    @functools.cached_property
    def on_host(self) -> tuple[int, ...]:
        """Layers that keep their cache on the host, by their number in the model."""
        return tuple(i for i in self.config.full_attention_layers if i >= self.dense_layers)

    @property
    def host_layers(self) -> int:
        return len(self.on_host)

    def host_number(self, layer: int) -> int:
        """Return the index of a model layer among the host layers; -1 for a layer on the device."""
        return self.on_host.index(layer) if layer in self.on_host else -1

    def ring_size(self, layer: int, capacity: int) -> int | None:
        """Return the tokens cached by a layer with a sliding window; None for other layers."""
        window = self.config.window_of(layer)
        return None if window is None else min(window, capacity)

    def summed(self, weights: Params) -> Summed:
        """Return the function of rows leaving a layer's ring whose results the tail sums."""
        return functools.partial(self.policy.tail_values, weights)

    @property
    def row_format(self) -> RowFormat:
        """Format in which the host stores a token's row."""
        return row_format(self.rows, self.dtype, self.config.head_dim, self.as_bits)

    @property
    def as_bits(self) -> bool:
        """Whether two-byte rows are stored as integers; true on the CPU, see `ops.bit_storage`."""
        return self.transfer.in_place

    @property
    def kept_dtype(self) -> jnp.dtype:
        """Dtype of the rows of layers that keep their cache on the device."""
        return kept_dtype(self.dtype, self.as_bits)

    def streams(self, number: int) -> bool:
        """Whether this host layer attends to all its rows, block by block."""
        return self.policy.streams(self.on_host[number])

    @property
    def selecting(self) -> tuple[int, ...]:
        """Host layers that select rows: all that are not streamed."""
        return tuple(i for i in range(self.host_layers) if not self.streams(i))

    @functools.cached_property
    def budgets(self) -> dict[int, float]:
        """Budgets by host layer, for the selecting ones; empty if all use the policy's budget."""
        if self.curves is None or not self.selecting:
            return {}
        layers = [self.on_host[number] for number in self.selecting]
        policy: Any = self.policy
        shares = share_out(self.curves, layers, policy.budget)
        return dict(zip(self.selecting, shares, strict=True))

    def request_sizes(self, capacity: int) -> list[int]:
        """Return the rows allowed per sequence and KV head, for each selecting layer."""
        policy: Any = self.policy
        policies = [dataclasses.replace(policy, budget=share) for share in self.budgets.values()]
        return [x.request_size(capacity) for x in policies or [policy] * len(self.selecting)]

    def request_size(self, capacity: int) -> int:
        """Return the static size of every layer's request; `count` of its rows are valid."""
        return max(self.request_sizes(capacity), default=0)

    def fetches_for(self, layer: int) -> int:
        """Return the host layer whose rows are requested in a layer of the model; -1 for none.

        Layer -1 is the embedding, after which rows of layer 0 may be requested.
        """
        number = self.host_number(layer + self.policy.lead)
        return -1 if number < 0 or self.streams(number) else number

    @property
    def in_chunks(self) -> bool:
        """Whether attention reads only valid rows, see `layer_rows.attend_requested`.

        True where host and device share memory: on the CPU a loop is cheap, and padding costs as
        much as valid rows. Attention weights are not kept, so observing policies are excluded.
        """
        return self.transfer.in_place and not self.policy.observes and self.mesh.size == 1

    @property
    def attends_by_kernel(self) -> bool:
        """Whether a CUDA kernel attends to fetched rows. It keeps no attention weights."""
        stored, d = self.row_format, self.config.head_dim
        if self.transfer.name != "cuda" or self.policy.observes or not stored.exact:
            return False
        return calls.attends(stored.storage, d)

    def host_slots(self, tokens: int, capacity: int) -> int:
        """Return the host slots for up to `tokens`; raise InputError if a pool is too small."""
        if self.pool is None:
            return capacity
        return self.pool.slots(tokens, self.policy.sinks, self.policy.window)

    def padded_rows(self, capacity: int) -> int | None:
        """Return the rows that a step moves per sequence and KV head; None if valid rows count.

        Includes all layers, padding of requests, and streamed layers up to the cache's end. Next to
        layers that move valid rows alone, streamed layers count theirs, too.
        """
        selecting = len(self.selecting)
        if selecting and (self.transfer.concurrent or self.transfer.in_place or self.hot_set):
            return None
        return (self.host_layers - selecting) * capacity + selecting * self.request_size(capacity)

    def hot_entries(self, capacity: int) -> int:
        """Return the entries of a host layer's hot set, per sequence and KV head."""
        return min(capacity, math.ceil(self.hot_set * self.request_size(capacity)))

    def empty_hot_set(self, batch: int, capacity: int) -> HotSet | None:
        """Return an empty hot set for a host layer; None if the layout has no hot sets."""
        size, stored, heads = self.hot_entries(capacity), self.row_format, self.config.num_kv_heads
        if not size:
            return None
        return HotSet.empty(batch, heads, size, stored.width, capacity, stored.storage)
