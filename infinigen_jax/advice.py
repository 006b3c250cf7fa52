"""The settings that a plan recommends, and what it says of those that were asked for."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from infinigen_jax.forecast import Forecast, Planner, Settings
from infinigen_jax.memory_limits import format_bytes
from infinigen_jax.rows import row_format

BUDGETS = (0.1, 0.05, 0.03, 0.02)  # tried, from the first, until copying no longer takes longest
SMALLER_ROWS = ("int8", "int4")
SMALLER_CHUNKS = (1024, 512, 256)  # tried in turn where a prompt takes too much while it is read


@dataclasses.dataclass(frozen=True)
class Advice:
    """What a plan comes to.

    Attributes:
        asked: with the options as they were given.
        full: with the whole cache on the device.
        best: the fastest that fits, with exact rows if any such does; None if nothing fits.
        most_context, most_batch: if nothing fits, what would, the other as it was asked for.
    """

    asked: Forecast
    full: Forecast
    best: Forecast | None
    most_context: int | None = None
    most_batch: int | None = None


def advise(planner: Planner, batch: int, context: int) -> Advice:
    """Forecast what was asked for, and look for better settings."""
    layers = planner.config.num_layers
    asked = planner.asked
    full = dataclasses.replace(asked, dense_layers=layers, hot_set=0.0, rows="auto")
    advice = Advice(
        asked=planner.forecast(asked, batch, context),
        full=planner.forecast(full, batch, context),
        best=best_settings(planner, batch, context),
    )
    if advice.best is not None:
        return advice
    return dataclasses.replace(
        advice,
        most_context=largest(lambda n: fits(planner, batch, n), context),
        most_batch=largest(lambda n: fits(planner, n, context), batch),
    )


def fits(planner: Planner, batch: int, context: int) -> bool:
    """Whether there are settings that fit: nearly all on the host, or all on the device."""
    *_, smallest = row_choices(planner)
    asked, layers = planner.asked, planner.config.num_layers
    dense = {asked.dense_layers} if planner.arguments.dense_layers is not None else {0, layers}
    hot = 0.0 if planner.arguments.hot_set is None else asked.hot_set
    *_, chunk = chunk_choices(planner)
    leanest = (Settings(n, hot, smallest, asked.budget, chunk) for n in sorted(dense))
    return any(planner.forecast(settings, batch, context).fits for settings in leanest)


def best_settings(planner: Planner, batch: int, context: int) -> Forecast | None:
    """The fastest forecast that fits; chunks and rows are made smaller only if nothing does else.

    Chunks first: they cost time before the first token, rows precision.
    """
    smaller = itertools.product(row_choices(planner), chunk_choices(planner))
    for rows, chunk in smaller:
        forecasts = (
            planner.forecast(settings, batch, context) for settings in choices(planner, rows, chunk)
        )
        fitting = [forecast for forecast in forecasts if forecast.fits]
        if fitting:
            best = min(fitting, key=lambda f: (round(f.seconds, 9), f.device))
            return narrowed(planner, best, batch, context)
    return None


def row_choices(planner: Planner) -> Iterator[str]:
    """Formats of rows, the asked one first; the others if none was asked for."""
    yield planner.asked.rows
    if planner.asked.rows == "auto":
        for name in SMALLER_ROWS:
            if _has_groups(planner, name):
                yield name


def chunk_choices(planner: Planner) -> Iterator[int | None]:
    """Lengths of chunks, the asked one first; shorter ones if none was asked for."""
    yield planner.asked.prefill_chunk
    if planner.asked.prefill_chunk is None:
        yield from SMALLER_CHUNKS


def _has_groups(planner: Planner, name: str) -> bool:
    try:
        row_format(name, "float32", planner.config.head_dim)
    except ValueError:
        return False
    return True


def choices(planner: Planner, rows: str, chunk: int | None) -> Iterator[Settings]:
    """Where the cache may be kept; what was given as an option stays."""
    asked, layers = planner.asked, planner.config.num_layers
    given = planner.arguments
    dense = {asked.dense_layers}
    if given.dense_layers is None:
        dense |= {0, layers // 4, layers // 2, 3 * layers // 4, layers}
    hot = {asked.hot_set} if given.hot_set is not None else {asked.hot_set, 0.0}
    for number in sorted(dense):
        for size in sorted(hot):
            if number < layers or size == min(hot):
                yield Settings(number, size, rows, asked.budget, chunk)


def narrowed(planner: Planner, best: Forecast, batch: int, context: int) -> Forecast:
    """With the largest budget at which the bus is not what a step waits for."""
    traffic, machine = best.traffic, planner.machine

    def waits(forecast: Forecast) -> bool:
        memory, link = forecast.traffic.memory, forecast.traffic.link
        return link / machine.copy_bandwidth > memory / machine.memory_bandwidth

    if not machine.separate or planner.arguments.budget or not traffic.link or not waits(best):
        return best
    for budget in BUDGETS:
        if best.settings.budget is None or budget >= best.settings.budget:
            continue
        best = planner.forecast(dataclasses.replace(best.settings, budget=budget), batch, context)
        if not waits(best):
            break
    return best


def largest(passes: Callable[[int], bool], most: int) -> int:
    """The largest number below `most` that passes, to about a sixteenth; 0 if none does."""
    low, high = 0, most
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def verdict(advice: Advice) -> list[str]:
    """The advice in sentences, one a line."""
    lines = [about_full(advice)]
    best, asked = advice.best, advice.asked
    if best is None:
        lines.append(
            f"nothing fits: at most {advice.most_context} tokens of context, or "
            f"{advice.most_batch} sequences"
        )
        return lines
    options = f"--dense-layers {best.settings.dense_layers} --hot-set {best.settings.hot_set:g}"
    options += f" --rows {best.settings.rows}"
    if best.settings.budget is not None:
        options += f" --budget {best.settings.budget:g}"
    if best.settings.prefill_chunk is not None:
        options += f" --prefill-chunk {best.settings.prefill_chunk}"
    peak = f"{format_bytes(best.device)} on the device"
    if best.settings == asked.settings:
        lines.append(f"recommended: as it is, {options}")
    else:
        lines.append(f"recommended: {options}: {1e3 * best.seconds:.2f} ms a step, {peak}")
    return lines


def about_full(advice: Advice) -> str:
    """Whether the device could hold the whole cache, and whether that would be faster."""
    full, asked = advice.full, advice.asked
    step = f"{1e3 * full.seconds:.2f} ms a step"
    if not full.fits:
        return f"the full cache on the device does not fit: {format_bytes(full.device)} are needed"
    if full.seconds < asked.seconds or not asked.fits:
        layers = full.settings.dense_layers
        return f"the full cache on the device fits and is faster, {step}: --dense-layers {layers}"
    return f"the full cache on the device fits, but is not faster: {step}"
