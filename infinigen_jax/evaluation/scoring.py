"""Windows through the engine: prefill a context, then decode given tokens and score the next.

    window      0 ........ c-2   c-1   c  ........  n-2   n-1
    prefilled   x x x x x x x
    decoded                       x    x  x x x x x  x
    scored                             x  x x x x x  x     x

Every score is that of a decode step: the last token of the context is decoded too, for what
prefill computes does not depend on the policy.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from infinigen_jax.errors import InputError, MemoryShortageError

if TYPE_CHECKING:
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.engine.generation import Run

READ_EVERY = 64  # steps; as many stay queued, so that the device never waits for Python


class Scores(NamedTuple):
    """What was predicted of some windows behind their context.

    Attributes:
        nats: of each token, its negative natural log-probability.
        best: the likeliest token in its place.
        tokens, log_probs: n tokens in its place, and their natural log-probabilities.
    """

    nats: Float[np.ndarray, "w t"]
    best: Int[np.ndarray, "w t"]
    tokens: Int[np.ndarray, "w t n"]
    log_probs: Float[np.ndarray, "w t n"]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What moved; sums over the scored tokens of some windows, sizes of one batch.

    Attributes:
        tokens: scored.
        selected, fetched: of each token, rows over rows cached, see `run.Stats`.
        attended: likewise in the layers that are selected for alone, selected or resident on the
            device, the token itself apart; 1 if there are none.
        selected_rows, fetched_rows: numbers of rows.
        moved_bytes: from host to device, padding included.
    """

    tokens: int = 0
    selected: float = 0.0
    fetched: float = 0.0
    attended: float = 0.0
    selected_rows: int = 0
    fetched_rows: int = 0
    moved_bytes: int = 0
    host_cache_bytes: int = 0
    device_index_bytes: int = 0
    hot_set_bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        values = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in dataclasses.fields(self)
        }
        sizes = ("host_cache_bytes", "device_index_bytes", "hot_set_bytes")
        return Traffic(**(values | {s: max(getattr(self, s), getattr(other, s)) for s in sizes}))


def score_windows(
    engine: "Engine",
    windows: Int[np.ndarray, "w n"],
    context: int,
    batch: int,
    advance: Callable[[int], object] = lambda tokens: None,
    asked: int | Int[np.ndarray, "w t m"] = 0,
) -> tuple[Scores, Traffic]:
    """Score all tokens of some windows behind their context.

    Args:
        context: c, tokens of a window that are not scored; at least 2.
        batch: windows at once. The last batch is filled up with repetitions, so that one
            compilation serves all; they do not count.
        advance: called with a number of tokens when so many more have been scored.
        asked: which tokens' log-probabilities are wanted, beside those of the text: so many of the
            likeliest in each place, or these m; t = n - c.

    Returns:
        The scores [w, n - c], nats in float64; and what moved.

    Raises:
        InputError: if memory is too small, or the model does not give finite numbers.
    """
    parts, total = [], Traffic()
    for rows, kept in batches(len(windows), batch):
        wanted = asked if isinstance(asked, int) else asked[rows]
        scores, traffic = _score_batch(engine, windows[rows], context, kept, advance, wanted)
        parts.append(scores)
        total += traffic
    made = Scores(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    if not np.isfinite(made.nats).all():
        raise InputError(
            f"{np.count_nonzero(~np.isfinite(made.nats))} of {made.nats.size} scores are not "
            f"finite in {engine.model.dtype.name}; try --dtype float32, or check the model"
        )
    return made, total


def _score_batch(
    engine: "Engine",
    windows: Int[np.ndarray, "b n"],
    context: int,
    kept: int,
    advance: Callable[[int], object],
    asked: int | Int[np.ndarray, "b t m"],
) -> tuple[Scores, Traffic]:
    """Of the first `kept` windows."""
    run = start_run(engine, windows, context)
    read, waiting = [], []
    for step, position in enumerate(range(context - 1, windows.shape[1] - 1)):
        log_probs, targets = run.predict(windows[:, position]), windows[:, position + 1]
        # What is wanted is taken on the device: all of them are many, and steps are queued.
        tokens = _likeliest(log_probs, asked) if isinstance(asked, int) else asked[:, step]
        own, found = _chosen(log_probs, targets, tokens)
        waiting.append((own, run.drawn, tokens, found))
        if len(waiting) == 2 * READ_EVERY:
            read += jax.device_get(waiting[:READ_EVERY])
            del waiting[:READ_EVERY]
            advance(kept * READ_EVERY)
    read += jax.device_get(waiting)
    advance(kept * len(waiting))
    own, *others = (np.stack(part, axis=1)[:kept] for part in zip(*read, strict=True))
    return Scores(-own.astype(np.float64), *others), traffic(run, kept)


@functools.partial(jax.jit, static_argnames="number")
def _likeliest(log_probs: Float[Array, "b v"], number: int) -> Int[Array, "b n"]:
    """The likeliest tokens, all of them if there are fewer."""
    return jax.lax.top_k(log_probs, min(number, log_probs.shape[1]))[1]


@jax.jit
def _chosen(
    log_probs: Float[Array, "b v"], targets: Int[Array, " b"], tokens: Int[Array, "b n"]
) -> tuple[Float[Array, " b"], Float[Array, "b n"]]:
    """Log-probabilities of the targets, and of other tokens."""
    both = jnp.concatenate([targets[:, None], tokens], axis=1)
    found = jnp.take_along_axis(log_probs, both, axis=1)
    return found[:, 0], found[:, 1:]


def batches(number: int, size: int) -> Iterator[tuple[Int[np.ndarray, " b"], int]]:
    """Indices in batches of equal size, the last filled up with repetitions; how many count."""
    size = min(size, number)
    for start in range(0, number, size):
        yield np.minimum(np.arange(start, start + size), number - 1), min(size, number - start)


def start_run(engine: "Engine", windows: Int[np.ndarray, "b n"], context: int) -> "Run":
    """Prefill all of the context but its last token.

    Raises:
        InputError: naming --batch and --window, if memory is too small.
    """
    batch, size = windows.shape
    try:
        return engine.start(windows[:, : context - 1].tolist(), size - context)
    except MemoryShortageError as error:
        raise InputError(f"--batch {batch}, --window {size}: lower one of them ({error})") from None


def traffic(run: "Run", kept: int) -> Traffic:
    """What moved in all steps of a run so far, for its first `kept` sequences."""
    decoder, plan = run.decoder, run.plan
    selected, fetched = (
        np.stack([np.asarray(getattr(counts, name)) for counts in run.counts])[:, :kept].astype(
            np.int64
        )
        for name in ("selected", "moved")
    )
    steps = len(selected)
    heads = decoder.config.num_kv_heads
    past = run.prompt_lengths[:kept] + np.arange(steps)[:, None]
    cached = np.minimum(past, run.slots) * heads * decoder.host_layers
    cached = np.maximum(cached, 1)  # without layers on the host nothing is cached or selected
    padded = decoder.padded_rows(run.slots)
    moved = int(fetched.sum()) if padded is None else padded * steps * kept * heads
    stored = decoder.row_format
    return Traffic(
        tokens=steps * kept,
        selected=float((selected / cached).sum()),
        fetched=float((fetched / cached).sum()),
        attended=float(_attended(run, selected, past).sum()),
        selected_rows=int(selected.sum()),
        fetched_rows=int(fetched.sum()),
        moved_bytes=moved * stored.width * stored.storage.itemsize,
        host_cache_bytes=plan.host_cache,
        device_index_bytes=plan.index,
        hot_set_bytes=plan.hot,
    )


def _attended(
    run: "Run", selected: Int[np.ndarray, "s b"], past: Int[np.ndarray, "s b"]
) -> Float[np.ndarray, "s b"]:
    """See `Traffic`; of rows selected in all layers, with so many past tokens at each step."""
    decoder = run.decoder
    choosing = sum(not decoder.streams(number) for number in range(decoder.host_layers))
    if not choosing:
        return np.ones(past.shape)
    resident = np.minimum(past, decoder.slots.size - 1)
    heads = decoder.config.num_kv_heads
    streamed = (decoder.host_layers - choosing) * heads * np.minimum(past - resident, run.slots)
    return ((selected - streamed) / (choosing * heads) + resident) / np.maximum(past, 1)
