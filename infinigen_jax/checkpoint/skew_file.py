"""What a conversion found beside the weights: reading it, with every shape and inverse checked."""

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
from infinigen_jax.skew.neurons import projection_shapes

TAIL_MOMENTS = ("tail_keys", "tail_values")  # `Model.tail_moments`
DTYPES = ("float32", "bfloat16", "float16")


class Basis(NamedTuple):
    """Change of basis of a layer, per KV head: speculated q @ query, and k @ key.

    With skew "svd" both are the same orthogonal matrix; in any case query @ key.T = I.
    """

    query: Float[Array, "k d d"]
    key: Float[Array, "k d d"]


class Ahead(NamedTuple):
    """How to guess a layer's query from an earlier layer, corrected on calibration text.

    Attributes:
        projection: {"kernel" [e, h*d], "bias" [h*d]}, in place of W_Q and its bias, and what it
            has of `neurons`. Not on the device before a policy asks for it.
        basis: the balanced one for this query; query @ key.T is near I, as the guess is good.
    """

    projection: Params
    basis: Basis


def read_skew(folder: Path, manifest: Manifest, config: ModelConfig) -> dict[str, Any]:
    """The fields of a Model that come from the conversion; shapes and orthogonality checked."""
    path = folder / SKEW_FILE
    file = SafetensorsFile(path)
    square = (config.num_layers, config.num_kv_heads, config.head_dim, config.head_dim)
    shapes = {"query_basis": square, "key_basis": square}
    if manifest.skew != "none":
        shapes |= {"eigenvalues": square[:-1], "key_mean": square[:-1]}
    # Balanced conversions did not always have these.
    corrected = manifest.skew == "balanced" and AHEAD_FILE in manifest.files
    if corrected:
        shapes |= {name: square for name in ("svd_basis", "ahead_query_basis", "ahead_key_basis")}
    for name, shape in shapes.items():
        _check_tensor(file, name, shape, ("float32",))
    query, key = file.read("query_basis"), file.read("key_basis")
    _check_inverse(path, query, key, orthogonal=manifest.skew != "balanced")
    none = (None,) * config.num_layers
    if manifest.skew == "none":
        return {"bases": none}
    found: dict[str, Any] = {"key_mean": np.array(file.read("key_mean"))}
    found |= read_loss(file, config)
    # Conversions did not always have these.
    if predicts(file):
        for name in TAIL_MOMENTS:
            _check_tensor(file, name, square, ("float32",))
        # Used once, when an engine is made: they stay in their file.
        found["tail_moments"] = tuple(file.read(name) for name in TAIL_MOMENTS)
        if not all(np.isfinite(moment).all() for moment in found["tail_moments"]):
            raise InputError(f"{path}: the moments for the tail are not finite; {AGAIN}")
    if manifest.absorbed:
        return found | {"bases": none}
    found["bases"] = _bases(query, key)
    if corrected:
        orthogonal = file.read("svd_basis")
        _check_inverse(path, orthogonal, orthogonal, orthogonal=True)
        found["svd_bases"] = _bases(orthogonal, orthogonal)
        pair = file.read("ahead_query_basis"), file.read("ahead_key_basis")
        if not all(np.isfinite(x).all() for x in pair):
            raise InputError(f"{path}: an ahead basis is not finite; {AGAIN}")
        projections = _read_projections(folder / AHEAD_FILE, config)
        found["ahead"] = tuple(map(Ahead, projections, _bases(*pair)))
        found["speculate_from"] = manifest.speculate_from
    return found


def read_loss(file: SafetensorsFile, config: ModelConfig) -> dict[str, np.ndarray]:
    """The fields of a Model on what few rows lose; conversions did not always have them."""
    shapes: dict[str, tuple[int, ...]] = {"sparse_loss": (config.num_layers, 2)}
    if (shares := file.tensors.get("row_shares")) is not None:
        count = shares.shape[0] if len(shares.shape) == 1 else 0
        shapes |= {"row_shares": (count,), "row_loss": (config.num_layers, 2, count)}
    found = {}
    for name in shapes.keys() & file.tensors.keys():
        _check_tensor(file, name, shapes[name], ("float32",))
        found[name] = np.array(file.read(name))
    shares = found.get("row_shares")
    if shares is not None and not _ascending(shares):
        raise InputError(f"{file.path}: row_shares are not ascending shares; {AGAIN}")
    return found


def predicts(file: SafetensorsFile) -> bool:
    """Whether the conversion measured what the values of a tail are predicted by."""
    return all(name in file.tensors for name in TAIL_MOMENTS)


def _ascending(shares: np.ndarray) -> bool:
    bounded = np.concatenate([[0.0], shares, [1.0]])
    return bool(len(shares) and np.all(np.diff(bounded) > 0))


def _read_projections(path: Path, config: ModelConfig) -> list[Params]:
    """The corrected query projections, as views of the mapped file."""
    file = SafetensorsFile(path)
    neurons = neurons_in(file)
    projections = []
    for i in range(config.num_layers):
        shapes = projection_shapes(config, i, neurons)
        for name, shape in shapes.items():
            _check_tensor(file, f"layers.{i}.{name}", shape, DTYPES)
        projections.append({name: file.read(f"layers.{i}.{name}") for name in shapes})
    return projections


def neurons_in(file: SafetensorsFile) -> int:
    """How many neurons the queries of AHEAD_FILE see; earlier conversions have none."""
    found = file.tensors.get("layers.1.outer")
    return found.shape[0] if found is not None and len(found.shape) == 2 else 0


def _check_tensor(
    file: SafetensorsFile, name: str, shape: tuple[int, ...], dtypes: Sequence[str]
) -> None:
    found = file.tensors.get(name)
    if found is None or found.shape != shape or found.dtype.name not in dtypes:
        shown = "missing" if found is None else f"{found.dtype} {found.shape}"
        wanted = f"{' or '.join(dtypes)} {shape}"
        raise InputError(f"{file.path}: {name} is {shown} instead of {wanted}; {AGAIN}")


def _bases(query: np.ndarray, key: np.ndarray) -> tuple[Basis, ...]:
    return tuple(Basis(jnp.array(q), jnp.array(k)) for q, k in zip(query, key, strict=True))


def _check_inverse(path: Path, query: np.ndarray, key: np.ndarray, orthogonal: bool) -> None:
    """query @ key.T must be the identity, and both equal where the method is orthogonal."""
    identity = np.eye(query.shape[-1])
    for layer, (q, k) in enumerate(zip(query, key, strict=True)):
        q, k = q.astype(np.float64), k.astype(np.float64)
        # float32 rounding of the factors is amplified by their norms (1 for orthogonal ones).
        bound = 1e-6 * np.linalg.norm(q, axis=(1, 2)) * np.linalg.norm(k, axis=(1, 2)) + 1e-5
        error = np.abs(q @ k.swapaxes(1, 2) - identity).max(axis=(1, 2))
        fits = np.all(error <= bound) and (not orthogonal or np.array_equal(q, k))
        if not fits:  # also true for NaN
            what = "orthogonal" if orthogonal else "a pair of inverse matrices"
            raise InputError(f"{path}: the basis of layer {layer} is not {what}; {AGAIN}")
