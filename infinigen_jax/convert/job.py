"""Layers of a conversion: each is read, run, skewed and written before the next."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from infinigen_jax.checkpoint.hf_folder import SAFETENSORS
from infinigen_jax.checkpoint.manifest import AHEAD_FILE, SKEW_FILE
from infinigen_jax.checkpoint.safetensors import SafetensorsWriter
from infinigen_jax.checkpoint.skew_file import ahead_shapes
from infinigen_jax.checkpoint.tensor_names import TensorSpec, expected, read_tree
from infinigen_jax.checkpoint.tensor_source import TensorSource
from infinigen_jax.convert.calibrate import CalibrationTokens, Calibrator
from infinigen_jax.convert.loss import BUDGET, BUDGETS
from infinigen_jax.errors import InputError
from infinigen_jax.machine.memory_limits import return_freed_memory
from infinigen_jax.models import Blueprint, Params
from infinigen_jax.skew.basis import absorb, balanced_basis, reduced_rank_basis, svd_basis


@dataclasses.dataclass
class Job:
    """State of one conversion.

    `statistics` are of the `measured` layers converted so far: those without a sliding window, as
    others keep their rows on the device and select none. If every layer has one, all are measured.
    """

    architecture: Blueprint
    sources: Mapping[str, TensorSource]
    dtype: np.dtype
    skew: str
    speculate_from: str
    tokens: CalibrationTokens | None
    absorbs: bool
    statistics: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.config, self.specs = self.architecture.config, expected(self.architecture)
        self.measured = self.config.full_attention_layers or [*range(self.config.num_layers)]

    def write_weights(
        self, out: Path, progress: Callable[[int, int], None], whole: bool
    ) -> dict[str, Any]:
        """Run all layers and write weights; return the files' manifest records.

        With `whole`, the model's own weights are streamed into `model.safetensors`. With skew
        balanced, the corrected query projections are written into AHEAD_FILE.
        """
        layouts: dict[str, Any] = {}
        if whole:
            weights = {spec.name: (self.dtype, spec.shape) for spec in self.specs.flat()}
            layouts[SAFETENSORS] = weights, {"format": "pt"}
        if self.skew == "balanced":
            shapes = [item for i in self.measured for item in ahead_shapes(self.config, i).items()]
            layouts[AHEAD_FILE] = {name: (self.dtype, shape) for name, shape in shapes}, None
        with contextlib.ExitStack() as stack:
            files = {
                name: SafetensorsWriter(stack.enter_context(open(out / name, "wb")), *layout)
                for name, layout in layouts.items()
            }
            if whole:
                self._add(files[SAFETENSORS], self.specs.embedding, None)
            calibrator = self._calibrator()
            self._release(self.specs.embedding)
            for done, specs in enumerate(self.specs.layers):
                extra = self._calibrate(calibrator, done)
                if whole:
                    self._add(files[SAFETENSORS], specs, extra if self.absorbs else None)
                if AHEAD_FILE in files and extra is not None:
                    tensors = extra["weight"].T, extra["bias"]
                    for name, x in zip(ahead_shapes(self.config, done), tensors, strict=True):
                        files[AHEAD_FILE].add(name, np.asarray(x).astype(self.dtype))
                self._release(specs)
                progress(done + 1, self.config.num_layers)
            return {name: writer.close() for name, writer in files.items()}

    def _release(self, specs: list[TensorSpec]) -> None:
        """Return the memory of a layer to the system, where freed pieces would add up."""
        for spec in specs:
            self.sources[spec.name].release()
        return_freed_memory()

    def write_skew(self, out: Path) -> dict[str, Any]:
        """Write `infinigen.safetensors`; return its manifest record."""
        c = self.config
        if not self.statistics:
            eye = np.eye(c.head_dim, dtype=np.float32)
            bases = np.broadcast_to(eye, (c.num_layers, c.num_kv_heads, *eye.shape))
            arrays = {"query_basis": bases, "key_basis": bases}
        else:
            arrays = {n: self._of_all_layers(v) for n, v in self.statistics.items()}
            arrays["row_shares"] = np.array(BUDGETS, np.float32)
        layout = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        with open(out / SKEW_FILE, "wb") as file:
            writer = SafetensorsWriter(file, layout)
            for name, array in arrays.items():
                writer.add(name, array)
            return writer.close()

    def _of_all_layers(self, values: list[np.ndarray]) -> np.ndarray:
        """Stack values of the measured layers; others have zeros."""
        stacked = np.zeros((self.config.num_layers, *values[0].shape), np.float32)
        stacked[self.measured] = values
        return stacked

    def _calibrator(self) -> Calibrator | None:
        if self.tokens is None:
            return None
        used, ids = np.unique(self.tokens.ids, return_inverse=True)
        params: Params = {}
        for spec in self.specs.embedding:
            module, name = spec.path
            # The text reads few of the rows, and neither the norm nor the head.
            tensor = self.sources[spec.name].read() if name == "embedding" else np.zeros(0)
            tensor = tensor[used] if module == "tokens" else tensor
            params.setdefault(module, {})[name] = jnp.asarray(tensor.astype(np.float32))
        tokens = self.tokens._replace(ids=ids.reshape(self.tokens.ids.shape).astype(np.int32))
        return Calibrator(self.config, tokens, params, self.speculate_from)

    def _calibrate(self, calibrator: Calibrator | None, number: int) -> Any:
        """Run a layer, keep its statistics; return a basis to absorb or a projection to write.

        None for a layer that is not measured.
        """
        if calibrator is None:
            return None
        specs = self.specs.layers[number]
        params = self.architecture.complete(number, read_tree(specs, self.sources, jnp.float32))
        try:
            seen = calibrator.layer(params)
        except InputError as error:
            raise InputError(f"{self.sources[specs[0].name].file}: {error}") from None
        if number not in self.measured:
            return None
        balanced = self.skew == "balanced"
        projection, guess = calibrator.ahead(params) if balanced else (None, None)
        losses = calibrator.loss(params)
        blocks = calibrator.extend_to_all_positions(calibrator.blocks, params)
        basis, energies = svd_basis(seen)
        seen = calibrator.extend_to_all_positions(seen, params)
        found = {
            "query_basis": basis,
            "key_basis": basis,
            "eigenvalues": energies,
            "key_mean": seen.key_mean,
            "tail_keys": blocks.key_covariance,
            "tail_values": blocks.cross_covariance,
            # Budgets follow the loss of the query in use. Dense layers follow the last row,
            # speculation from the layer's input: a hidden state after resident attention may miss
            # the effect of the layer's own attention on the next query.
            "sparse_loss": losses[[0, -1], BUDGETS.index(BUDGET)],
            "row_loss": losses[:2],
        }
        if guess is not None:
            found["svd_basis"] = basis
            found["query_basis"], found["key_basis"] = balanced_basis(seen)
            ahead = reduced_rank_basis(seen, guess)
            found["ahead_query_basis"], found["ahead_key_basis"] = ahead
        if self.absorbs:  # in the coordinates of the cached keys
            found["key_mean"] = np.einsum("kd,kdc->kc", seen.key_mean, basis)
            found["tail_keys"] = np.einsum("kdc,kde,kef->kcf", basis, found["tail_keys"], basis)
            found["tail_values"] = np.einsum("kdc,kde->kce", basis, found["tail_values"])
        for name, value in found.items():
            self.statistics.setdefault(name, []).append(value.astype(np.float32))
        return projection or basis

    def _add(
        self, writer: SafetensorsWriter, specs: list[TensorSpec], basis: np.ndarray | None
    ) -> None:
        """Write tensors, with the basis folded into queries and keys."""
        for spec in specs:
            tensor = self.sources[spec.name].read()
            part = spec.path[0], spec.part
            if basis is not None and part in (("q", 0), ("kv", 0)):
                tensor = absorb(tensor.T, basis).T
            writer.add(spec.name, tensor.astype(self.dtype, copy=False))
