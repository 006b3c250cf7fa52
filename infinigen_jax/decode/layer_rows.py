"""Cached rows of one layer in a decode step: all on the device, or most of them on the host.

Both kinds have the same methods, so that `Decoder.decode_layer` treats them alike:

    write(key, value)    add the rows of the current tokens
    near()               rows on the device, for a guess that waits for no transfer
    attend(q, carry)     attention over all rows that the layer attends to
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from infinigen_jax.cache.cache import HostLayer
from infinigen_jax.cache.host_array import capacity_of
from infinigen_jax.cache.layers import DenseLayer, Resident, Sliding
from infinigen_jax.decode.layout import Layout
from infinigen_jax.decode.sparse_attention import attend_fetched, attend_streamed, count_streamed
from infinigen_jax.decode.state import Carry, Counts, LayerInputs, LayerState
from infinigen_jax.ops.attention import Part, attend
from infinigen_jax.ops.used_slots import over_used


@dataclasses.dataclass(frozen=True)
class DeviceRows:
    """Rows of a layer that are all on the device."""

    layout: Layout
    local: DenseLayer | Sliding
    positions: Int[Array, " b"]
    observed: Any = None

    def write(self, key: Float[Array, "b k d"], value: Float[Array, "b k d"]) -> "DeviceRows":
        local = self.local.write(key, value, self.positions)
        return dataclasses.replace(self, local=local)

    def near(self) -> Part:
        return self.local.near(self.positions, self.layout.slots, self.layout.dtype)

    def attend(
        self, q: Float[Array, "b k g d"], carry: Carry
    ) -> tuple[Float[Array, "b k g d"], "DeviceRows", Counts]:
        part = self.local.part(self.positions, self.layout.dtype)
        cap = self.layout.config.attention_softcap

        def attend_first(slots: int) -> Array:
            return attend(q, Part(*(x[:, :, :slots] for x in part)), cap=cap)

        o = over_used(attend_first, jnp.max(self.positions) + 1, part.keys.shape[2])
        return o, self, carry.counts


@dataclasses.dataclass(frozen=True)
class HostRows:
    """Rows of a layer on the host; sinks and recent tokens are also on the device."""

    layout: Layout
    local: Resident
    positions: Int[Array, " b"]
    observed: Any
    host: Shaped[Array, "l a k t w"]
    place: HostLayer

    def write(self, key: Float[Array, "b k d"], value: Float[Array, "b k d"]) -> "HostRows":
        row = jnp.concatenate([key, value], axis=-1)
        summed = self.layout.summed(self.place.weights or {})
        local = self.local.write(row, self.positions, self.layout.slots, summed)
        return dataclasses.replace(self, local=local)

    def near(self) -> Part:
        return self.local.near(self.positions, self.layout.slots, self.layout.dtype)

    def attend(
        self, q: Float[Array, "b k g d"], carry: Carry
    ) -> tuple[Float[Array, "b k g d"], "HostRows", Counts]:
        stored = self.host, self.local, self.place, self.positions
        if carry.fetched is None:
            o = attend_streamed(self.layout, q, self.local, self.host, self.place, self.positions)
            capacity = capacity_of(self.host, q.shape[0])
            counts = count_streamed(self.layout, carry.counts, capacity, self.place, self.positions)
            return o, self, counts
        o, attended = attend_fetched(self.layout, q, carry.fetched, *stored)
        if attended is None:
            return o, self, carry.counts
        observed = self.layout.policy.observe(self.observed, attended)
        return o, dataclasses.replace(self, observed=observed), carry.counts


def layer_rows(layout: Layout, inputs: LayerInputs, state: LayerState) -> DeviceRows | HostRows:
    """Return the rows of a layer, on the device or on the host."""
    common: Any = layout, state.local, inputs.positions, state.observed
    if inputs.place is None:
        return DeviceRows(*common)
    assert inputs.host is not None
    return HostRows(*common, host=inputs.host, place=inputs.place)
