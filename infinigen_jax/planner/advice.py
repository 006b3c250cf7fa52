"""Advice of `plan`: recommended settings, and a verdict on the requested ones."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator

from infinigen_jax.cache.row_format import row_format
from infinigen_jax.machine.memory_limits import format_bytes
from infinigen_jax.planner.forecast import Forecast, Planner, Settings

BUDGETS = (0.1, 0.05, 0.03, 0.02)  # tried in order until copying is no longer the slowest part
# Share of a step's time that a smaller budget has to save. Fewer rows cost quality, and a forecast,
# a lower bound with an assumed hit rate, is not accurate enough to promise less than a tenth.
WORTH = 0.1
SMALLER_ROWS = ("int8", "int4")
SMALLER_CHUNKS = (1024, 512, 256)  # tried in order where reading a prompt needs too much memory


@dataclasses.dataclass(frozen=True)
class Advice:
    """Result of a plan.

    Attributes:
        asked: forecast with the requested options.
        full: forecast with the whole cache on the device.
        best: the fastest forecast that fits, with exact rows if possible; None if none fits.
            Without bandwidths, the forecast closest to the requested options.
        most_context, most_batch: if nothing fits, the largest context and the largest batch that
            would fit with the other as requested.
        last_resort: if nothing fits, a forecast with the largest number of dense layers that fits.
    """

    asked: Forecast
    full: Forecast
    best: Forecast | None
    most_context: int | None = None
    most_batch: int | None = None
    last_resort: Forecast | None = None


def advise(planner: Planner, batch: int, context: int) -> Advice:
    """Forecast the requested settings and search for better ones."""
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
        last_resort=best_with_fewer_dense(planner, batch, context),
    )


def fits(planner: Planner, dense: Iterable[int], batch: int, context: int) -> bool:
    """Return whether any settings fit with one of these numbers of dense layers."""
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
    """Return the fastest forecast that fits with the least costly remedy; None if none fits.

    Shorter chunks delay the first token, smaller rows lose precision, and weights on the host cost
    time in every step.

    Args:
        dense: candidate numbers of dense layers; by default `dense_choices`.
    """
    dense = sorted(dense_choices(planner) if dense is None else dense)
    for weights in weight_choices(planner):
        placed = dataclasses.replace(planner.asked, weights=weights)
        room = planner.machine.device_memory
        if room is not None and planner.forecast(placed, batch, context).weights > room:
            continue
        for rows, chunk in itertools.product(row_choices(planner), chunk_choices(planner)):
            smaller = dataclasses.replace(placed, rows=rows, prefill_chunk=chunk)
            fitting = fastest_placement(planner, smaller, dense, batch, context)
            if fitting is not None:
                return with_smaller_budget(planner, fitting, batch, context)
    return None


def fastest_placement(
    planner: Planner, remedied: Settings, dense: Iterable[int], batch: int, context: int
) -> Forecast | None:
    """Return the fastest cache placement that fits; without bandwidths the first that fits."""
    forecasts = (
        planner.forecast(settings, batch, context)
        for settings in placements(planner, remedied, dense)
    )
    fitting = (forecast for forecast in forecasts if forecast.fits)
    if not planner.machine.timed:
        return next(fitting, None)
    return min(fitting, key=lambda f: (round(f.seconds or 0.0, 9), f.device), default=None)


def best_with_fewer_dense(planner: Planner, batch: int, context: int) -> Forecast | None:
    """Return the best forecast with the most dense layers that fit, fewer than requested."""
    for dense_layers in reversed(range(planner.asked.dense_layers)):
        if fits(planner, [dense_layers], batch, context):
            return best_settings(planner, batch, context, [dense_layers])
    return None


def weight_choices(planner: Planner) -> Iterator[str]:
    """Yield places for the weights: the requested place, then the host if none was requested."""
    yield planner.asked.weights
    # With one memory for device and host, moving the weights saves nothing.
    if planner.arguments.weights is None and planner.machine.separate:
        yield "host"


def row_choices(planner: Planner) -> Iterator[str]:
    """Yield row formats: the requested one, then smaller ones if none was requested."""
    yield planner.asked.rows
    if planner.asked.rows == "auto":
        for name in SMALLER_ROWS:
            if _has_groups(planner, name):
                yield name


def chunk_choices(planner: Planner) -> Iterator[int | None]:
    """Yield chunk lengths: the requested one, then shorter ones if none was requested."""
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
    """Return candidate numbers of dense layers: the requested one, or the default and larger ones.

    Never fewer than the default, which the conversion's losses determine.
    """
    asked, layers = planner.asked.dense_layers, planner.config.num_layers
    if planner.arguments.dense_layers is not None:
        return {asked}
    more = (layers // 4, layers // 2, 3 * layers // 4, layers)
    return {asked, *(n for n in more if n > asked)}


def placements(planner: Planner, remedied: Settings, dense: Iterable[int]) -> Iterator[Settings]:
    """Yield cache placements, the one closest to the request first; given options stay."""
    asked, given = planner.asked.hot_set, planner.arguments.hot_set
    hot = {asked} if given is not None else {asked, 0.0}
    for dense_layers in dense:
        for size in sorted(hot, reverse=True):
            if dense_layers < planner.config.num_layers or size == min(hot):
                yield dataclasses.replace(remedied, dense_layers=dense_layers, hot_set=size)


def with_smaller_budget(planner: Planner, best: Forecast, batch: int, context: int) -> Forecast:
    """Return a forecast with a smaller budget if the bus limits a step and this saves WORTH."""
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
        floors = (forecast.traffic.floor_ms(reads, copies) for forecast in (tried, best))
        if next(floors) <= (1 - WORTH) * next(floors):
            best = tried
    return best


def largest(passes: Callable[[int], bool], most: int) -> int:
    """Return the largest number below `most` that passes, within a sixteenth; 0 if none does."""
    low, high = 0, most
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def verdict(advice: Advice) -> list[str]:
    """Return the advice as sentences, one per line."""
    lines = [describe_full_cache(advice)]
    best, asked, last = advice.best, advice.asked, advice.last_resort
    if best is None:
        lines.append(
            f"nothing fits: at most {advice.most_context} tokens of context, or "
            f"{advice.most_batch} sequences"
        )
        if last is not None:
            lines.append(
                f"a last resort, fewer dense layers fit but may lose quality: {describe(last)}"
            )
    elif best.settings == asked.settings:
        label = "fits" if best.seconds is None else "recommended"
        lines.append(f"{label}: as it is, {command_options(best.settings)}")
    else:
        label = "would fit" if best.seconds is None else "recommended"
        lines.append(f"{label}: {describe(best)}")
    return lines


def describe(forecast: Forecast) -> str:
    """Format settings with their step time and device memory."""
    time = "" if forecast.seconds is None else f"{1e3 * forecast.seconds:.2f} ms a step, "
    peak = f"{format_bytes(forecast.device)} on the device"
    return f"{command_options(forecast.settings)}: {time}{peak}"


def command_options(settings: Settings) -> str:
    """Format settings as options of a command line."""
    options = f"--dense-layers {settings.dense_layers} --hot-set {settings.hot_set:g}"
    options += f" --rows {settings.rows}"
    if settings.budget is not None:
        options += f" --budget {settings.budget}"
    if settings.prefill_chunk is not None:
        options += f" --prefill-chunk {settings.prefill_chunk}"
    if settings.weights != "device":
        options += f" --weights {settings.weights}"
    return options


def describe_full_cache(advice: Advice) -> str:
    """Say whether the device can hold the whole cache, and whether that is faster."""
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
