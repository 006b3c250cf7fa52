"""OLMo 2: LLaMA with norms after attention and MLP, not before, and on all queries and keys."""

from infinigen_jax.models.base import HEAD_NORMS, POST_NORMS

DEFAULTS = {"rms_norm_eps": 1e-5}
SETTINGS = {
    "norms": POST_NORMS + HEAD_NORMS,
    "head_norms": "all",
    "windows": "refused",  # OLMo 3
}
