"""cuDNN's attention without a GPU: its documented behaviour, in float32."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn


def stand_in(q: Any, keys: Any, values: Any, *, log: Any = jnp.log, **options: Any) -> Any:
    """`cudnn.dot_product_attention` in float32; masks are added to the scores."""
    assert options.pop("qkv_layout") == "BNTH" and options.pop("return_residual")
    mask, kind = options.pop("mask"), options.pop("mask_type")
    window, scale = options.pop("sliding_window_length"), options.pop("scale")
    assert not options
    b, h, c, d = q.shape
    n = keys.shape[2]
    grouped = q.reshape(b, keys.shape[1], -1, c, d)
    scores = scale * jnp.einsum("bkgcd,bknd->bkgcn", grouped, keys).reshape(b, h, c, n)
    if mask is not None:
        assert mask.shape == (b, 1, c, n)
        scores += jnp.where(mask, 0.0, -(2.0**41))
    distance = np.subtract.outer(np.arange(c), np.arange(n))[None, None]
    if kind == cudnn.MaskType.CAUSAL:
        scores = jnp.where(distance >= 0, scores, -jnp.inf)
    if window is not None:
        assert kind == cudnn.MaskType.CAUSAL  # nothing else has a window
        scores = jnp.where(distance < window, scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / total).reshape(b, keys.shape[1], -1, c, n)
    output = jnp.einsum("bkgcn,bknd->bkgcd", weights, values).reshape(q.shape)
    return output, (peak + log(total))[..., 0]
