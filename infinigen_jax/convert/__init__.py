"""Conversion of Hugging Face folders: read, map, calibrate, skew, write, one layer at a time."""

from collections.abc import Callable, Sequence
from pathlib import Path

from infinigen_jax.convert.defaults import DEFAULT_NEURONS, DEFAULT_SKEW

__all__ = ["convert"]


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    calibration: str | Path | Sequence[int] | None = None,
    dtype: str | None = None,
    skew: str = DEFAULT_SKEW,
    speculate_from: str | None = None,
    neurons: float = DEFAULT_NEURONS,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Convert a Hugging Face model folder; skew it on the way (section 4.2 of the paper).

    The destination is a Hugging Face folder too, plus `infinigen.safetensors` (the bases) and
    `infinigen.json` (where everything came from). It appears whole or not at all.

    Args:
        source: folder with config.json, safetensors or pytorch_model.bin, and a tokenizer.
        destination: folder to create.
        calibration: UTF-8 text file, or token ids; the text in this package by default. At most
            2048 tokens are used.
        dtype: "float32", "bfloat16" or "float16" for the weights; as stored by default.
        skew: "balanced" (the default: a basis that weighs queries and keys alike, a query corrected
            on the text, and the paper's basis), "svd" (the paper's), or "none".
        speculate_from: what of the layer before the corrected query is of: "input", the
            attention's, or "resident", the hidden state after attention to sinks and recent tokens
            alone, the default of a balanced conversion.
        neurons: of the MLP in front of a layer, as a share of its width, that the corrected query
            sees besides; 0 for none.
        force: replace an earlier conversion at the destination, once the new one is complete.
        progress: called with the number of layers done and their total.

    Returns:
        The destination.

    Raises:
        InputError: naming the file or the setting that is at fault, and the remedy.
    """
    from infinigen_jax.convert.pipeline import run

    return run(
        source,
        destination,
        calibration=calibration,
        dtype=dtype,
        skew=skew,
        speculate_from=speculate_from,
        neurons=neurons,
        force=force,
        progress=progress,
    )
