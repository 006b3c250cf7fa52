"""Model families: one file each, chosen by `model_type` in config.json.

Imports errors. Start reading at base.py.
"""

from collections.abc import Mapping
from typing import Any

from infinigen_jax.errors import UnsupportedModelError
from infinigen_jax.models.base import Blueprint, ModelConfig, Params, blueprint, random_params
from infinigen_jax.models.family import family

FAMILIES = ("llama", "ministral", "mistral", "opt", "qwen2", "qwen3")
# Reasons to name for unsupported model types that contain these words.
REASONS = {
    "mixtral": "a mixture of experts",
    "moe": "a mixture of experts",
    "deepseek": "a mixture of experts",
    "gemma": "its norms, embedding scale and soft caps differ",
    "mamba": "no attention",
}

__all__ = [
    "FAMILIES",
    "Blueprint",
    "ModelConfig",
    "Params",
    "blueprint",
    "config_from_hf",
    "family",
    "random_params",
]


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed `config.json`.

    Raises:
        UnsupportedModelError: for a model_type or a setting that is not implemented.
    """
    name = hf.get("model_type")
    if name not in FAMILIES:
        reason = next((f": {why}" for part, why in REASONS.items() if part in str(name)), "")
        raise UnsupportedModelError(
            f"config.json: model_type {name!r} is not supported{reason} "
            f"(supported: {', '.join(FAMILIES)})"
        )
    return family(name).config_from_hf(hf)
