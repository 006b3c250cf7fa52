"""What the handlers of the kernels cost on the host: microseconds for each call.

    JAX_PLATFORMS=cpu python -m benchmarks.ffi_handler [--layers N]

XLA calls a start and a wait for every layer that fetches, and launches kernels in line: scores,
selection, the plan of the hot set and the tail's scores. All on the thread that enqueues the step.
The driver is a stand-in whose functions do nothing, so that the handlers' own time shows; the real
one's calls come on top.
Prints a line for each handler, and what they make for a step.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import machine
from benchmarks.files import RESULTS, write_json
from infinigen_jax.cuda import ffi, scoring
from infinigen_jax.cuda.calls import Gather, await_gather, start_gather
from infinigen_jax.cuda.driver import Driver
from infinigen_jax.cuda.launch import KERNELS, Device, Launcher

CALLS = 256  # in one compiled function
REPEATS = 30
IN_LINE = 4  # launches of a layer as it comes


NOTHING = "pthread_getconcurrency"  # of libc: whatever it is given, returns 0 at once


class Idle:
    """A library of functions that do nothing."""

    def __getattr__(self, name: str) -> Any:
        function = ctypes.PyDLL(None)[NOTHING]  # a new object each time: it keeps argument types
        setattr(self, name, function)
        return function


class IdleLauncher(Launcher):
    """Knows one device, whose context is always the current one."""

    def __init__(self):
        super().__init__(Driver(Idle()), lambda architecture: b"")
        self.streams[0] = Device(0, (0,) * len(KERNELS), 0, 0, 0)

    def stream(self, frame: ffi.Frame) -> int:
        # The CPU has no stream to tell; asking costs as much.
        ffi.stream_getters[frame.api] = _get_stream
        return frame.stream()


_get_stream = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)((NOTHING, ctypes.PyDLL(None)))


def start_and_wait(count: int, both: bool) -> Callable[..., Any]:
    """A compiled function of `count` starts, each with its wait if `both`."""

    def many(host: Any, slots: Any, counts: Any, hot: Any, entry: Any, miss: Any) -> Any:
        for layer in range(count):
            gather = start_gather(
                *(host, jnp.int32(layer), slots, counts, hot, entry, miss), blocks=16, threads=512
            )
            assert isinstance(gather, Gather)
            hot = await_gather(gather)[1] if both else gather.hot
        return hot

    return jax.jit(many)


def in_line(count: int) -> Callable[..., Any]:
    """A compiled function of `count` launches, of the kernel with most parameters but one."""

    def many(index: Any, slots: Any, counts: Any) -> Any:
        query = jnp.zeros((1, 2, 1, 2))
        for _ in range(count):
            query = scoring.index_rest(
                *(query, index, 4, jnp.zeros(1, jnp.int32), slots, counts), 2, 4, 32
            ).score
        return query

    return jax.jit(many)


def microseconds(function: Callable[..., Any], arguments: tuple) -> float:
    """Least wall time of a call."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - begin)
    return min(times[1:]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the handlers.")
    parser.add_argument("--layers", type=int, default=30, help="that fetch, in a step")
    parser.add_argument("--json", type=Path, default=RESULTS / "ffi-handler.json")
    options = parser.parse_args()
    layers = options.layers
    IdleLauncher().register("cpu")
    shape = (1, 2, 3)
    slots = jnp.zeros(shape, jnp.int32)
    arguments = (
        jnp.zeros((1, 1, 2, 8, 8)),
        slots,
        jnp.zeros((1, 2), jnp.int32),
        jnp.zeros((1, 2, 4, 8)),
        slots,
        slots > 0,
    )
    one = microseconds(start_and_wait(1, both=True), arguments)
    starts = (microseconds(start_and_wait(CALLS, both=False), arguments) - one) / CALLS
    pairs = (microseconds(start_and_wait(CALLS, both=True), arguments) - one) / CALLS
    scored = jnp.zeros((1, 2, 2, 128), jnp.uint32), slots, arguments[2]
    launches = microseconds(in_line(CALLS), scored) - microseconds(in_line(1), scored)
    launches /= CALLS - 1
    step = (pairs + IN_LINE * launches) * layers / 1e3
    print(f"start: {starts:.2f} us\nwait:  {pairs - starts:.2f} us\nlaunch: {launches:.2f} us")
    print(f"{layers} layers: {step:.3f} ms a step, without the driver's own time")
    result = {"start_us": starts, "wait_us": pairs - starts, "launch_us": launches}
    result |= {"layers": layers, "step_ms": step}
    write_json(options.json, {"benchmark": "ffi_handler", "machine": machine.describe()} | result)


if __name__ == "__main__":
    main()
