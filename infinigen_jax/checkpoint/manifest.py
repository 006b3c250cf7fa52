"""Manifest of a conversion, and the files that only a converted folder has.

    infinigen.json          format version, skewing method, calibration, SHA-256 of every file
    infinigen.safetensors   query_basis, key_basis  [L, k, d, d] float32
                            eigenvalues, key_mean   [L, k, d]    float32 (absent with skew none)
                            sparse_loss             [L, 2]       float32 (likewise)
                            row_loss                [L, 2, m]    float32 (likewise)
                            row_shares              [m]          float32 (likewise)
                            tail_keys, tail_values  [L, k, d, d] float32 (likewise)

With skew balanced, also:

    infinigen.safetensors         svd_basis                            [L, k, d, d] float32
                                  ahead_query_basis, ahead_key_basis   [L, k, d, d] float32
    infinigen_ahead.safetensors   layers.N.kernel [e, h*d] and layers.N.bias [h*d] of every layer,
                                  in the dtype of the weights: the corrected query projection

The weights are files of Hugging Face's layout. Conversions in the user's cache have none: they are
read from the source.

The ahead_ bases are balanced for the corrected query (`skew.basis.reduced_rank_basis`), the others
for the true query.

`row_loss` is the relative error of the hidden state after a layer's attention (`convert.loss`).
Axis 1 says which query selects the rows: the layer's true query, or the query speculated one layer
earlier. Axis 2 is the share of rows attended, one of `row_shares`. It is NaN where the calibration
text is too short. `sparse_loss` is the error at the share that decides which layers are dense; its
second query is speculated from the input of the layer before.

`eigenvalues` are those of the calibration queries' Gram matrix, in descending order. `key_mean` is
in the coordinates of the keys that the converted weights produce, and so are the tail moments
(`skew.tail_moments.BlockMoments`).
"""

import dataclasses
import hashlib
import json
import os
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
    """Contents of `infinigen.json`.

    Attributes:
        absorbed: whether the basis is already in the weights, so that the leading columns of the
            keys are the partial keys (OPT with "svd").
        calibration: {"text_sha256": ..., "tokens": ...}, or None with skew "none".
        speculate_from: hidden state that the corrected query is computed from, one of
            `settings.policy.SOURCES`.
        wide: names of matrices that int4 leaves in int8, see `source.wide_matrices`.
        sources, files: {"name": {"sha256": ..., "size": ...}} of the files read and written.
    """

    family: str
    skew: str
    absorbed: bool
    dtype: str
    calibration: dict[str, Any] | None
    speculate_from: str
    sources: dict[str, dict[str, Any]]
    files: dict[str, dict[str, Any]]
    wide: Sequence[str] = ()

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
        sizes = [(str(f["sha256"]), int(f["size"])) for f in manifest.files.values()]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(f"{path}: damaged, fields are missing; {AGAIN}") from None
    if manifest.speculate_from not in SOURCES:
        source, known = manifest.speculate_from, " or ".join(SOURCES)
        raise InputError(
            f"{path}: speculate_from is {source!r}, this program reads {known}; {AGAIN}"
        )
    outside = [name for name in manifest.files if "\0" in name or Path(name).name != name]
    unchecked = {"config.json", SKEW_FILE} - manifest.files.keys()
    if outside or unchecked:
        why = f"{outside[0]!r} is not a file name" if outside else f"without {min(unchecked)}"
        raise InputError(f"{path}: damaged, {why}; {AGAIN}")
    if manifest.skew not in SKEWS or not sizes:
        raise InputError(f"{path}: damaged, skew {manifest.skew!r} is unknown; {AGAIN}")
    return manifest


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compare the size and SHA-256 of every file with the manifest."""
    for name in {"generation_config.json"} - manifest.files.keys():
        if os.path.lexists(folder / name):
            raise InputError(f"{folder / name}: not of this conversion; remove it, or {AGAIN}")
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path}: missing; {AGAIN}")
        size = path.stat().st_size
        if size != record["size"]:
            raise InputError(f"{path}: {size} bytes instead of {record['size']}; {AGAIN}")
        if file_sha256(path) != record["sha256"]:
            raise InputError(f"{path}: damaged, its SHA-256 is not the recorded one; {AGAIN}")


def file_record(path: Path) -> dict[str, Any]:
    """Return {"sha256": ..., "size": ...} of a file."""
    return {"sha256": file_sha256(path), "size": path.stat().st_size}


def file_sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
