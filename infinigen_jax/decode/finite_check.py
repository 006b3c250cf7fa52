"""`check`: location of the first NaN or infinity, by stage and position.

A place is [b, 2]: stage and position, both -1 while all values are finite. Stage 0 is the
embedding, stages 1 to L are the outputs of the layers, stage L + 1 the logits.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax.errors import ParameterError
from infinigen_jax.models import Params

if TYPE_CHECKING:
    from infinigen_jax.decode.layer import Decoder


class NotFiniteError(ParameterError):
    """A computation produced a NaN or an infinity; the message names layer and position."""


def finite_after(decoder: Any, seen: Any) -> tuple[Any, Bool[Array, " b"]]:
    """`Watch` function that records whether a layer's output is finite, per sequence."""
    return seen.after, jnp.all(jnp.isfinite(seen.after.x), axis=-1)


def first_place(
    stages: tuple[Bool[Array, " b"], ...], positions: Int[Array, " b"]
) -> Int[Array, "b 2"]:
    """Return the place of a decode step's first stage that is not finite."""
    bad = ~jnp.stack(stages, axis=1)
    any_bad = jnp.any(bad, axis=1)
    stage = jnp.where(any_bad, jnp.argmax(bad, axis=1).astype(jnp.int32), -1)
    return jnp.stack([stage, jnp.where(any_bad, positions, -1)], axis=1)


@jax.jit
def look(
    place: Any, stage: Any, x: Float[Array, "b c e"], start: Array, count: Array
) -> Int[Array, "b 2"]:
    """Return the earlier place, or that of the chunk's first token whose `x` is not finite."""
    valid = jnp.arange(x.shape[1], dtype=jnp.int32)[None] < count[:, None]
    bad = valid & ~jnp.all(jnp.isfinite(x), axis=-1)
    position = start + jnp.argmax(bad, axis=1).astype(jnp.int32)
    first = jnp.stack([jnp.broadcast_to(stage, position.shape), position], axis=1)
    new = jnp.any(bad, axis=1)[:, None] & (place[:, :1] < 0)
    return jnp.where(new, first, place)


class Places:
    """First places that are not finite, over the chunks of some prompts."""

    def __init__(self, decoder: "Decoder", embedding: Params, prompts: int):
        self._decoder, self._embedding = decoder, embedding
        self.place = np.full((prompts, 2), -1, np.int32)

    def __call__(self, stage: int, x: Array, start: Array, count: Array) -> None:
        """Check a stage's output; after the last layer, also the logits of the last token."""
        self.place = look(self.place, np.int32(stage), x, start, count)
        if stage == self._decoder.config.num_layers:
            logits = _last_logits(self._decoder, self._embedding, x, count)
            one, last = jnp.minimum(count, 1), start + jnp.maximum(count - 1, 0)
            self.place = look(self.place, np.int32(stage + 1), logits, last, one)


@functools.partial(jax.jit, static_argnums=0)
def _last_logits(
    decoder: "Decoder", embedding: Params, x: Float[Array, "b c e"], count: Int[Array, " b"]
) -> Float[Array, "b 1 v"]:
    last = jnp.maximum(count - 1, 0)[:, None, None]
    return decoder.logits(embedding, jnp.take_along_axis(x, last, axis=1)[:, 0])[:, None]


def refuse(places: Sequence[Any], layers: int, prompts: Any) -> None:
    """Raise NotFiniteError if a place is set; `prompts` has each sequence's, below 0 for none."""
    for place in places:
        for prompt, (stage, position) in zip(prompts, np.asarray(place), strict=True):
            if stage >= 0 and prompt >= 0:
                name = f"the output of layer {stage - 1}" if stage else "the embedding"
                name = "the logits" if stage > layers else name
                raise NotFiniteError(
                    "check",
                    f"{name} of prompt {prompt + 1} holds a NaN or an infinity at position "
                    f"{position}; get the model again, or use `dtype` float32 if it is not in use",
                )
