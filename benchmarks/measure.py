"""Measurement of one context: systems that fit in memory together take turns, round by round.

A wave is a set of systems in memory at the same time. They take turns so that other load on the
machine affects all alike. The timing has these parts, in this order:

    rounds     consecutive tokens, as in a generation: throughput
    steps      single tokens, with the device idle before each: spikes, and Python's overhead
    trace      a few consecutive tokens under the profiler: breakdown of the time
"""

import contextlib
import dataclasses
import functools
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import shapes, trace
from benchmarks.files import note
from benchmarks.physics import Traffic, offloaded_traffic, resident_traffic, traffic_of
from benchmarks.presets import LLAMA_CPP, is_ours
from benchmarks.systems import FEWEST_STEPS, Ours, StepTime, System, new_tokens, settings
from benchmarks.waves import Bench, absent_entry, needs_of, room_of, waves_of
from infinigen_jax.engine.engine import Engine
from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.texts import common_length
from infinigen_jax.programs.compilations import compilations

EXACT = ("transformers", "transformers-static", "full-device", "full-streamed")  # equal tokens
STEP_SECONDS = 10.0  # limit of a system's single steps


def measure_context(bench: Bench, context: int) -> Iterator[dict[str, Any]]:
    """Yield the result of one prompt length, for all systems so far, after every wave."""
    options = bench.options
    result: dict[str, Any] = {"context": context, "waves": [], "systems": {}}
    needs, absent = needs_of(bench, context)
    result["systems"] |= absent
    tokens = prompts(bench, context)
    reference: list[int] = []
    for names in waves_of(needs, room_of(bench)):
        result["waves"].append(names)
        for entries in _measure_wave(bench, context, names, tokens, reference):
            result["systems"] |= entries
            yield result
        _let_go()
    done = result["systems"]
    result["systems"] = {name: done[name] for name in options.systems if name in done}
    yield result


def prompts(bench: Bench, context: int) -> list[list[int]]:
    """Return the batch's prompts: consecutive parts of the text, or random tokens."""
    options, model = bench.options, bench.model
    if not options.model:
        return [shapes.prompt(model.config, context, seed) for seed in range(options.batch)]
    ids = shapes.text_tokens(model.tokenizer, options.text, context * options.batch)
    return [ids[i : i + context] for i in range(0, len(ids), context)]


def _measure_wave(
    bench: Bench, context: int, names: list[str], tokens: list[list[int]], reference: list[int]
) -> Iterator[dict[str, Any]]:
    """Yield the systems' entries after the rounds, and again with single steps and traces."""
    options = bench.options
    systems: dict[str, System] = {}
    entries: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name in names}

    @contextlib.contextmanager
    def reported(name: str) -> Iterator[None]:
        """Record a system's failure, mostly out of memory, so that no other measurement is lost."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            systems.pop(name, None)
            kind = "refused" if isinstance(error, InputError) else "failed"
            reason = f"{type(error).__name__}: {error}"[:500]
            if name in entries:  # it has been timed
                entries[name]["error"] = reason
            else:
                entries[name] = absent_entry(kind, reason)

    for name in names:
        if bench.late:
            entries[name] = absent_entry("skipped", "no time was left")
            continue
        note(f"{context} tokens: {name} starts")
        with reported(name):
            systems[name] = _start(bench, context, name, tokens)
            systems[name].warm_up(options.warmup, options.tokens)
    compiled = compilations()
    for index in range(options.rounds):
        if index and bench.late:
            break
        for name in turns(list(systems), index):
            with reported(name):
                seconds[name].append(systems[name].round(options.tokens))
    compiled = compilations() - compiled
    for name, system in systems.items():
        entries[name] = _speed(bench, seconds[name]) | system.facts()
        # Weights of other systems, and llama.cpp's cache, may have other sizes.
        if is_ours(name) or not (options.weight_dtype or name in LLAMA_CPP):
            traffic = _traffic(bench, name, system, context)
            entries[name] |= _against_floor(bench, traffic, statistics.median(seconds[name]))
        entries[name]["compilations_after_warmup"] = compiled
    yield entries
    for name, system in list(systems.items()):
        note(f"{context} tokens: {name}, single steps")
        with reported(name):
            singles = [] if bench.late else _single_steps(system, options.steps)
            entries[name] |= _steps_entry(singles)
            if isinstance(system, Ours) and options.trace_steps and not bench.late:
                run = functools.partial(system.steps, options.trace_steps)
                entries[name]["breakdown"] = trace.breakdown(run, options.trace_steps)
    exact = next((systems[name] for name in EXACT if name in systems), None)
    reference += [] if reference or exact is None else exact.drawn
    for name, system in systems.items() if reference else ():
        if system.drawn:  # llama.cpp's are not known
            entries[name]["first_tokens_equal_to_exact"] = common_length(system.drawn, reference)
    yield entries


def turns(names: list[str], index: int) -> list[str]:
    """Return the order of a round; over the rounds each system follows every other equally often.

    A system leaves caches and threads to the next one in its own state. The order is a Williams
    Latin square, which is balanced after n rounds of n systems, or 2n if n is odd.
    """
    n = len(names)
    index, back = divmod(index, 2) if n % 2 else (index, 0)
    order = [(index + (i + 1) // 2 * (1 if i % 2 else -1)) % n for i in range(n)]
    return [names[i] for i in (reversed(order) if back else order)]


def _let_go() -> None:
    """Free the memory of finished systems."""
    gc.collect()
    if jax.default_backend() == "gpu" and "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def _start(bench: Bench, context: int, name: str, tokens: list[list[int]]) -> System:
    options, model = bench.options, bench.model
    room = new_tokens(options) + 1
    if is_ours(name):
        engine = Engine(model, **settings(name, options, model, context))
        return Ours(engine.start(tokens, max_new_tokens=room))
    if name in LLAMA_CPP:
        from benchmarks.llama_cpp import GGUF_COPIES, LlamaCpp

        return LlamaCpp(options.gguf, name, tokens, room, GGUF_COPIES)
    from benchmarks.torch_systems import Transformers

    return Transformers(bench.other, name, tokens, room)


def _single_steps(system: System, count: int) -> list[StepTime]:
    start, times = time.monotonic(), []
    while len(times) < count:
        if time.monotonic() - start > STEP_SECONDS and len(times) >= FEWEST_STEPS:
            break
        times.append(system.step())
    return times


def _speed(bench: Bench, seconds: list[float]) -> dict[str, Any]:
    options, middle = bench.options, statistics.median(seconds)
    return {
        "tokens_per_second": options.batch * options.tokens / middle,
        "milliseconds_per_step": 1e3 * middle / options.tokens,
        "round_seconds": seconds,
    }


def _steps_entry(times: list[StepTime]) -> dict[str, Any]:
    """Return quantiles of single steps, and of Python's share of them."""
    if not times:
        return {}
    milliseconds = np.array([1e3 * one.seconds for one in times])
    flushes = [1e3 * one.seconds for one in times if one.flush]
    dispatches = [1e3 * one.dispatch for one in times if one.dispatch is not None]
    median = float(np.median(milliseconds))
    # If every step flushes, there are no spikes.
    flush = statistics.median(flushes) if 0 < len(flushes) < len(times) else None
    return {
        "single_steps": {
            "count": len(times),
            "p50_ms": median,
            "p99_ms": float(np.quantile(milliseconds, 0.99)),
            "max_ms": float(milliseconds.max()),
            "flush_ms": flush,
            "flush_over_median": flush / median if flush else None,
            "milliseconds": milliseconds.round(4).tolist(),
        },
        "dispatch_ms": statistics.median(dispatches) if dispatches else None,
    }


def _traffic(bench: Bench, name: str, system: System, context: int) -> Traffic:
    middle = context + new_tokens(bench.options) // 2
    if isinstance(system, Ours):
        return traffic_of(system.run, middle)
    theirs = offloaded_traffic if name == "transformers-offloaded" else resident_traffic
    return theirs(bench.model, bench.options.batch, middle)


def _against_floor(bench: Bench, traffic: Traffic, round_seconds: float) -> dict[str, Any]:
    """Return the least bytes and time of a step, and the share of the bandwidths achieved."""
    memory, link = bench.bandwidths
    step = round_seconds / bench.options.tokens
    floor = traffic.floor_ms(memory, link)
    return {
        "bytes_per_step": dataclasses.asdict(traffic),
        "floor_milliseconds": floor,
        "time_over_floor": 1e3 * step / floor,
        "memory_bytes_per_second": traffic.memory / step,
        "memory_share": traffic.memory / step / memory,
        "link_bytes_per_second": traffic.link / step,
        "link_share": traffic.link / step / link if link else None,
    }
