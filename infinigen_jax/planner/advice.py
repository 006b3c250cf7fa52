"""The settings that a plan recommends, and what it says of those that were asked for."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator

from infinigen_jax.cache.row_format import row_format
from infinigen_jax.machine.memory_limits import format_bytes
from infinigen_jax.planner.forecast import Forecast, Planner, Settings

BUDGETS = (0.1, 0.05, 0.03, 0.02)  # tried, from the first, until copying no longer takes longest
# Share of a step's time that a smaller budget has to save. Fewer rows cost quality, and a plan, a
# floor with a supposed hit rate, is not exact enough to promise less than a tenth for it.
WORTH = 0.1
SMALLER_ROWS = ("int8", "int4")
SMALLER_CHUNKS = (1024, 512, 256)  # tried in turn where a prompt takes too much while it is read


@dataclasses.dataclass(frozen=True)
class Advice:
    """What a plan comes to.

    Attributes:
        asked: with the options as they were given.
        full: with the whole cache on the device.
        best: the fastest that fits, with exact rows if any such does; None if nothing fits. Without
            bandwidths that which is nearest to what was asked for.
        most_context, most_batch: if nothing fits, what would, the other as it was asked for.
        last_resort: if nothing fits, what would with fewer dense layers, as many as can be.
    """

    asked: Forecast
    full: Forecast
    best: Forecast | None
    most_context: int | None = None
    most_batch: int | None = None
    last_resort: Forecast | None = None


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
    ends = {min(dense_choices(planner)), max(dense_choices(planner))}
    return dataclasses.replace(
        advice,
        most_context=largest(lambda n: fits(planner, ends, batch, n), context),
        most_batch=largest(lambda n: fits(planner, ends, n, context), batch),
        last_resort=with_fewer_dense(planner, batch, context),
    )


def fits(planner: Planner, dense: Iterable[int], batch: int, context: int) -> bool:
    """Whether there are settings that fit, with one of these numbers of dense layers."""
    *_, smallest = row_choices(planner)
    *_, chunk = chunk_choices(planner)
    asked = planner.asked
    hot = 0.0 if planner.arguments.hot_set is None else asked.hot_set
    places = itertools.product(sorted(dense), weight_choices(planner))
    leanest = (Settings(n, hot, smallest, asked.budget, chunk, place) for n, place in places)
    return any(planner.forecast(settings, batch, context).fits for settings in leanest)


def best_settings(
    planner: Planner, batch: int, context: int, dense: Iterable[int] | None = None
) -> Forecast | None:
    """The fastest forecast that fits, by the remedy that costs least; each only if it has to be.

    Chunks cost time before the first token, rows precision, and weights on the host the time of
    bringing them in every step.

    Args:
        dense: numbers of dense layers to choose among; by default `dense_choices`.
    """
    dense = sorted(dense_choices(planner) if dense is None else dense)
    for weights in weight_choices(planner):
        there = dataclasses.replace(planner.asked, weights=weights)
        room = planner.machine.device_memory
        if room is not None and planner.forecast(there, batch, context).weights > room:
            continue
        for rows, chunk in itertools.product(row_choices(planner), chunk_choices(planner)):
            smaller = dataclasses.replace(there, rows=rows, prefill_chunk=chunk)
            found = fastest(planner, smaller, dense, batch, context)
            if found is not None:
                return narrowed(planner, found, batch, context)
    return None


def fastest(
    planner: Planner, remedied: Settings, dense: Iterable[int], batch: int, context: int
) -> Forecast | None:
    """Of the places for the cache at which it fits; without bandwidths the first of them."""
    forecasts = (
        planner.forecast(settings, batch, context) for settings in choices(planner, remedied, dense)
    )
    fitting = (forecast for forecast in forecasts if forecast.fits)
    if not planner.machine.timed:
        return next(fitting, None)
    return min(fitting, key=lambda f: (round(f.seconds or 0.0, 9), f.device), default=None)


def with_fewer_dense(planner: Planner, batch: int, context: int) -> Forecast | None:
    """The best forecast with fewer dense layers than asked for, but as many as fit."""
    for number in reversed(range(planner.asked.dense_layers)):
        if fits(planner, [number], batch, context):
            return best_settings(planner, batch, context, [number])
    return None


def weight_choices(planner: Planner) -> Iterator[str]:
    """Where the weights are, the asked place first; the host if none was asked for."""
    yield planner.asked.weights
    # Where there is one memory, it is none the larger by it.
    if planner.arguments.weights is None and planner.machine.separate:
        yield "host"


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


def dense_choices(planner: Planner) -> set[int]:
    """Numbers of dense layers; if none was asked for, those of a run by default and more.

    Never fewer: a conversion found that the first layers lose too much without all their rows.
    """
    number, layers = planner.asked.dense_layers, planner.config.num_layers
    if planner.arguments.dense_layers is not None:
        return {number}
    more = (layers // 4, layers // 2, 3 * layers // 4, layers)
    return {number, *(n for n in more if n > number)}


def choices(planner: Planner, remedied: Settings, dense: Iterable[int]) -> Iterator[Settings]:
    """Where the cache may be kept, what is nearest to the asked first; what was given stays."""
    asked, given = planner.asked.hot_set, planner.arguments.hot_set
    hot = {asked} if given is not None else {asked, 0.0}
    for number in dense:
        for size in sorted(hot, reverse=True):
            if number < planner.config.num_layers or size == min(hot):
                yield dataclasses.replace(remedied, dense_layers=number, hot_set=size)


def narrowed(planner: Planner, best: Forecast, batch: int, context: int) -> Forecast:
    """With a smaller budget where the bus is what a step waits for, and it is worth that."""
    machine, asked = planner.machine, best.settings.budget
    reads, copies = machine.memory_bandwidth, machine.copy_bandwidth
    if reads is None or copies is None or not machine.separate:
        return best
    if asked is None or planner.arguments.budget:
        return best
    tried = best
    for budget in (share for share in BUDGETS if share < asked):
        if tried.traffic.bus / copies <= tried.traffic.memory / reads:
            break
        settings = dataclasses.replace(best.settings, budget=budget)
        tried = planner.forecast(settings, batch, context)
        floors = (made.traffic.floor_ms(reads, copies) for made in (tried, best))
        if next(floors) <= (1 - WORTH) * next(floors):
            best = tried
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
    best, asked, last = advice.best, advice.asked, advice.last_resort
    if best is None:
        lines.append(
            f"nothing fits: at most {advice.most_context} tokens of context, or "
            f"{advice.most_batch} sequences"
        )
        if last is not None:
            lines.append(
                f"a last resort, fewer dense layers fit but may lose quality: {said(last)}"
            )
    elif best.settings == asked.settings:
        found = "fits" if best.seconds is None else "recommended"
        lines.append(f"{found}: as it is, {options_of(best.settings)}")
    else:
        found = "would fit" if best.seconds is None else "recommended"
        lines.append(f"{found}: {said(best)}")
    return lines


def said(forecast: Forecast) -> str:
    """Settings and what they come to."""
    time = "" if forecast.seconds is None else f"{1e3 * forecast.seconds:.2f} ms a step, "
    peak = f"{format_bytes(forecast.device)} on the device"
    return f"{options_of(forecast.settings)}: {time}{peak}"


def options_of(settings: Settings) -> str:
    """As a command line takes them."""
    options = f"--dense-layers {settings.dense_layers} --hot-set {settings.hot_set:g}"
    options += f" --rows {settings.rows}"
    if settings.budget is not None:
        options += f" --budget {settings.budget}"
    if settings.prefill_chunk is not None:
        options += f" --prefill-chunk {settings.prefill_chunk}"
    if settings.weights != "device":
        options += f" --weights {settings.weights}"
    return options


def about_full(advice: Advice) -> str:
    """Whether the device could hold the whole cache, and whether that would be faster."""
    full, asked = advice.full, advice.asked
    if not full.fits:
        return f"the full cache on the device does not fit: {format_bytes(full.device)} are needed"
    option = f"--dense-layers {full.settings.dense_layers}"
    if full.seconds is None or asked.seconds is None:
        return f"the full cache on the device fits: {option}"
    step = f"{1e3 * full.seconds:.2f} ms a step"
    if full.seconds < asked.seconds or not asked.fits:
        return f"the full cache on the device fits and is faster, {step}: {option}"
    return f"the full cache on the device fits, but is not faster: {step}"
