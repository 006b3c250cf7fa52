"""VaultGemma: Gemma 2 without norms after attention and MLP."""

from collections.abc import Mapping
from typing import Any

from infinigen_jax.models.base import PRE_NORMS, ModelConfig
from infinigen_jax.models.gemma2 import capped_from_hf


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    return capped_from_hf(hf, "vaultgemma", norms=PRE_NORMS)
