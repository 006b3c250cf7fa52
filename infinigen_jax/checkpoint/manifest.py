"""Manifest of a conversion, and the files that only a converted folder has.

    infinigen.json               format version, skewing method, calibration, SHA-256 of every file
    infinigen.safetensors        query_basis, key_basis              [L, k, d, d]
      except with skew none      eigenvalues, key_mean               [L, k, d]
                                 sparse_loss, row_loss, row_shares   [L, 2], [L, 2, m], [m]
                                 tail_keys, tail_values              [L, k, d, d]
      with skew balanced         svd_basis                           [L, k, d, d]
                                 ahead_query_basis, ahead_key_basis  [L, k, d, d]
    infinigen_ahead.safetensors  with skew balanced, the corrected query projections, in the dtype
                                 of the weights: layers.N.kernel [e, h*d] and .bias

Next to layers without a sliding window, those with one have zeros and no projection. Other arrays
are float32. The weights are files of Hugging Face's layout. Conversions in the user's
cache have none: they are read from the source.

`eigenvalues` are those of the mean Gram matrix of the calibration queries, in descending order.
`key_mean` is in the coordinates of the keys that the converted weights produce, and so are the tail
moments (`skew.tail_moments.BlockMoments`). The ahead_ bases are balanced for the corrected query
(`skew.basis.reduced_rank_basis`), the others for the true query.

`row_loss` is the relative error of the hidden state after a layer's attention (`convert.loss`) with
each of `row_shares` of the rows, selected by the layer's true query, and by the query speculated
one layer earlier. It is NaN where the calibration text is too short. `sparse_loss` is the error at
the share that decides which layers are dense; its second query is speculated from the input of the
layer before.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinigen_jax.errors import InputError
from infinigen_jax.files.regular import open_regular, read_json
from infinigen_jax.settings.policy import SOURCES

FORMAT_VERSION = 2
MANIFEST_FILE = "infinigen.json"
SKEW_FILE = "infinigen.safetensors"
AHEAD_FILE = "infinigen_ahead.safetensors"
SKEWS = ("svd", "balanced", "none")
DEFAULT_SKEW = "balanced"
DEFAULT_SOURCE = "resident"  # of a corrected query
AGAIN = "convert the model again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of `infinigen.json`."""

    family: str
    skew: str
    absorbed: bool  # the basis is in the weights: leading columns of keys are the index (OPT, svd)
    dtype: str
    calibration: dict[str, Any] | None  # {"text_sha256": ..., "tokens": ...}; None: skew "none"
    speculate_from: str  # state that the corrected query is computed from: settings.policy.SOURCES
    # {"name": {"sha256": ..., "size": ...}} of the files read and written.
    sources: dict[str, dict[str, Any]]
    files: dict[str, dict[str, Any]]
    wide: Sequence[str] = ()  # matrices that int4 leaves in int8, see `source.wide_matrices`

    def to_json(self) -> str:
        value = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        return json.dumps(value, indent=2) + "\n"


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_FILE
    value = read_json(path, AGAIN)
    version = value.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise InputError(
            f"{path}: format version {version}, but this program reads {FORMAT_VERSION}; {AGAIN}"
        )
    value.setdefault("wide", ())  # in older conversions
    fields = {field.name for field in dataclasses.fields(Manifest)}
    try:
        manifest = Manifest(**{name: value[name] for name in fields})
        frozenset(manifest.wide)  # a TypeError if they are not names
        files = {name: (f["sha256"], int(f["size"])) for name, f in manifest.files.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(f"{path}: damaged, fields are missing; {AGAIN}") from None
    outside = [name for name in files if "\0" in name or Path(name).name != name]
    problems = [f"damaged, {name!r} is not a file name" for name in outside]
    problems += [
        f"damaged, without {name}" for name in sorted({"config.json", SKEW_FILE} - files.keys())
    ]
    if manifest.skew not in SKEWS:
        problems.append(f"damaged, skew {manifest.skew!r} is unknown")
    if manifest.speculate_from not in SOURCES:
        problems.append(f"speculate_from is {manifest.speculate_from!r}, unknown to this program")
    if problems:
        raise InputError(f"{path}: {problems[0]}; {AGAIN}")
    return manifest


def file_record(path: Path) -> dict[str, Any]:
    """Return {"sha256": ..., "size": ...} of a file."""
    return {"sha256": file_sha256(path), "size": path.stat().st_size}


def file_sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
