"""VaultGemma: Gemma 2 without norms after attention and MLP."""

from infinigen_jax.models import gemma2
from infinigen_jax.models.base import PRE_NORMS

DEFAULTS, config_from_hf = gemma2.DEFAULTS, gemma2.config_from_hf
SETTINGS = {"norms": PRE_NORMS}
