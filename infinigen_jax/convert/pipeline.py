"""Conversion pipeline: checks before any work, then the files of the destination.

Weights that a conversion does not change, and files such as the tokenizer's, come from the source.
"""

import collections
import contextlib
import functools
import json
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from infinigen_jax.checkpoint.gguf_file import GgufFile
from infinigen_jax.checkpoint.hf_folder import EMBEDDED, side_files, weight_files
from infinigen_jax.checkpoint.hub import fetched
from infinigen_jax.checkpoint.manifest import (
    DEFAULT_SKEW,
    DEFAULT_SOURCE,
    MANIFEST_FILE,
    SKEW_FILE,
    SKEWS,
    Manifest,
    file_record,
)
from infinigen_jax.checkpoint.skew_file import DTYPES
from infinigen_jax.checkpoint.source import (
    checked_source,
    content_files,
    is_gguf,
    open_tensors,
    read_config,
    wide_matrices,
)
from infinigen_jax.checkpoint.tensor_names import match
from infinigen_jax.checkpoint.tensor_source import TensorSource
from infinigen_jax.convert.calibrate import (
    DEFAULT_TEXT,
    DEFAULT_TOKENS,
    CalibrationTokens,
    tokenized_file,
    windows,
)
from infinigen_jax.convert.job import Job
from infinigen_jax.errors import InputError, ParameterError
from infinigen_jax.files.atomic import copy_file, link_or_copy, staged, write_text
from infinigen_jax.files.regular import expanded, open_regular
from infinigen_jax.machine.backend import start_backend
from infinigen_jax.models import ModelConfig, blueprint
from infinigen_jax.numeric import listed
from infinigen_jax.settings.policy import SOURCES
from infinigen_jax.text.gguf_tokenizer import gguf_tokenizer, tokenizer_files
from infinigen_jax.text.tokenizer import Tokenizer, load_tokenizer

# Fields of config.json that would reveal a path of the machine that wrote it.
PATHS = ("_name_or_path", "name_or_path")


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    calibration: str | Path | Sequence[int] | None = None,
    dtype: str | None = None,
    skew: str = DEFAULT_SKEW,
    speculate_from: str | None = None,
    force: bool = False,
    revision: str | None = None,
    sidecar: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Convert a Hugging Face folder or a GGUF file and skew it (section 4.2 of the paper).

    The destination is a Hugging Face folder plus `infinigen.safetensors` (the bases) and
    `infinigen.json` (the manifest). It appears whole or not at all.

    Args:
        source: folder with config.json, safetensors or pytorch_model.bin, and a tokenizer; or
            `org/name` or `org/name/FILE.gguf` on the hub; or a GGUF file, whose quantised weights
            are written as float32 unless `dtype` is given.
        destination: folder to create.
        calibration: UTF-8 text file, or token ids; by default the text in this package. At most
            2048 tokens are used.
        dtype: "float32", "bfloat16" or "float16" for the weights; by default the stored dtype.
        skew: "balanced" (a basis that balances queries and keys, a query corrected on the
            calibration text, and the paper's basis), "svd" (the paper's basis alone) or "none".
        speculate_from: hidden state of the previous layer that the corrected query is computed
            from: "input", its attention input, or "resident", the hidden state after attention to
            sinks and recent tokens alone. The default is "resident" with skew "balanced".
        force: replace an earlier conversion at the destination once the new one is complete.
        revision: branch, tag or commit of a model on the hub.
        sidecar: leave out weights that the conversion does not change, for a caller that has the
            source. By default they are hard links to the source's files, or copies if links are
            impossible or the dtype or the format changes.
        progress: called with the number of converted layers and the number of all layers.

    Returns:
        The destination.

    Raises:
        InputError: names the file or setting at fault and the remedy.
    """
    if str(source) in EMBEDDED and not Path(source).exists():
        raise InputError(f"{source}: an embedded model is converted already; load it by its name")
    if skew not in SKEWS:
        raise ParameterError("skew", f"use {listed(SKEWS)}", skew)
    speculate_from = _checked_query_source(speculate_from, skew)
    if calibration is not None and skew == "none":
        raise ParameterError("calibration", "without `skew` nothing is calibrated; leave it out")
    folder = checked_source(fetched(source, revision))
    hf, config = read_config(folder)
    target = _check_destination(folder, Path(destination), force)
    architecture = blueprint(config, jnp.float32)
    sources = match(open_tensors(folder), architecture, folder)
    before = _states(folder)
    stored = _weight_dtype(dtype, sources)

    @functools.cache
    def tokenizer() -> Tokenizer:
        return gguf_tokenizer(GgufFile(folder)) if is_gguf(folder) else load_tokenizer(folder)

    copied: dict[str, Path | str]
    if is_gguf(folder):
        copied = {**tokenizer_files(tokenizer())}
    else:
        copied = {file.name: file for file in side_files(folder)}
    start_backend()
    tokens = None if skew == "none" else _calibration_tokens(calibration, tokenizer, config)
    # Rotation does not commute with the basis, and only an orthogonal basis leaves a checkpoint
    # that any program can run.
    absorbs = skew == "svd" and config.rope is None
    linked = [] if sidecar or absorbs else _unchanged_files(folder, sources, dtype)
    whole = absorbs or not (sidecar or linked)
    with blas_threads(), staged(target) as out:
        # Another process may have written the destination while this one waited for the lock.
        _check_destination(folder, target, force)
        job = Job(architecture, sources, stored, skew, speculate_from, tokens, absorbs)
        files = job.write_weights(out, progress, whole)
        files[SKEW_FILE] = job.write_skew(out)
        settings = _converted_config(hf, stored, whole)
        write_text(out / "config.json", json.dumps(settings, indent=2) + "\n")
        _write_unchanged(out, copied, linked)
        read = {name: file_record(file) for name, file in content_files(folder).items()}
        if _states(folder) != before:
            raise InputError(f"{folder}: its files changed during the conversion; convert it again")
        files |= {file.name: read[file.name] for file in linked}
        for name in ("config.json", *copied):
            files[name] = file_record(out / name)
        manifest = Manifest(
            family=config.family,
            skew=skew,
            absorbed=absorbs,
            dtype=stored.name,
            speculate_from=speculate_from,
            wide=sorted(wide_matrices(folder, architecture)),
            calibration=tokens and {"text_sha256": tokens.sha256, "tokens": tokens.count},
            sources=read,
            files=files,
        )
        write_text(out / MANIFEST_FILE, manifest.to_json())
    return target


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """Show a bar with the time left on stderr if it is a terminal; yield `convert`'s progress."""
    with tqdm(desc="converting", unit="layer", leave=False, disable=None, delay=0.1) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


def _checked_query_source(speculate_from: str | None, skew: str) -> str:
    """Return the state that the corrected query is computed from; raise InputError if invalid."""
    if speculate_from is None:
        return DEFAULT_SOURCE if skew == "balanced" else "input"
    if speculate_from not in SOURCES:
        raise ParameterError("speculate_from", f"use {listed(SOURCES)}", speculate_from)
    if speculate_from != "input" and skew != "balanced":
        raise ParameterError(
            "speculate_from",
            f"applies to the query that `skew` balanced corrects, and {skew} has none",
            speculate_from,
        )
    return speculate_from


def _states(source: Path) -> dict[str, tuple[int, ...]]:
    """Return identity, size and modification time of a source's files; empty if one is missing."""
    try:
        files = {name: file.stat() for name, file in content_files(source).items()}
    except FileNotFoundError:
        return {}
    return {n: (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for n, s in files.items()}


def _calibration_tokens(
    given: str | Path | Sequence[int] | None,
    tokenizer: Callable[[], Tokenizer],
    config: ModelConfig,
) -> CalibrationTokens:
    """Return windows of a text file, of token ids, or of the text in this package."""
    if given is None or isinstance(given, str | Path):
        path = DEFAULT_TEXT if given is None else Path(given)
        return tokenized_file(path, tokenizer(), config, DEFAULT_TOKENS)
    ids = _token_ids(given)
    text = ids.astype(np.int32).tobytes()
    return windows(ids, config, DEFAULT_TOKENS, "calibration", text)


def _write_unchanged(out: Path, copied: Mapping[str, Path | str], linked: Sequence[Path]) -> None:
    """Write files and texts by name, and link weight files."""
    for name, content in copied.items():
        if isinstance(content, str):
            write_text(out / name, content)
            continue
        with open_regular(content) as file:
            copy_file(file, out / name)
    for file in linked:
        link_or_copy(file, out / file.name)


def _token_ids(given: Sequence[int]) -> np.ndarray:
    """Return calibration tokens as an array; `windows` compares them with the vocabulary."""
    try:
        if isinstance(given, bytes | bytearray):
            raise TypeError("bytes are no tokens")
        return np.array([operator.index(token) for token in given], np.int64)
    except (OverflowError, TypeError) as error:
        problem = f"give a text file, or whole numbers of tokens ({error})"
        raise ParameterError("calibration", problem) from None


def blas_threads() -> threadpool_limits:
    """Limit NumPy's threads: two fits run at a time, and threads that wait for a core spin."""
    return threadpool_limits(max(1, len(os.sched_getaffinity(0)) // 2), "blas")


def _check_destination(source: Path, destination: Path, force: bool) -> Path:
    """Refuse a destination that must not be written; return its resolved path."""
    target, origin = expanded(destination).resolve(), source.resolve()
    if target == origin:
        raise InputError(f"{destination}: source and destination are the same folder")
    if target in origin.parents:
        raise InputError(f"{destination}: contains the source folder; choose another destination")
    if not target.exists():
        return target
    if not force:
        raise InputError(f"{destination}: already exists; choose another folder or give `force`")
    replaceable = target.is_dir() and (
        (target / MANIFEST_FILE).exists() or not any(target.iterdir())
    )
    if not replaceable:
        raise InputError(
            f"{destination}: is not a converted model, so `force` does not replace it; "
            "choose another folder"
        )
    return target


def _unchanged_files(
    source: Path, sources: Mapping[str, TensorSource], dtype: str | None
) -> list[Path]:
    """Return the weight files that a conversion can use as they are; none if it changes weights."""
    wanted = DTYPES if dtype is None else (dtype,)
    for tensor in sources.values():
        changes = tensor.bits is not None and dtype is not None
        if changes or tensor.file.suffix != ".safetensors" or tensor.dtype.name not in wanted:
            return []
    return weight_files(source)


def _weight_dtype(dtype: str | None, sources: Mapping[str, TensorSource]) -> np.dtype:
    """Return the requested dtype, or the one that most stored elements without scales have."""
    if dtype is not None:
        if dtype not in DTYPES:
            raise ParameterError("dtype", f"use {listed(DTYPES)}", dtype)
        return np.dtype(dtype)
    sizes: collections.Counter[np.dtype] = collections.Counter()
    for tensor in sources.values():
        sizes[tensor.dtype] += 0 if tensor.bits else math.prod(tensor.shape)
    most = sizes.most_common(1)[0][0]
    return most if most.name in DTYPES else np.dtype(np.float32)


def _converted_config(hf: Mapping[str, Any], dtype: np.dtype, whole: bool) -> dict[str, Any]:
    """Return config.json of the converted folder: the source's, with the dtype, without paths.

    `whole` states that the folder has weights of its own, which are not quantised.
    """
    left_out = (*PATHS, "quantization_config") if whole else PATHS
    config = {name: value for name, value in hf.items() if name not in left_out}
    if "torch_dtype" in config:  # name before transformers 5
        config["torch_dtype"] = dtype.name
    return config | {"dtype": dtype.name}
