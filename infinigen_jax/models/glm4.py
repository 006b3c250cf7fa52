"""GLM-4-0414 and later, dense: GLM-4 with norms after attention and MLP as well."""

from infinigen_jax.models import glm
from infinigen_jax.models.base import POST_NORMS, PRE_NORMS, HFConfig, ModelConfig


def config_from_hf(hf: HFConfig) -> ModelConfig:
    return glm.config_from_hf(hf, norms=PRE_NORMS + POST_NORMS)
