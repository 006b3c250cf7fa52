"""GLM-4-0414 and later, dense: GLM-4 with norms after attention and MLP as well."""

from collections.abc import Mapping
from typing import Any

from infinigen_jax.models.base import POST_NORMS, PRE_NORMS, ModelConfig
from infinigen_jax.models.glm import glm_from_hf


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    return glm_from_hf(hf, "glm4", norms=PRE_NORMS + POST_NORMS)
