"""Qwen 3, dense: LLaMA with a norm on each head's query and key, before the rotation."""

from infinigen_jax.models import qwen2
from infinigen_jax.models.base import HEAD_NORMS, PRE_NORMS

config_from_hf = qwen2.config_from_hf
DEFAULTS = qwen2.DEFAULTS | {"head_dim": 128}
SETTINGS = {"norms": PRE_NORMS + HEAD_NORMS}
