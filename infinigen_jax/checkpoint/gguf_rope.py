"""Rotary embedding of GGUF files, as settings of a `config.json`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from infinigen_jax.checkpoint.gguf_file import GgufFile
from infinigen_jax.errors import UnsupportedModelError
from infinigen_jax.models.rope_hf import LLAMA3

ENDS = ("fast", "slow")  # of the frequencies that YaRN stretches in part
# Factors of rotary frequencies, which become settings.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def rope_settings(file: GgufFile, name: str) -> dict[str, Any]:
    """Return `rope_scaling` and `partial_rotary_factor`."""
    data = file.metadata
    hf: dict[str, Any] = {"rope_scaling": None}
    width = data.get(f"{name}.rope.dimension_count")
    head = data.get(f"{name}.attention.key_length")
    if head is None and (heads := data.get(f"{name}.attention.head_count")):
        head = data.get(f"{name}.embedding_length", 0) // heads
    if width and head and name != "nemotron":  # whose converter takes a share of another size
        hf["partial_rotary_factor"] = width / head
    kind, factor = (data.get(f"{name}.rope.scaling.{key}") for key in ("type", "factor"))
    factor = factor or data.get(f"{name}.rope.scale_linear")  # the former key
    if kind is None and factor not in (None, 0, 1):
        kind = "linear"
    if kind in ("linear", "yarn"):
        turns = {f"beta_{end}": data.get(f"{name}.rope.scaling.yarn_beta_{end}") for end in ENDS}
        hf["rope_scaling"] = {"rope_type": kind, "factor": factor} | turns
        if kind == "yarn":
            _check_yarn(data, f"{name}.rope.scaling", factor)
    elif kind not in (None, "none", "longrope"):
        raise UnsupportedModelError(f"rope.scaling.type {kind!r} is not supported")
    if "rope_freqs.weight" in file.tensors:
        hf["rope_scaling"] = _llama3(file, hf | {"theta": data.get(f"{name}.rope.freq_base")})
    if ROPE_TENSORS[1] in file.tensors and ROPE_TENSORS[2] in file.tensors:
        factors = {
            f"{length}_factor": file.read(f"rope_factors_{length}.weight").tolist()
            for length in ("long", "short")
        }
        hf["rope_scaling"] = {"type": "longrope"} | factors
    return hf


def _check_yarn(data: Mapping[str, Any], prefix: str, factor: Any) -> None:
    """Refuse settings of YaRN that change the length of queries and keys from the usual one.

    Files have 1 for the usual factor, or its value, as for OLMo 3.
    """
    usual = 0.1 * math.log(factor) + 1 if isinstance(factor, int | float) and factor > 0 else 1.0
    known = {
        "attn_factor": (1.0, usual),
        "yarn_attn_factor": (1.0, usual),
        "yarn_ext_factor": (1.0,),
        "yarn_log_multiplier": (0.0,),
    }
    for key, values in known.items():
        given = data.get(f"{prefix}.{key}", values[0])
        if not isinstance(given, int | float) or not np.isclose(given, values, rtol=1e-3).any():
            raise UnsupportedModelError(f"rope.scaling.{key} {given} is not supported")


def _llama3(file: GgufFile, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Recover the settings of the rope type "llama3" from its factors of the frequencies."""
    factors = file.read("rope_freqs.weight").astype(np.float64)
    scaling: dict[str, Any] = LLAMA3 | {"factor": float(factors.max())}
    pairs = np.arange(factors.size) / factors.size
    turns = 8192 * float(hf["theta"] or 10000.0) ** -pairs / (2 * np.pi)
    kept = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
    expected = 1.0 / (kept + (1.0 - kept) / max(scaling["factor"], 1.0))
    if not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModelError(
            "frequency factors (rope_freqs.weight) other than LLaMA 3's are not supported"
        )
    return scaling
