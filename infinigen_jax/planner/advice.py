"""Advice of `plan`: the fastest settings that fit, with the least costly remedy."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from infinigen_jax.cache.row_format import row_format
from infinigen_jax.errors import ParameterError
from infinigen_jax.planner.forecast import Forecast, Planner

SMALLER_ROWS = ("int8", "int4")
SMALLER_CHUNKS = (1024, 512, 256)


@dataclasses.dataclass(frozen=True)
class Advice:
    """Result of a plan.

    Attributes:
        full: forecast with the whole cache on the device.
        best: the fastest forecast that fits, with exact rows if possible; None if none fits.
            Without bandwidths, the forecast closest to the requested options.
        most_context, most_batch: if nothing fits, the largest context and the largest batch that
            would fit with the other as requested.
    """

    asked: Forecast
    full: Forecast
    best: Forecast | None
    most_context: int | None
    most_batch: int | None


def advise(planner: Planner, batch: int, context: int) -> Advice:
    """Forecast the requested settings and search for better ones."""
    asked, layers = planner.asked, planner.config.num_layers
    full = dataclasses.replace(asked, dense_layers=layers, hot_set=0.0, rows="auto")
    best = best_settings(planner, batch, context)
    fitting = best is not None
    return Advice(
        asked=planner.forecast(asked, batch, context),
        full=planner.forecast(full, batch, context),
        best=best,
        most_context=None if fitting else largest(lambda n: fits(planner, batch, n), context),
        most_batch=None if fitting else largest(lambda n: fits(planner, n, context), batch),
    )


def best_settings(planner: Planner, batch: int, context: int) -> Forecast | None:
    """Return the fastest forecast that fits with the least costly remedy; None if none fits.

    Shorter chunks delay the first token, smaller rows lose precision, and weights on the host cost
    time in every step.
    """
    tried, layers = choices(planner), planner.config.num_layers
    # The cache placement closest to the request first.
    placements = [
        {"dense_layers": dense, "hot_set": hot}
        for dense, hot in itertools.product(tried["dense_layers"], tried["hot_set"])
        if dense < layers or hot == min(tried["hot_set"])
    ]
    remedies = ("weights", "rows", "prefill_chunk")
    for values in itertools.product(*(tried[name] for name in remedies)):
        remedy = dict(zip(remedies, values, strict=True))
        placed = (dataclasses.replace(planner.asked, **remedy, **each) for each in placements)
        forecasts = (planner.forecast(settings, batch, context) for settings in placed)
        fitting = (forecast for forecast in forecasts if forecast.fits)
        if (first := next(fitting, None)) is not None:
            if first.seconds is None:  # bandwidths are unknown
                return first
            return min([first, *fitting], key=lambda f: (round(f.seconds or 0.0, 9), f.device))
    return None


def fits(planner: Planner, batch: int, context: int) -> bool:
    """Return whether any settings fit, judged by those that need the least memory."""
    tried = choices(planner)
    leanest = {name: tried[name][-1] for name in ("rows", "prefill_chunk", "hot_set")}
    settings = (
        dataclasses.replace(planner.asked, weights=weights, dense_layers=dense, **leanest)
        for weights, dense in itertools.product(tried["weights"], tried["dense_layers"])
    )
    try:
        return any(planner.forecast(each, batch, context).fits for each in settings)
    except ParameterError:  # a pool's tokens are too few for a longer context
        return False


def choices(planner: Planner) -> dict[str, list[Any]]:
    """Return values of each setting to try: the given one; else the default, and remedies for it.

    Dense layers are never fewer than the default, which the conversion's losses determine.
    """
    asked, layers = planner.asked, planner.config.num_layers
    exact = row_format("auto", "float32", planner.config.head_dim)
    assert asked.dense_layers is not None
    remedies: dict[str, tuple[Any, ...]] = {
        # With one memory for device and host, moving the weights saves nothing.
        "weights": ("host",) if planner.machine.separate else (),
        "rows": SMALLER_ROWS if dataclasses.replace(exact, name="int8").groups else (),
        "prefill_chunk": SMALLER_CHUNKS,
        "dense_layers": (layers // 4, layers // 2, 3 * layers // 4, layers),
        "hot_set": (0.0,),
    }
    remedies["dense_layers"] = tuple(n for n in remedies["dense_layers"] if n > asked.dense_layers)
    return {
        name: list(dict.fromkeys((getattr(asked, name), *(() if name in planner.given else more))))
        for name, more in remedies.items()
    }


def largest(passes: Callable[[int], bool], most: int) -> int:
    """Return the largest number below `most` that passes, within a sixteenth; 0 if none does."""
    low, high = 0, most
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low
