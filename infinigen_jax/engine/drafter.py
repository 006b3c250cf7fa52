"""Decoder and weights of drafted steps: those of the engine, or a small copy of the weights.

A verification corrects errors of the copy, so the copy may be coarse. It stays on the device: with
weights in host memory, a draft moves none of them.
"""

import dataclasses

import jax

from infinigen_jax.cache.host_array import Placement
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Weights
from infinigen_jax.errors import ParameterError
from infinigen_jax.models import Params
from infinigen_jax.models.packed import join
from infinigen_jax.models.small_weights import shrink, small_dtype


def make_drafter(decoder: Decoder, weights: Weights, dtype: str | None) -> tuple[Decoder, Weights]:
    """Return the decoder and the weights of drafted steps.

    A copy shares the embedding and the policy's arrays with `weights`. `dtype` is the form of its
    matrices, see `models.small_weights`; None for no copy.
    """
    if dtype is None:
        return decoder, weights
    whole, layers = Placement(decoder.mesh).whole, weights.params["layers"]
    if small_dtype(layers[0]) is not None:
        raise ParameterError("draft_weights", "the model's weights are small already; leave it out")

    def copied(layer: Params) -> Params:
        layer = jax.device_put(layer, whole)
        small = shrink(join(layer) if decoder.transfer.in_place else layer, dtype)
        return jax.device_put(small, whole)

    params = weights.params | {"layers": [copied(layer) for layer in layers]}
    on_device = dataclasses.replace(decoder, weights_on_host=False)
    return on_device, weights._replace(params=params)
