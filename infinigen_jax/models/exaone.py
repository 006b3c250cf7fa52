"""EXAONE 3.0 and 3.5: LLaMA with other names of settings and tensors."""

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import relative_from_hf

DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
NAMES = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}


def config_from_hf(hf: HFConfig) -> ModelConfig:
    return relative_from_hf({NAMES.get(name, name): x for name, x in hf.items()}, theta=5e5)
