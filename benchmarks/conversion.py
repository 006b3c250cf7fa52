"""Time and memory of a conversion: of a model, and of one layer in the shape of LLaMA-8B.

    python -m benchmarks.conversion --model F --json benchmarks/results/conversion-cpu.json

A separate process with an empty cache converts the model. The layer has random weights and a
preceding layer.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.machine import describe, note, write_json
from benchmarks.shapes import SHAPES, settings
from benchmarks.startup import usage_of
from infinigen_jax.checkpoint.manifest import DEFAULT_SOURCE
from infinigen_jax.convert.calibrate import DEFAULT_TOKENS, CalibrationTokens, Calibrator
from infinigen_jax.convert.pipeline import blas_threads
from infinigen_jax.models import config_from_hf
from infinigen_jax.models.base import random_params


def convert(model: Path) -> dict[str, float]:
    """Convert a model folder or a GGUF file in a new process."""
    files = [model] if model.is_file() else model.glob("*.safetensors")
    weights = sum(file.stat().st_size for file in files)
    with tempfile.TemporaryDirectory() as folder:
        usage = usage_of(["infinigen_jax.convert", str(model), f"{folder}/out"], folder)
    return usage | {"weight_bytes": weights}


def layer(shape: str) -> dict[str, float]:
    """Calibrate the second of two layers; the first includes compilation."""
    config = config_from_hf(settings(SHAPES[shape], 8192))
    config = dataclasses.replace(config, num_layers=1, vocab_size=256)
    params = random_params(config, jnp.float32)
    ids = np.random.default_rng(0).integers(0, 256, (1, DEFAULT_TOKENS)).astype(np.int32)
    tokens = CalibrationTokens(ids, np.ones_like(ids, bool), "")
    calibrator = Calibrator(config, tokens, params["embedding"], DEFAULT_SOURCE)
    record: dict[str, float] = {}
    for _ in range(2):
        start = time.perf_counter(), time.process_time()
        with blas_threads():
            calibrator.layer(params["layers"][0])
            calibrator.ahead(params["layers"][0])
            calibrator.loss(params["layers"][0])
        record["wall_seconds"] = time.perf_counter() - start[0]
        record["processor_seconds"] = time.process_time() - start[1]
        note(f"layer of {shape}: {record}")
    return record


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, metavar="F", help="folder or GGUF file to convert")
    parser.add_argument("--json", type=Path, metavar="F")
    return parser


def main(argv: list[str] | None = None) -> int:
    chosen = build_parser().parse_args(argv)
    record: dict[str, Any] = {"machine": describe()}
    if chosen.model:
        record[chosen.model.name] = convert(chosen.model)
    record["llama-8b layer"] = layer("llama-8b")
    print(json.dumps(record, indent=1))
    if chosen.json:
        write_json(chosen.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
