"""Conversion of models: read, map, calibrate, skew and write one layer at a time.

Imports checkpoint, skew, speculation, text, models, files. Start reading at pipeline.py.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from infinigen_jax.convert.defaults import DEFAULT_SKEW

__all__ = ["convert", "progress_bar"]


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
    progress: Callable[[int, int], None] | None = None,
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
            source. By default they are hard links to the source's files, or copies where a link or
            the weights as they are will not do.
        progress: called with the number of converted layers and the number of all layers.

    Returns:
        The destination.

    Raises:
        InputError: names the file or setting at fault and the remedy.
    """
    from infinigen_jax.checkpoint.hub import fetched
    from infinigen_jax.convert.pipeline import run

    return run(
        fetched(source, revision),
        destination,
        calibration=calibration,
        dtype=dtype,
        skew=skew,
        speculate_from=speculate_from,
        force=force,
        sidecar=sidecar,
        progress=progress,
    )


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """Show a bar with the time left on stderr if it is a terminal; yields `convert`'s progress."""
    from tqdm import tqdm

    with tqdm(desc="converting", unit="layer", leave=False, disable=None, delay=0.1) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
