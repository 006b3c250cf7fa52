"""Launches of the kernels from XLA's programs, through three FFI targets.

`infinigen_launch` runs a kernel on XLA's stream, unless XLA launches it itself (embed.py).
`infinigen_start` and `infinigen_wait` run it concurrently with XLA's work:

    XLA's stream      ... speculation | attention, MLP ...     | wait(finished) | next layer ...
                                      v started                ^ finished
    transfer stream                   | gather ............... |

No host thread waits. A wait covers all starts before it. The attribute `config` of a call holds the
kernel's index in KERNELS, blocks, threads, and the kernel's integers; a wait ignores it. The call's
operands and results, in order, are the kernel's pointers.
"""

import ctypes
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from infinigen_jax.cuda import ffi
from infinigen_jax.cuda.driver import NO_TIMING, NON_BLOCKING_STREAM, Driver
from infinigen_jax.cuda.nvrtc import CompileError
from infinigen_jax.errors import one_line

logger = logging.getLogger(__name__)

KERNELS = (
    *("gather_rows", "gather_rows_hot", "select_rows", "replace_entries_16", "replace_entries_32"),
    *("index_scores", "index_rest", "attend_rows"),
)
LAUNCH, START, WAIT = "infinigen_launch", "infinigen_start", "infinigen_wait"
HEADER = 3  # integers of `config` before the kernel's arguments

embedded: Callable[..., Any] | None = None
"""Traces a launch on XLA's stream into XLA's program (embed.py); None: a handler launches."""

_DATA = ffi.Buffer.data.offset
_Parameters = [ctypes.c_void_p * n for n in range(33)]
_Header = ctypes.c_int32 * HEADER


@dataclasses.dataclass(frozen=True)
class Device:
    """Handles of one GPU, in its primary context, which XLA uses too.

    One event serves all starts, and another all ends. Recording an event again moves it to a later
    point of the same in-order stream, so a wait never waits for too little. A wait binds to the
    record that precedes it, not to later ones.
    """

    context: int
    functions: tuple[int, ...]
    stream: int
    started: int
    finished: int


class Launcher:
    """Handlers of the three FFI targets.

    Args:
        image: returns the kernels' machine code for an architecture (90 for sm_90).
    """

    def __init__(self, driver: Driver, image: Callable[[int], bytes]):
        self.driver = driver
        self.image = image
        self.devices: dict[int, Device] = {}  # keyed by context
        self.streams: dict[
            int, Device
        ] = {}  # keyed by XLA's stream, which lives as long as its client

    def register(self, platform: str = "CUDA") -> None:
        """Register the handlers with XLA."""
        for name, handler in ((LAUNCH, self.launch), (START, self.start), (WAIT, self.wait)):
            ffi.register(name, handler, platform)

    def prepare(self, ordinal: int) -> Device:
        """Load the kernels into a GPU before the first call.

        Raises:
            CudaError, OSError, CompileError: the kernels cannot be loaded.
        """
        driver = self.driver
        driver.call("cuInit", 0)
        context = driver.get("cuDevicePrimaryCtxRetain", ordinal)
        if context in self.devices:
            return self.devices[context]
        image = self.image(driver.compute_capability(ordinal))
        previous = driver.get("cuCtxGetCurrent")
        driver.enter(context)
        try:
            module = driver.get("cuModuleLoadData", image)
            least, greatest = ctypes.c_int(), ctypes.c_int()
            driver.call(
                "cuCtxGetStreamPriorityRange", ctypes.addressof(least), ctypes.addressof(greatest)
            )
            device = Device(
                context,
                tuple(driver.get("cuModuleGetFunction", module, k.encode()) for k in KERNELS),
                # Highest priority: a transfer's few blocks must not queue after the many blocks of
                # a matrix product.
                driver.get("cuStreamCreateWithPriority", NON_BLOCKING_STREAM, greatest.value),
                driver.get("cuEventCreate", NO_TIMING),
                driver.get("cuEventCreate", NO_TIMING),
            )
        finally:
            driver.call("cuCtxSetCurrent", previous)
        self.devices[context] = device
        return device

    def launch(self, frame: ffi.Frame) -> None:
        """FFI target: run a kernel on XLA's stream."""
        stream = self.stream(frame)
        self._launch(frame, self._device(stream), stream)

    def start(self, frame: ffi.Frame) -> None:
        """FFI target: run a kernel on the transfer stream, after XLA's stream so far."""
        stream, driver = self.stream(frame), self.driver
        device = self._device(stream)
        driver.check(driver.event_record(device.started, stream), "cuEventRecord")
        driver.check(
            driver.stream_wait_event(device.stream, device.started, 0), "cuStreamWaitEvent"
        )
        self._launch(frame, device, device.stream)
        driver.check(driver.event_record(device.finished, device.stream), "cuEventRecord")

    def wait(self, frame: ffi.Frame) -> None:
        """FFI target: let XLA's stream wait for all earlier starts."""
        stream = self.stream(frame)
        device = self._device(stream)
        code = self.driver.stream_wait_event(stream, device.finished, 0)
        self.driver.check(code, "cuStreamWaitEvent")

    def stream(self, frame: ffi.Frame) -> int:
        """Return XLA's stream of a call."""
        return frame.stream()

    def _device(self, stream: int) -> Device:
        """Return the device of a stream and make its context current."""
        device = self.streams.get(stream)
        if device is None:
            context = self.driver.context_of(stream)
            if context not in self.devices:
                self.driver.enter(context)
                self.prepare(self.driver.get("cuCtxGetDevice", kind=ctypes.c_int))
            device = self.streams[stream] = self.devices[context]
        self.driver.enter(device.context)
        return device

    def _launch(self, frame: ffi.Frame, device: Device, stream: int) -> None:
        kernel, blocks, threads = _Header.from_address(frame.config)
        integers = range(frame.config + 4 * HEADER, frame.config + 4 * frame.config_size, 4)
        # The driver takes the address of each parameter: pointers in XLA's buffers, and integers
        # in the attribute.
        values = [b + _DATA for b in frame.operands]
        values += [b + _DATA for b in frame.results]
        values += integers
        parameters = _Parameters[len(values)](*values)
        code = self.driver.launch_kernel(
            device.functions[kernel],
            *(blocks, 1, 1, threads, 1, 1, 0),
            stream,
            ctypes.addressof(parameters),
            None,
        )
        self.driver.check(code, "cuLaunchKernel")


def call(
    target: str,
    operands: tuple[jax.Array, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
    aliases: dict[int, int],
    kernel: str = "",
    grid: tuple[int, int] = (0, 0),
    integers: tuple[int, ...] = (),
) -> Any:
    """Trace a call of an FFI target.

    Args:
        target: LAUNCH, START or WAIT; WAIT takes neither kernel, grid nor integers.
        aliases: operand index -> index of the result that updates it in place.
        grid: number of blocks, and of threads per block.
    """
    global embedded
    if target == LAUNCH and embedded is not None:
        try:
            return embedded(kernel, operands, results, aliases, grid, integers)
        except (CompileError, OSError) as error:
            logger.warning(
                "kernel %s: %s; handlers launch the kernels", kernel, one_line(str(error))
            )
            embedded = None
    config = (KERNELS.index(kernel), *grid, *integers) if kernel else (0,)
    target_call = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
    return target_call(*operands, config=np.array(config, np.int32))
