"""Apertus: Qwen 3 with an MLP without gate and a fitted activation, xIELU (arXiv 2411.13010).

Of version 1.5, which also reads images and speech, only the language model is read. It may generate
only the first tokens of its vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from infinigen_jax.models import llama
from infinigen_jax.models.base import HEAD_NORMS, PRE_NORMS, HFConfig, ModelConfig
from infinigen_jax.models.hf import LLAMA3, positive, refuse_unless, relative_from_hf

LINEAR, SMALL = 0.5, -1e-6  # beta and epsilon of the activation, the same in all models
DEFAULTS = {"hidden_act": "xielu", "rms_norm_eps": 1e-5}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    if not hf.keys() & {"rope_scaling", "rope_parameters"}:
        hf["rope_scaling"] = LLAMA3 | {"factor": 8.0}
    activation = hf["hidden_act"]
    refuse_unless(activation == "xielu", f"hidden_act {activation!r} in an apertus model")
    logits, vocabulary = hf.get("output_vocab_size"), hf.get("vocab_size")
    logits = None if logits == vocabulary else logits
    if logits is not None:
        logits = positive(hf, "output_vocab_size", most=positive(hf, "vocab_size"))
        tied = bool(hf.get("tie_word_embeddings"))
        refuse_unless(not tied, f"output_vocab_size {logits} with tied embeddings")
    settings = {"activation": activation, "gated": False, "norms": PRE_NORMS + HEAD_NORMS}
    return relative_from_hf(hf, theta=1.2e7, num_logits=logits, **settings)


class Activation(nnx.Module):
    """xIELU, whose curvatures on both sides of 0 are parameters."""

    def __init__(self, dtype: Any):
        self.positive, self.negative = (nnx.Param(jnp.zeros(1, dtype)) for _ in range(2))

    def __call__(self, x: Float[Array, "*b f"]) -> Float[Array, "*b f"]:
        above = jax.nn.softplus(self.positive[...][0])
        below = LINEAR + jax.nn.softplus(self.negative[...][0])
        curved = (jnp.expm1(jnp.minimum(x, SMALL)) - x) * below
        return jnp.where(x > 0, above * x * x, curved) + LINEAR * x


class Layer(llama.Layer):
    def __init__(self, config: ModelConfig, dtype: Any):
        super().__init__(config, dtype)
        self.activation = Activation(dtype)

    def feed_forward(self, x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        return self.down(self.activation(self.up(x)))
