"""EXAONE 3.0 and 3.5: LLaMA with other names of settings and tensors."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.llama import relative_from_hf
from infinigen_jax.models.rope_hf import rope_from_hf

DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
NAMES = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    hf = DEFAULTS | {NAMES.get(name, name): value for name, value in hf.items()}
    return relative_from_hf(hf, rope=rope_from_hf(hf, theta=5e5))
