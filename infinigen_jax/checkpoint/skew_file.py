"""Reader of a conversion's skewing results; checks every shape."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from infinigen_jax.checkpoint.manifest import AGAIN, AHEAD_FILE, SKEW_FILE, Manifest
from infinigen_jax.checkpoint.safetensors import SafetensorsFile
from infinigen_jax.errors import InputError
from infinigen_jax.models import ModelConfig, Params

DTYPES = ("float32", "bfloat16", "float16")


class Basis(NamedTuple):
    """Change of basis of a layer, one matrix per KV head: query @ q and key @ k (section 4.2).

    With skew "svd" both are the same orthogonal matrix. In every case query @ key.T = I.
    """

    query: Float[Array, "k d d"]
    key: Float[Array, "k d d"]


class Ahead(NamedTuple):
    """Projection that speculates a layer's query one layer earlier, corrected on calibration text.

    Attributes:
        projection: {"weight" [h*d, e], "bias" [h*d]} in place of W_Q and its bias. Not on the
            device until a policy asks for it.
        basis: balanced basis for this query; query @ key.T is close to I.
    """

    projection: Params
    basis: Basis


def read_skew(folder: Path, manifest: Manifest, config: ModelConfig) -> dict[str, Any]:
    """Read the skewing results as keyword arguments of Model."""
    file = SafetensorsFile(folder / SKEW_FILE)
    square = (config.num_layers, config.num_kv_heads, config.head_dim, config.head_dim)

    def matrices(name: str) -> np.ndarray:
        return _tensor(file, name, square)

    fields: dict[str, Any] = {"bases": (None,) * config.num_layers}
    query, key = matrices("query_basis"), matrices("key_basis")
    if manifest.skew == "none":
        return fields
    _tensor(file, "eigenvalues", square[:-1])
    fields["key_mean"] = np.array(_tensor(file, "key_mean", square[:-1]))
    fields |= read_loss(file, config)
    # Used once, when an engine starts, so they stay in their file.
    fields["tail_moments"] = matrices("tail_keys"), matrices("tail_values")
    if manifest.absorbed:
        return fields
    fields["bases"] = _bases(config, query, key)
    if manifest.skew == "balanced":
        orthogonal = matrices("svd_basis")
        fields["svd_bases"] = _bases(config, orthogonal, orthogonal)
        bases = _bases(config, matrices("ahead_query_basis"), matrices("ahead_key_basis"))
        stored, ahead = SafetensorsFile(folder / AHEAD_FILE), []
        for i, basis in enumerate(bases):
            if basis is None:
                ahead.append(None)
                continue
            shapes = ahead_shapes(config, i).items()
            # Views of the mapped file.
            kernel, bias = (_tensor(stored, name, shape, DTYPES) for name, shape in shapes)
            ahead.append(Ahead({"weight": kernel.T, "bias": bias}, basis))
        fields["ahead"] = tuple(ahead)
        fields["speculate_from"] = manifest.speculate_from
    return fields


def read_loss(file: SafetensorsFile, config: ModelConfig) -> dict[str, np.ndarray]:
    """Read the losses of sparse attention as keyword arguments of Model."""
    shares = file.tensors.get("row_shares")
    count = shares.shape[0] if shares is not None and len(shares.shape) == 1 else 0
    shapes = {
        "sparse_loss": (config.num_layers, 2),
        "row_shares": (count,),
        "row_loss": (config.num_layers, 2, count),
    }
    losses = {name: np.array(_tensor(file, name, shape)) for name, shape in shapes.items()}
    bounded = np.concatenate([[0.0], losses["row_shares"], [1.0]])
    if not count or not np.all(np.diff(bounded) > 0):
        raise InputError(f"{file.path}: row_shares are not ascending shares; {AGAIN}")
    return losses


def ahead_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors in AHEAD_FILE: kernel and bias."""
    kernel, bias = f"layers.{layer}.kernel", f"layers.{layer}.bias"
    return {kernel: (config.hidden_size, config.query_width), bias: (config.query_width,)}


def _tensor(
    file: SafetensorsFile, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = ("float32",)
) -> np.ndarray:
    """Read a tensor after checking its shape and dtype."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.shape != shape or tensor.dtype.name not in dtypes:
        shown = "missing" if tensor is None else f"{tensor.dtype} {tensor.shape}"
        expected = f"{' or '.join(dtypes)} {shape}"
        raise InputError(f"{file.path}: {name} is {shown} instead of {expected}; {AGAIN}")
    return file.read(name)


def _bases(config: ModelConfig, query: np.ndarray, key: np.ndarray) -> tuple[Basis | None, ...]:
    """Return the bases of all layers; None for those with a sliding window."""
    layers = config.full_attention_layers
    return tuple(
        Basis(jnp.array(query[i]), jnp.array(key[i])) if i in layers else None
        for i in range(config.num_layers)
    )
