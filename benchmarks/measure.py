"""Measurement of one context: systems that fit in memory together take turns, round by round.

A wave is a set of systems in memory at the same time. They take turns so that other load on the
machine affects all alike. The timing has these parts, in this order:

    rounds     consecutive tokens, as in a generation: throughput
    steps      single tokens, with the device idle before each: spikes, and Python's overhead
    trace      a few consecutive tokens under the profiler: breakdown of the time

Times have a lower bound, the bytes that a step moves divided by the bandwidths.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from benchmarks import shapes, trace
from benchmarks.machine import note
from benchmarks.systems import FEWEST_STEPS, LLAMA_CPP, Ours, System, is_ours, new_tokens, settings
from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.generation import Run
from infinigen_jax.engine.memory_plan import MemoryPlan, plan_cache, shortage, step_bytes
from infinigen_jax.engine.prompts import capacity_for
from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.texts import common_length
from infinigen_jax.loading.load import Model
from infinigen_jax.machine.memory_limits import tree_bytes
from infinigen_jax.planner.traffic import Traffic
from infinigen_jax.programs.compilations import compilations

EXACT = ("transformers", "transformers-static", "full-device", "full-streamed")  # equal tokens
STEP_SECONDS = 10.0  # limit of a system's single steps
ROOM = 0.8  # share of the free memory for a wave, whose systems are estimated without the prompt


@dataclasses.dataclass(frozen=True)
class Bench:
    """Values that are the same for every context."""

    options: argparse.Namespace
    model: Model
    other: Any  # transformers' model with the same weights, if one of its systems is measured
    bandwidths: tuple[float, float | None]  # bytes per second: memory, host to device
    deadline: float  # on `time.monotonic`; no measurement starts after it

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline


def measure_context(bench: Bench, context: int) -> Iterator[dict[str, Any]]:
    """Yield the result of one prompt length, for all systems so far, after every wave."""
    options = bench.options
    needs, absent = needs_of(bench, context)
    result: dict[str, Any] = {"context": context, "waves": [], "systems": absent}
    tokens = shapes.prompts(bench.model, context, options.batch, options.text)
    reference: list[int] = []
    for names in waves_of(needs, functools.partial(fits, bench)):
        result["waves"].append(names)
        for entries in _measure_wave(bench, context, names, tokens, reference):
            result["systems"] |= entries
            yield result
        gc.collect()  # frees the memory of finished systems
        if jax.default_backend() == "gpu" and "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()
    done = result["systems"]
    result["systems"] = {name: done[name] for name in options.systems if name in done}
    yield result


def fits(bench: Bench, plan: MemoryPlan) -> bool:
    """Return whether systems fit together; JAX does not know what PyTorch has taken."""
    if bench.other is not None and jax.default_backend() == "gpu":
        if plan.device > ROOM * sys.modules["torch"].cuda.mem_get_info()[0]:
            return False
    return shortage(plan, jax.devices()[0], ROOM) is None


def needs_of(bench: Bench, context: int) -> tuple[dict[str, MemoryPlan], dict[str, Any]]:
    """Return the memory of each system that can run, and the reasons why others cannot."""
    options, model = bench.options, bench.model
    total = context + new_tokens(options) + 1
    needs: dict[str, MemoryPlan] = {}
    absent: dict[str, Any] = {}
    for name in options.systems:
        if name == "transformers-offloaded" and jax.default_backend() != "gpu":
            reason = "transformers offloads to the host from CUDA only"
            absent[name] = {"absent": "skipped", "reason": reason}
        elif is_ours(name):
            try:
                engine = Engine(model, **settings(name, options, model, context))
            except InputError as error:
                absent[name] = {"absent": "refused", "reason": str(error)}
                continue
            sizes = options.batch, capacity_for(engine.decoder, total)
            plan = plan_cache(engine.decoder, *sizes)
            work = step_bytes(engine.decoder, engine.runtime.weights.params, *sizes)
            needs[name] = plan.at_work(work)
        else:
            rows = cache_bytes(model, options.batch, total)
            layers = 2 * rows // model.config.num_layers  # two: one is copied to append a token
            host = rows if name == "transformers-offloaded" else 0
            work = 0 if name == "transformers-static" else layers
            needs[name] = MemoryPlan(host, rows - host, 0, 0, 0, 0, workspace=work)
    return needs, absent


def waves_of(needs: Mapping[str, Any], fits: Callable[[Any], bool]) -> list[list[str]]:
    """Group systems in their order, as many as fit together, at least one per wave."""
    waves: list[list[str]] = []
    total: Any = None
    for name, need in needs.items():
        if waves and fits(total + need):
            waves[-1].append(name)
            total += need
        else:
            waves.append([name])
            total = need
    return waves


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
                entries[name] = {"absent": kind, "reason": reason}

    for name in names:
        if bench.late:
            entries[name] = {"absent": "skipped", "reason": "no time was left"}
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
        # Weights of other systems, and llama.cpp's cache, may have other sizes.
        known = is_ours(name) or not (options.weight_dtype or name in LLAMA_CPP)
        generation = system.run if isinstance(system, Ours) else None
        middle = context + new_tokens(options) // 2
        traffic = traffic_of(name, bench.model, options.batch, middle, generation)
        entries[name] = _speed(bench, seconds[name], traffic if known else None) | system.facts()
        entries[name]["compilations_after_warmup"] = compiled
    yield entries
    for name, system in list(systems.items()):
        note(f"{context} tokens: {name}, single steps")
        with reported(name):
            if not bench.late:
                entries[name] |= _single_steps(system, options.steps)
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


def _start(bench: Bench, context: int, name: str, tokens: list[list[int]]) -> System:
    options, model = bench.options, bench.model
    room = new_tokens(options) + 1
    if is_ours(name):
        engine = Engine(model, **settings(name, options, model, context))
        return Ours(engine.start(tokens, max_new_tokens=room))
    if name in LLAMA_CPP:
        from benchmarks.llama_cpp import LlamaCpp

        return LlamaCpp(options.gguf, name, tokens, room)
    from benchmarks.torch_systems import Transformers

    return Transformers(bench.other, name, tokens, room)


def _single_steps(system: System, count: int) -> dict[str, Any]:
    """Measure single steps; return quantiles, and the median of Python's share."""
    end, times = time.monotonic() + STEP_SECONDS, []
    while len(times) < count and (len(times) < FEWEST_STEPS or time.monotonic() < end):
        times.append(system.step())
    milliseconds = 1e3 * np.array([one.seconds for one in times])
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


def _speed(bench: Bench, seconds: list[float], traffic: Traffic | None) -> dict[str, Any]:
    """Return the speed of rounds; if the traffic is known, also the least time and its share."""
    options, (memory, link) = bench.options, bench.bandwidths
    middle = statistics.median(seconds)
    step = middle / options.tokens
    entry = {
        "tokens_per_second": options.batch * options.tokens / middle,
        "milliseconds_per_step": 1e3 * step,
        "round_seconds": seconds,
    }
    if traffic is None:
        return entry
    floor = traffic.floor_ms(memory, link)
    return entry | {
        "bytes_per_step": dataclasses.asdict(traffic),
        "floor_milliseconds": floor,
        "time_over_floor": 1e3 * step / floor,
        "memory_bytes_per_second": traffic.memory / step,
        "memory_share": traffic.memory / step / memory,
        "link_bytes_per_second": traffic.link / step,
        "link_share": traffic.link / step / link if link else None,
    }


def traffic_of(
    name: str, model: Model, batch: int, context: int, run: Run | None = None
) -> Traffic:
    """Return the bytes that a step moves at `context` tokens per sequence; ours are of a run."""
    if run is None:
        rows = cache_bytes(model, batch, context)
        if name == "transformers-offloaded":  # the whole cache comes from the host
            return Traffic(weight_bytes(model), 0, 0, attended=rows, link=rows)
        return Traffic(weight_bytes(model), rows, 0, 0, 0)
    plan, stats = run.plan, run.stats()
    rows = plan.host_cache / run.capacity * context  # in their stored format
    return Traffic(
        weights=weight_bytes(run.runtime.model) + tree_bytes(run.runtime.weights.policy),
        device_cache=plan.dense_cache * context // run.capacity,
        index=plan.index * context // run.capacity,
        attended=int(rows * stats.selected_fraction),
        link=int(rows * stats.fetched_fraction) if run.decoder.host_layers else 0,
    )


def weight_bytes(model: Model) -> int:
    """Return the bytes read per token: all weights, with one row of the embedding table."""
    head = model.params["embedding"]["tokens" if model.config.tie_embeddings else "head"]
    return tree_bytes((model.params["layers"], head))


def cache_bytes(model: Model, batch: int, context: int) -> int:
    """Return the bytes of keys and values of all layers, in the model's dtype."""
    widths = (model.config.of(layer).row_width for layer in range(model.config.num_layers))
    return batch * context * sum(widths) * model.dtype.itemsize
