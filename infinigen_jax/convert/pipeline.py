"""Conversion pipeline: read, run, skew and write one layer before the next."""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from infinigen_jax.checkpoint.hf_folder import EMBEDDED, SAFETENSORS, TensorSource
from infinigen_jax.checkpoint.hub import fetched
from infinigen_jax.checkpoint.manifest import (
    AHEAD_FILE,
    DEFAULT_SKEW,
    DEFAULT_SOURCE,
    MANIFEST_FILE,
    SKEW_FILE,
    SKEWS,
    Manifest,
    file_record,
)
from infinigen_jax.checkpoint.safetensors import SafetensorsWriter
from infinigen_jax.checkpoint.skew_file import ahead_shapes
from infinigen_jax.checkpoint.source import (
    checked_source,
    content_files,
    open_tensors,
    read_config,
    wide_matrices,
)
from infinigen_jax.checkpoint.tensor_names import TensorSpec, expected, match, read_tree
from infinigen_jax.convert.calibrate import (
    DEFAULT_TEXT,
    DEFAULT_TOKENS,
    CalibrationTokens,
    Calibrator,
    tokenized_file,
    windows,
)
from infinigen_jax.convert.loss import BUDGET, BUDGETS
from infinigen_jax.convert.write import (
    check_destination,
    converted_config,
    open_tokenizer,
    side_files_of,
    unchanged_files,
    weight_dtype,
    write_side_file,
)
from infinigen_jax.errors import InputError, ParameterError
from infinigen_jax.files.atomic import link_or_copy, staged, write_text
from infinigen_jax.machine.backend import start_backend
from infinigen_jax.machine.memory_limits import return_freed_memory
from infinigen_jax.models import ModelConfig, Params, blueprint
from infinigen_jax.numeric import listed
from infinigen_jax.settings.policy import SOURCES
from infinigen_jax.skew.basis import absorb, balanced_basis, reduced_rank_basis, svd_basis
from infinigen_jax.skew.tail_moments import BlockMoments
from infinigen_jax.text.tokenizer import Tokenizer


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
            `org/name` or `org/name/FILE.gguf` on the hub; or a GGUF file. Quantised weights are
            written as float32 unless `dtype` is given.
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
    if speculate_from is None:
        speculate_from = DEFAULT_SOURCE if skew == "balanced" else "input"
    if speculate_from not in SOURCES:
        raise ParameterError("speculate_from", f"use {listed(SOURCES)}", speculate_from)
    if speculate_from != "input" and skew != "balanced":
        raise ParameterError(
            "speculate_from",
            f"applies to the query that `skew` balanced corrects, and {skew} has none",
            speculate_from,
        )
    if calibration is not None and skew == "none":
        raise ParameterError("calibration", "without `skew` nothing is calibrated; leave it out")
    folder = checked_source(fetched(source, revision))
    hf, config = read_config(folder)
    target = check_destination(folder, Path(destination), force)
    sources = match(open_tensors(folder), blueprint(config, jnp.float32), folder)
    stored = weight_dtype(dtype, sources)
    tokenizer = functools.cache(lambda: open_tokenizer(folder))
    copied = side_files_of(folder, tokenizer)
    start_backend()
    # Rotation does not commute with the basis, and only an orthogonal basis leaves a checkpoint
    # that any program can run.
    absorbs = skew == "svd" and config.rope is None
    linked = [] if sidecar or absorbs else unchanged_files(folder, sources, dtype)
    whole = absorbs or not (sidecar or linked)
    tokens = _tokens(calibration, tokenizer, config) if skew != "none" else None
    # Another process may have written the destination while this one waited for the lock.
    with blas_threads(), staged(target, lambda: check_destination(folder, target, force)) as out:
        job = _Job(config, sources, stored, skew, speculate_from, tokens, absorbs)
        files = job.write_weights(out, progress, whole)
        files[SKEW_FILE] = job.write_skew(out)
        write_text(out / "config.json", json.dumps(converted_config(hf, stored), indent=2) + "\n")
        for name, content in copied.items():
            write_side_file(out / name, content)
        for file in linked:
            link_or_copy(file, out / file.name)
        read = {name: file_record(file) for name, file in content_files(folder).items()}
        files |= {file.name: read[file.name] for file in linked}
        for name in ("config.json", *copied):
            files[name] = file_record(out / name)
        manifest = Manifest(
            family=config.family,
            skew=skew,
            absorbed=absorbs,
            dtype=stored.name,
            speculate_from=speculate_from,
            wide=sorted(wide_matrices(folder, blueprint(config, jnp.float32))),
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


def blas_threads() -> threadpool_limits:
    """Limit NumPy's threads: two fits run at a time, and threads that wait for a core spin."""
    return threadpool_limits(max(1, len(os.sched_getaffinity(0)) // 2), "blas")


class _Job:
    """State of one conversion: the statistics of the layers converted so far."""

    def __init__(
        self,
        config: ModelConfig,
        sources: Mapping[str, TensorSource],
        dtype: np.dtype,
        skew: str,
        source: str,
        tokens: CalibrationTokens | None,
        absorbs: bool,
    ):
        self.config, self.sources, self.dtype, self.skew = config, sources, dtype, skew
        self.source, self.tokens, self.absorbs = source, tokens, absorbs
        self.architecture = blueprint(config, jnp.float32)
        self.specs = expected(self.architecture)
        self.statistics: dict[str, list[np.ndarray]] = {}

    def write_weights(
        self, out: Path, progress: Callable[[int, int], None], whole: bool
    ) -> dict[str, Any]:
        """Run all layers and write weights; return the files' manifest records.

        With `whole`, the model's own weights are streamed into `model.safetensors`. With skew
        balanced, the corrected query projections are written into AHEAD_FILE.
        """
        layout = {spec.name: (self.dtype, spec.shape) for spec in self.specs.flat()}
        with contextlib.ExitStack() as stack:

            def opened(name: str, *arguments: Any) -> SafetensorsWriter:
                return SafetensorsWriter(stack.enter_context(open(out / name, "wb")), *arguments)

            files: dict[str, SafetensorsWriter] = {}
            if whole:
                files[SAFETENSORS] = opened(SAFETENSORS, layout, {"format": "pt"})
            if self.skew == "balanced":
                files[AHEAD_FILE] = opened(AHEAD_FILE, self._ahead_layout())
            if whole:
                self._add(files[SAFETENSORS], self.specs.embedding, None)
            calibrator = self._calibrator()
            self._release(self.specs.embedding)
            for done, specs in enumerate(self.specs.layers):
                extra = self._calibrate(calibrator, done)
                if whole:
                    self._add(files[SAFETENSORS], specs, extra if self.absorbs else None)
                if AHEAD_FILE in files:
                    tensors = extra["weight"].T, extra["bias"]
                    for name, x in zip(ahead_shapes(self.config, done), tensors, strict=True):
                        files[AHEAD_FILE].add(name, np.asarray(x).astype(self.dtype))
                self._release(specs)
                progress(done + 1, self.config.num_layers)
            return {
                name: {"sha256": writer.close(), "size": writer.size}
                for name, writer in files.items()
            }

    def _release(self, specs: list[TensorSpec]) -> None:
        """Return the memory of a layer to the system, where freed pieces would add up."""
        for spec in specs:
            self.sources[spec.name].release()
        return_freed_memory()

    def _ahead_layout(self) -> dict[str, Any]:
        return {
            name: (self.dtype, shape)
            for i in range(self.config.num_layers)
            for name, shape in ahead_shapes(self.config, i).items()
        }

    def write_skew(self, out: Path) -> dict[str, Any]:
        """Write `infinigen.safetensors`; return its manifest record."""
        c = self.config
        if not self.statistics:
            eye = np.eye(c.head_dim, dtype=np.float32)
            bases = np.broadcast_to(eye, (c.num_layers, c.num_kv_heads, *eye.shape))
            arrays = {"query_basis": bases, "key_basis": bases}
        else:
            arrays = {n: np.stack(v) for n, v in self.statistics.items()}
            arrays["row_shares"] = np.array(BUDGETS, np.float32)
        layout = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        with open(out / SKEW_FILE, "wb") as file:
            writer = SafetensorsWriter(file, layout)
            for name, array in arrays.items():
                writer.add(name, array)
            return {"sha256": writer.close(), "size": writer.size}

    def _calibrator(self) -> Calibrator | None:
        if self.tokens is None:
            return None
        used, ids = np.unique(self.tokens.ids, return_inverse=True)
        params: Params = {}
        for spec in self.specs.embedding:
            module, name = spec.rule.path
            # The text reads few of the rows, and neither the norm nor the head.
            tensor = self.sources[spec.name].read() if name == "embedding" else np.zeros(0)
            tensor = tensor[used] if module == "tokens" else tensor
            params.setdefault(module, {})[name] = jnp.asarray(tensor.astype(np.float32))
        tokens = self.tokens._replace(ids=ids.reshape(self.tokens.ids.shape).astype(np.int32))
        return Calibrator(self.config, tokens, params, self.source)

    def _calibrate(self, calibrator: Calibrator | None, number: int) -> Any:
        """Run a layer, keep its statistics; return a basis to absorb or a projection to write."""
        if calibrator is None:
            return None
        specs = self.specs.layers[number]
        params = self.architecture.complete(number, read_tree(specs, self.sources, jnp.float32))
        try:
            seen = calibrator.layer(params)
        except InputError as error:
            raise InputError(f"{self.sources[specs[0].name].file}: {error}") from None
        if self.skew == "svd":
            self._keep_loss(calibrator.loss(params))
            basis, eigenvalues = svd_basis(seen)
            mean = np.einsum("kd,kdc->kc", seen.key_mean, basis) if self.absorbs else seen.key_mean
            self._keep(query_basis=basis, key_basis=basis, eigenvalues=eigenvalues, key_mean=mean)
            self._keep_blocks(calibrator.blocks, basis if self.absorbs else None)
            return basis
        self._keep_blocks(calibrator.blocks)
        projection, guess = calibrator.ahead(params)
        self._keep_loss(calibrator.loss(params))
        orthogonal, eigenvalues = svd_basis(seen)
        query, key, _ = balanced_basis(seen)
        ahead_query, ahead_key, _ = reduced_rank_basis(seen, guess)
        self._keep(
            query_basis=query,
            key_basis=key,
            eigenvalues=eigenvalues,
            key_mean=seen.key_mean,
            svd_basis=orthogonal,
            ahead_query_basis=ahead_query,
            ahead_key_basis=ahead_key,
        )
        return projection

    def _keep_blocks(self, moments: BlockMoments, basis: np.ndarray | None = None) -> None:
        """Keep the block moments, in the coordinates of the cached keys."""
        keys, values = moments.key_covariance, moments.cross_covariance
        if basis is not None:
            keys = np.einsum("kdc,kde,kef->kcf", basis, keys, basis)
            values = np.einsum("kdc,kde->kce", basis, values)
        self._keep(tail_keys=keys, tail_values=values)

    def _keep_loss(self, losses: np.ndarray) -> None:
        """Keep the losses: the first two rows for budgets, the first and last for dense layers.

        Budgets follow the loss of the query in use. Dense layers follow the last row, speculation
        from the layer's input: a hidden state after resident attention may miss the effect of the
        layer's own attention on the next query.
        """
        self._keep(sparse_loss=losses[[0, -1], BUDGETS.index(BUDGET)], row_loss=losses[:2])

    def _keep(self, **arrays: np.ndarray) -> None:
        for name, value in arrays.items():
            self.statistics.setdefault(name, []).append(value.astype(np.float32))

    def _add(
        self, writer: SafetensorsWriter, specs: list[TensorSpec], basis: np.ndarray | None
    ) -> None:
        """Write tensors, with the basis folded into queries and keys."""
        for spec in specs:
            tensor = self.sources[spec.name].read()
            part = spec.rule.path[0], spec.rule.part
            if basis is not None and part in (("q", 0), ("kv", 0)):
                tensor = absorb(tensor.T, basis).T
            writer.add(spec.name, tensor.astype(self.dtype, copy=False))


def _tokens(
    calibration: str | Path | Sequence[int] | None,
    tokenizer: Callable[[], Tokenizer],
    config: ModelConfig,
) -> CalibrationTokens:
    if calibration is None or isinstance(calibration, str | Path):
        path = DEFAULT_TEXT if calibration is None else Path(calibration)
        return tokenized_file(path, tokenizer(), config, DEFAULT_TOKENS)
    ids = np.asarray(calibration, np.int32)
    return windows(ids, config, DEFAULT_TOKENS, "calibration", ids.tobytes())
