"""VaultGemma: Gemma 2 without norms after attention and MLP."""

from infinigen_jax.models import gemma2
from infinigen_jax.models.base import PRE_NORMS, HFConfig, ModelConfig


def config_from_hf(hf: HFConfig) -> ModelConfig:
    return gemma2.config_from_hf(hf, norms=PRE_NORMS)
