"""OLMo 2: LLaMA with norms after attention and MLP, not before, and on all queries and keys."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from infinigen_jax.models import llama
from infinigen_jax.models.base import ModelConfig
from infinigen_jax.models.hf import refuse_sliding_windows
from infinigen_jax.models.llama import Embedding
from infinigen_jax.models.norms import RMSNorm

__all__ = ["Embedding", "Layer", "config_from_hf"]


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate a `config.json` of model_type "olmo2"; refuse unsupported settings."""
    refuse_sliding_windows(hf)  # OLMo 3
    hf = {"rms_norm_eps": 1e-5, **hf}
    return llama.relative_from_hf(hf, "olmo2")


class PostNormLayer(llama.Layer):
    """See `llama.Layer`. The outputs of attention and MLP are normalised, not the inputs."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        super().__init__(config, dtype, rngs)
        del self.attention_norm, self.mlp_norm
        self.attention_post_norm = RMSNorm(config.hidden_size, config, dtype)
        self.mlp_post_norm = RMSNorm(config.hidden_size, config, dtype)


class HeadsNorm(RMSNorm):
    """RMSNorm of all heads together."""

    def __call__(self, x: Float[Array, "*b heads d"]) -> Float[Array, "*b heads d"]:
        return super().__call__(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)


class Layer(PostNormLayer):
    """See `llama.Layer`. Queries, and keys, of all heads are normalised together."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        super().__init__(config, dtype, rngs)
        c = config
        self.q_norm = HeadsNorm(c.query_width, c, dtype)
        self.k_norm = HeadsNorm(c.num_kv_heads * c.head_dim, c, dtype)
