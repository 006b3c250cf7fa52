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
        self.attention_post_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.mlp_post_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)

    def attention_input(self, x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        return x

    def attention_output(self, o: Float[Array, "*b h d"]) -> Float[Array, "*b e"]:
        return self.attention_post_norm(super().attention_output(o))

    def mlp(self, x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        return self.mlp_post_norm(self.feed_forward(x))


class Layer(PostNormLayer):
    """See `llama.Layer`. Queries, and keys, of all heads are normalised together."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        super().__init__(config, dtype, rngs)
        c = config
        self.q_norm = RMSNorm(c.query_width, c.norm_eps, dtype)
        self.k_norm = RMSNorm(c.num_kv_heads * c.head_dim, c.norm_eps, dtype)

    def normed_query(self, q: Float[Array, "*b h d"]) -> Float[Array, "*b h d"]:
        return _over_heads(self.q_norm, q)

    def normed_key(self, key: Float[Array, "*b k d"]) -> Float[Array, "*b k d"]:
        return _over_heads(self.k_norm, key)


def _over_heads(norm: RMSNorm, x: Float[Array, "*b heads d"]) -> Float[Array, "*b heads d"]:
    return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)
