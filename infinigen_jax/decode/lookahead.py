"""Timing of speculation: when a layer of a decode step requests rows, and by which query.

    OwnQuery       requests its own rows from its own input, and waits before it attends
    FromInput      requests the next layer's rows from its input (figure 8 of the paper)
    FromResident   requests the next layer's rows after attention to the resident rows: a more
                   accurate guess that waits for no transfer
    NoRequest      requests no rows

`Decoder.decode_layer` calls `from_input` once the layer's input is known and `from_resident` once
its query is known. Each kind acts in one of the two.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
from jaxtyping import Array, Float

from infinigen_jax.cache.hot_set import HotSet
from infinigen_jax.cache.pool import Kept
from infinigen_jax.decode.layer_rows import DeviceRows, HostRows
from infinigen_jax.decode.state import Carry, LayerInputs, Started, Target
from infinigen_jax.models.llama import Layer
from infinigen_jax.ops.attention import attend

if TYPE_CHECKING:
    from infinigen_jax.decode.layer import Decoder

Hot = HotSet | Kept | None


@dataclasses.dataclass(frozen=True)
class NoRequest:
    """Layer that requests no rows."""

    decoder: "Decoder"
    inputs: LayerInputs

    def from_input(
        self, a: Float[Array, "b e"], carry: Carry, hot: Hot
    ) -> tuple[Carry, Started | None, Hot]:
        """Return the carry, the transfer under way (or None), and the target's hot set."""
        return carry, None, hot

    def from_resident(
        self,
        started: Started | None,
        layer: Layer,
        x: Float[Array, "b e"],
        q: Float[Array, "b k g d"],
        rows: DeviceRows | HostRows,
        hot: Hot,
    ) -> tuple[Started | None, Float[Array, "b k g d"]]:
        """Return the transfer under way (or None), and the query, tied to its request."""
        return started, q


@dataclasses.dataclass(frozen=True)
class OwnQuery(NoRequest):
    """Layer that requests its own rows and waits for them."""

    target: Target

    def from_input(
        self, a: Float[Array, "b e"], carry: Carry, hot: Hot
    ) -> tuple[Carry, Started | None, Hot]:
        started = self.decoder.start(self.inputs, self.target, a, hot)
        carry, hot = self.decoder.wait(started, carry, hot)
        return carry, None, hot


@dataclasses.dataclass(frozen=True)
class FromInput(NoRequest):
    """Layer that requests the next layer's rows from its own input."""

    target: Target

    def from_input(
        self, a: Float[Array, "b e"], carry: Carry, hot: Hot
    ) -> tuple[Carry, Started | None, Hot]:
        return carry, self.decoder.start(self.inputs, self.target, a, hot), hot


@dataclasses.dataclass(frozen=True)
class FromResident(NoRequest):
    """Layer that requests the next layer's rows after attention to its resident rows."""

    target: Target

    def from_resident(
        self,
        started: Started | None,
        layer: Layer,
        x: Float[Array, "b e"],
        q: Float[Array, "b k g d"],
        rows: DeviceRows | HostRows,
        hot: Hot,
    ) -> tuple[Started | None, Float[Array, "b k g d"]]:
        with jax.named_scope("resident"):
            o = attend(q, rows.near(), cap=self.decoder.config.attention_softcap)
            x = x + self.decoder.output(layer, o)
        # Normalise with the parameters of the layer whose input `x` approximates.
        a = self.decoder.blueprint.layer(self.target.params).attention_input(x)
        started = self.decoder.start(self.inputs, self.target, a, hot)
        return started, self.decoder.tie(started, q)


def lookahead(decoder: "Decoder", inputs: LayerInputs) -> NoRequest:
    """Return the timing of a layer's requests."""
    if inputs.target is not None:
        kind = {"input": FromInput, "resident": FromResident}[decoder.policy.source]
        return kind(decoder, inputs, inputs.target)
    place = inputs.place
    if decoder.policy.lead or place is None or place.weights is None:
        return NoRequest(decoder, inputs)
    own = Target(inputs.params, place.weights, place.state, place.number, place.positions)
    return OwnQuery(decoder, inputs, own)
