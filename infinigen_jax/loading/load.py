"""Loading of a model: check a converted folder and read it onto the device.

Models that are not converted yet are first converted into the user's cache.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from infinigen_jax.checkpoint.hf_folder import EMBEDDED, open_files
from infinigen_jax.checkpoint.hub import fetched
from infinigen_jax.checkpoint.manifest import (
    AHEAD_FILE,
    MANIFEST_FILE,
    SKEW_FILE,
    Manifest,
    read_manifest,
)
from infinigen_jax.checkpoint.skew_file import DTYPES, Ahead, Basis, read_skew
from infinigen_jax.checkpoint.source import checked_source, open_tensors, read_config, wide_matrices
from infinigen_jax.checkpoint.tensor_names import TensorSpec, expected, match, read_tree
from infinigen_jax.checkpoint.tensor_source import TensorSource
from infinigen_jax.errors import InputError, MemoryShortageError, ParameterError
from infinigen_jax.loading.conversion_cache import (
    cache_folder,
    cache_lock,
    prune,
    usable,
    verify_files,
)
from infinigen_jax.loading.room import check_room, readers
from infinigen_jax.machine.backend import start_backend
from infinigen_jax.machine.memory_limits import return_freed_memory
from infinigen_jax.models import Blueprint, ModelConfig, Params, blueprint
from infinigen_jax.models.linear import join
from infinigen_jax.models.small_weights import read_dtype, shrink
from infinigen_jax.numeric import OneOf, check_value, listed
from infinigen_jax.settings.engine import WEIGHT_DTYPES, EngineOptions
from infinigen_jax.settings.setting import check_setting
from infinigen_jax.speculation.layer_budgets import Curves
from infinigen_jax.text.tokenizer import load_tokenizer
from infinigen_jax.transfer.host_weights import placed

logger = logging.getLogger("infinigen_jax")

DENSE_LOSS = 0.03  # docs/policies-infinigen.md
DENSE_AMONG = 4
DENSE_UNKNOWN = 2
EMBEDDED_FOLDER = Path(__file__).parents[1] / "embedded"


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model ready to run.

    Attributes:
        params: {"embedding": {...}, "layers": [{...}, ...]}, arrays on the device in `dtype`;
            matrices may be in a form of `models.small_weights`. On a CPU, "qkv" in place of "q" and
            "kv"; `models.linear.split` inverts it.
        bases: one per layer, applied to rotated queries and keys; None where the leading columns of
            the keys already are the partial keys (absorbed) or nothing was skewed. Layers with a
            sliding window select no rows: here and in the fields below, they have None or zeros.
        skew: "svd", "balanced" or "none".
        key_mean: [L, k, d] float32, mean calibration key of each KV head in the coordinates of
            the cached keys; None with skew "none".
        path: the converted folder; None for a model made by `from_params`.
        fingerprint: hash of the checksums of its files; None without a folder.
        svd_bases: the paper's bases, in addition to the balanced ones of skew "balanced".
        ahead: corrected query projection of each layer; None without one.
        speculate_from: hidden state that this projection takes, one of
            `settings.policy.SOURCES`.
        sparse_loss: [L, 2] float32, relative error after each layer's attention with few rows,
            selected by its true query and by a query from its input, see `convert.loss`.
        row_loss: [L, 2, m] float32, relative error with each of `row_shares` of the rows, selected
            by the true query and by the speculated one.
        row_shares: [m] float32, shares of the rows.
        tail_moments: covariances of keys, and of keys (rows) with values (columns), within blocks
            of the calibration text, each [L, k, d, d] float32, in the coordinates of the cached
            keys, see `speculation.tail`.
    """

    config: ModelConfig
    params: Params
    dtype: jnp.dtype
    bases: tuple[Basis | None, ...]
    skew: str = "none"
    key_mean: np.ndarray | Array | None = None
    path: Path | None = None
    fingerprint: str | None = None
    given_tokenizer: Any = None
    svd_bases: tuple[Basis | None, ...] | None = None
    ahead: tuple[Ahead | None, ...] | None = None
    speculate_from: str = "input"
    sparse_loss: np.ndarray | None = None
    row_loss: np.ndarray | None = None
    tail_moments: tuple[np.ndarray | Array, np.ndarray | Array] | None = None
    row_shares: np.ndarray | None = None

    def __repr__(self) -> str:
        """One line: the dataclass's would print every weight."""
        c = self.config
        name = "" if self.path is None else f", {self.path.name}"
        return (
            f"Model({c.family}, {c.num_layers} layers, {c.num_heads} heads "
            f"({c.num_kv_heads} KV) of {c.head_dim}, {self.dtype.name}, skew {self.skew}{name})"
        )

    def dense_layers(self, ahead: bool) -> int:
        """Return how many leading layers to keep on the device because few rows do not suffice.

        The last of the first DENSE_AMONG layers that loses more than DENSE_LOSS is the last dense
        layer. The result is DENSE_UNKNOWN, as in the paper, if the loss was not measured. `ahead`
        says that rows are selected by a query speculated one layer earlier.
        """
        if self.sparse_loss is None or not np.isfinite(self.sparse_loss).all():
            return DENSE_UNKNOWN
        loss = self.sparse_loss[:DENSE_AMONG, int(ahead)].copy()
        loss[[i for i in range(len(loss)) if self.config.window_of(i)]] = 0  # they attend to all
        return int(np.max(np.flatnonzero(loss > DENSE_LOSS), initial=-1)) + 1

    def measured(self, lead: int, source: str) -> bool:
        """Whether the conversion measured the losses of a policy's `lead` and `source`."""
        return lead == 0 or source == self.speculate_from

    @property
    def has_curves(self) -> bool:
        """Whether the conversion measured the losses that `curves` returns."""
        return self.row_loss is not None and bool(np.isfinite(self.row_loss).all())

    def curves(self, ahead: bool) -> Curves:
        """Return each layer's error as a function of its share of the rows, or raise InputError."""
        if not self.has_curves:
            raise ParameterError(
                "layer_budgets",
                "the model's conversion did not measure what its layers lose; convert it again, "
                "with a calibration text of at least 320 tokens",
                "calibrated",
            )
        assert self.row_loss is not None and self.row_shares is not None
        errors = tuple(tuple(map(float, layer)) for layer in self.row_loss[:, int(ahead)])
        # Round to the decimal fractions, which float32 cannot represent.
        return Curves(tuple(round(float(share), 6) for share in self.row_shares), errors)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, loaded on first access; None for a model made by `from_params`.

        InputError names the folder of a tokenizer that is missing or damaged.
        """
        if self.given_tokenizer is not None or self.path is None:
            return self.given_tokenizer
        return load_tokenizer(self.path)

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a generation: the configuration's, and those that the tokenizer knows."""
        with contextlib.suppress(InputError):  # without a tokenizer, the configuration's
            return frozenset({*self.config.eos_ids, *getattr(self.tokenizer, "end_ids", ())})
        return frozenset(self.config.eos_ids)

    @classmethod
    def from_params(
        cls,
        config: ModelConfig,
        params: Params,
        dtype: Any,
        *,
        bases: Sequence[Basis | None] | None = None,
        skew: str = "none",
    ) -> "Model":
        """Make a model from parameters in memory, whose form stays as it is.

        It is for tests and benchmarks with random weights.
        """
        chosen = tuple(bases or (None,) * config.num_layers)
        return cls(config, params, jnp.dtype(dtype), chosen, skew=skew)


def load(
    path: str | Path | None = None,
    dtype: Any = None,
    *,
    notify: Callable[[str], None] = logger.warning,
    weights: str = "device",
    weight_dtype: str | None = None,
    revision: str | None = None,
) -> Model:
    """Load a converted folder, a Hugging Face folder, a GGUF file or a model on the hub.

    Args:
        path: the folder or file, the name of an embedded model, or `org/name` on the hub; None for
            the first of EMBEDDED.
        dtype: "float32", "bfloat16" or "float16" for weights and activations; by default float32
            on the CPU and bfloat16 elsewhere.
        notify: called with a line of text if the model has to be converted first.
        weights: "device", or "host" to keep the layers' weights in host memory, see
            `transfer.host_weights`.
        weight_dtype: "bfloat16", "int8" or "int4" for the matrices alone, see
            `models.small_weights`; by default `dtype`, and with `dtype` bfloat16 on a CPU the form
            "bfloat16", which has the same numbers.
        revision: branch, tag or commit of a model on the hub.

    Raises:
        InputError: names the file or setting at fault and the remedy.
    """
    if not isinstance(path, str | os.PathLike | None):
        raise ParameterError("path", "give a name or a path", path)
    folder = checked_source(model_folder(path, revision))
    start_backend()
    chosen = checked_dtype(dtype)
    check_setting(EngineOptions, "weights", weights)
    if weight_dtype is not None:
        check_value("weight_dtype", weight_dtype, OneOf(WEIGHT_DTYPES))
    form = Form(chosen, weights, form_of(chosen, weight_dtype, jax.default_backend() == "cpu"))
    # A folder with one of the two files was converted; it is damaged if the other is missing.
    converted = any((folder / name).exists() for name in (MANIFEST_FILE, SKEW_FILE))
    return _load_converted(folder, form) if converted else _load_through_cache(folder, form, notify)


def form_of(dtype: jnp.dtype, weight_dtype: str | None, on_cpu: bool) -> str | None:
    """Return the form of a model's matrices, one of WEIGHT_DTYPES, or None for plain arrays.

    For a few rows, XLA converts plain matrices in bfloat16 to float32 as a whole on a CPU.
    """
    return weight_dtype or ("bfloat16" if on_cpu and dtype == jnp.bfloat16 else None)


def embedded(name: str = EMBEDDED[0]) -> Path:
    """Return the converted folder of an embedded model, one of EMBEDDED, or raise InputError."""
    if name not in EMBEDDED:
        raise InputError(f"no embedded model {name!r}; use one of {', '.join(EMBEDDED)}")
    return EMBEDDED_FOLDER / name


def model_folder(
    model: str | Path | None, revision: str | None = None, weights: bool = True
) -> Path:
    """Resolve a model argument, as of `load`, to a folder or file.

    An embedded model is known by name, unless a file or folder has that name. For `revision` and
    `weights` see `checkpoint.hub.fetched`.
    """
    if model == "":
        raise ParameterError("model", "it is empty; give a folder, a file or a name")
    name = EMBEDDED[0] if model is None else model
    here = model is not None and Path(name).exists()
    if revision is None and not here and str(name) in EMBEDDED:
        return embedded(str(name))
    return fetched(name, revision, weights)


class Form(NamedTuple):
    """Form of a model's weights in memory; see `load`, and `wide_matrices` for `wide`."""

    dtype: jnp.dtype
    weights: str
    weight_dtype: str | None
    wide: frozenset[str] = frozenset()

    def of_source(self, source: Path, config: ModelConfig) -> "Form":
        """Return the form with the source's wide matrices, which matter with int4 alone."""
        if self.weight_dtype != "int4":  # the header of a GGUF file takes a while to read
            return self
        return self._replace(wide=wide_matrices(source, blueprint(config, self.dtype)))

    def blueprint(self, config: ModelConfig) -> Blueprint:
        return blueprint(config, self.dtype, self.weight_dtype, self.wide)

    def layer(self, params: Params) -> Params:
        """Return a layer's parameters in this form, in their place, joined as engines want them."""
        params = self.matrices(params)
        joins = self.weights == "device" and jax.default_backend() == "cpu"
        return placed(join(params) if joins else params, self.weights)

    def matrices(self, params: Params) -> Params:
        """Return the parameters of a layer or an embedding with matrices in this form."""
        return params if self.weight_dtype is None else shrink(params, self.weight_dtype, self.wide)


def _load_converted(
    folder: Path, form: Form, source: Path | None = None, config: ModelConfig | None = None
) -> Model:
    """Load a conversion; its weights are those of `source`, with this configuration, if given."""
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    config = config or read_config(folder)[1]
    skewing = read_skew(folder, manifest, config)
    dtype, as_read = form.dtype, read_dtype(form.weight_dtype, form.dtype)
    architecture = blueprint(config, dtype)
    form = form.of_source(source or folder, config)
    room = check_room(source or folder, form.blueprint(config), form.weights)
    tensors = open_tensors(source) if source else _listed_tensors(folder, manifest)
    sources = match(tensors, architecture, source or folder)
    specs = expected(architecture)

    def tree(tensors: list[TensorSpec]) -> Params:
        # The file may change, and its pages may be dropped, after the copies are complete.
        read = jax.block_until_ready(read_tree(tensors, sources, dtype, as_read))
        for tensor in tensors:
            sources[tensor.name].release()
        return read

    def layer(number: int, tensors: list[TensorSpec]) -> Params:
        return jax.block_until_ready(form.layer(architecture.complete(number, tree(tensors))))

    embedding: Params = {}
    # The largest matrices, each made small before the next is read.
    for _, parts in itertools.groupby(specs.embedding, lambda spec: spec.path[0]):
        embedding |= jax.block_until_ready(form.matrices(tree(list(parts))))
    with ThreadPoolExecutor(readers(blueprint(config, as_read), room)) as pool:
        layers = pool.map(layer, itertools.count(), specs.layers)
        params = {"embedding": embedding, "layers": list(layers)}
    jax.block_until_ready(params)
    return_freed_memory()
    checksums = json.dumps(manifest.files, sort_keys=True)
    skewing |= {"skew": manifest.skew, "path": folder}
    fingerprint = hashlib.sha256(checksums.encode()).hexdigest()
    return Model(config, params, dtype, fingerprint=fingerprint, **skewing)


def _listed_tensors(folder: Path, manifest: Manifest) -> dict[str, TensorSource]:
    """Open the weights that the manifest lists; other files in the folder are ignored."""
    ours = (SKEW_FILE, AHEAD_FILE)
    names = [n for n in manifest.files if n.endswith(".safetensors") and n not in ours]
    if not names:
        raise InputError(f"{folder}: has no weights; give the model that it was converted from")
    return open_files([folder / name for name in names])


def checked_dtype(dtype: Any) -> jnp.dtype:
    """Return a supported dtype; by default float32 on the CPU and bfloat16 elsewhere."""
    if dtype is None:
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    try:  # only dtype names: NumPy would parse other text as an expression
        checked = None if isinstance(dtype, str) and dtype not in DTYPES else jnp.dtype(dtype)
    except TypeError:
        checked = None
    if checked is None or checked.name not in DTYPES:
        raise ParameterError("dtype", f"not supported; use {listed(DTYPES)}", dtype)
    return checked


def _load_through_cache(source: Path, form: Form, notify: Callable[[str], None]) -> Model:
    from infinigen_jax.convert.pipeline import convert, progress_bar

    _, config = read_config(source)  # refuse a foreign model before announcing anything
    destination = cache_folder(source)

    def cached(report: Callable[[str], None]) -> Model | None:
        """Load the conversion; return None if there is none, or report that it is unusable."""
        with usable(destination.parent):
            if not destination.exists():
                return None
        with contextlib.suppress(OSError):  # another user's
            os.utime(destination)  # the time of its last use
        try:
            return _load_converted(destination, form, source, config)
        except MemoryShortageError:  # converting again would not help
            raise
        except (InputError, FileNotFoundError) as error:  # the latter if it is just removed
            report(f"the cached conversion is unusable; converting again ({error})")
            return None

    if model := cached(logger.debug):  # needs no lock, which a read-only cache refuses
        return model
    with cache_lock(destination, notify):
        if model := cached(notify):
            return model
        if not destination.exists():
            # Refuse a model that does not fit before the conversion.
            check_room(source, form.of_source(source, config).blueprint(config), form.weights)
            notify(f"{source} is not converted yet: converting it into {destination}")
        elif not (destination / MANIFEST_FILE).exists():  # `convert` replaces only conversions
            shutil.rmtree(destination, ignore_errors=True)
        with progress_bar() as progress:
            convert(source, destination, force=True, sidecar=True, progress=progress)
        if cache_folder(source) != destination:
            shutil.rmtree(destination, ignore_errors=True)
            raise InputError(f"{source}: its files changed before they were converted; try again")
        model = _load_converted(destination, form, source, config)
        prune(destination.parent)
        return model
