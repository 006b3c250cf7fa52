"""Model families: one file each, chosen by `model_type` in config.json.

Imports ops, settings and what they import. Start reading at base.py.
"""

import dataclasses
import math

from infinigen_jax.errors import UnsupportedModelError
from infinigen_jax.models.base import (
    Blueprint,
    HFConfig,
    ModelConfig,
    Params,
    blueprint,
    family,
    random_params,
)
from infinigen_jax.models.hf import refuse_unless, relative_from_hf

FAMILIES = (
    *("apertus", "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone", "exaone4", "gemma"),
    *("gemma2", "gemma3", "gemma4", "glm", "glm4", "granite", "granitemoehybrid", "helium"),
    *("hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama"),
    *("ministral", "ministral3", "mistral", "muse_glimmer", "nemotron", "olmo2", "olmo3", "opt"),
    *("phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma"),
)
ALIASES = {  # other names of a model_type
    "apertus1p5_text": "apertus",
    "gemma3_text": "gemma3",
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), "gemma4"),
    "muse_glimmer_text": "muse_glimmer",
}
# Reasons to name for unsupported model types that contain these words.
REASONS = {
    "mixtral": "a mixture of experts",
    "moe": "a mixture of experts",
    "gpt_oss": "a mixture of experts, with attention sinks as weights",
    "deepseek": "a mixture of experts",
    "gemma": "of Gemma, the text models of versions 1 to 3 and the dense ones of 4 are",
    "mamba": "no attention",
}

__all__ = [
    "FAMILIES",
    "Blueprint",
    "ModelConfig",
    "Params",
    "blueprint",
    "config_from_hf",
    "random_params",
]


def config_from_hf(hf: HFConfig) -> ModelConfig:
    """Translate a parsed `config.json`; refuse a model_type that is not implemented.

    A family's module may have DEFAULTS of settings that files leave out, SETTINGS, which are the
    same in all its models, and a function `config_from_hf` for others.
    """
    name = hf.get("model_type")
    name = ALIASES.get(str(name), name)
    if name not in FAMILIES:
        reason = next((f": {why}" for part, why in REASONS.items() if part in str(name)), "")
        raise UnsupportedModelError(
            f"config.json: model_type {name!r} is not supported{reason} "
            f"(supported: {', '.join(FAMILIES)})"
        )
    module = family(name)
    defaults, settings = (getattr(module, table, {}) for table in ("DEFAULTS", "SETTINGS"))
    read = getattr(module, "config_from_hf", relative_from_hf)
    config = dataclasses.replace(read(defaults | hf, **settings), family=name)
    refuse_unless(0 <= config.norm_eps < math.inf, f"epsilon {config.norm_eps} of the norms")
    return config
