"""A stand-in for the CUDA driver, so that handlers and transfer run on the CPU.

It records its calls in `calls`. Kernels on XLA's stream run immediately. Those on the other one
run only when XLA's stream waits for them: a program that reads their results too early, or frees
their operands, gets garbage. The kernels themselves are the emulation's.
"""

import collections
import ctypes
import functools
from collections.abc import Callable
from typing import Any

import jax
from cuda_emulation import emulated_kernels

from infinigen_jax.cuda.driver import SIGNATURES, Driver
from infinigen_jax.cuda.ffi import Frame
from infinigen_jax.cuda.launch import KERNELS, Launcher

XLA_STREAM, CONTEXT, MODULE, TRANSFER_STREAM = 7, 100, 200, 300
FIRST_FUNCTION, FIRST_EVENT = 1000, 2000
PARAMETERS = {"gather_rows": 9, "gather_rows_hot": 14, "select_rows": 13, "replace_entries": 17}
PARAMETERS |= {"index_scores": 8, "index_rest": 18, "attend_rows": 11}


class Function:
    """A function of the library; takes the attributes that ctypes' functions have."""

    argtypes: Any = None
    restype: Any = None

    def __init__(self, body: Callable[..., int]):
        self.body = body

    def __call__(self, *arguments: Any) -> int:
        return self.body(*arguments)


class FakeCuda:
    """The library.

    Attributes:
        calls: names and arguments, in order.
        failing: names of functions that fail.
        kernel: called with name, blocks, threads, address of the parameters' addresses.
    """

    def __init__(self, kernel: Callable[[str, int, int, int], None]):
        self.calls: list[tuple[str, tuple]] = []
        self.failing: set[str] = set()
        self.kernel = kernel
        self.queue: list[Callable[[], None]] = []
        self.recorded: dict[int, list[Callable[[], None]]] = {}  # the work before each event
        self.events = 0
        self.current = 0
        for name in SIGNATURES:
            setattr(self, name, Function(self._recorded(name)))

    def _recorded(self, name: str) -> Callable[..., int]:
        def body(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name in self.failing:
                return 1
            getattr(self, f"_{name}", lambda *_: None)(*arguments)
            return 0

        return body

    def names(self) -> list[str]:
        return [name for name, _ in self.calls if name != "cuCtxGetCurrent"]

    def kernels(self) -> collections.Counter[str]:
        """How often each kernel was launched."""
        launched = [args[0] for name, args in self.calls if name == "cuLaunchKernel"]
        return collections.Counter(KERNELS[function - FIRST_FUNCTION] for function in launched)

    def _cuGetErrorString(self, code: int, text: int) -> None:
        ctypes.c_char_p.from_address(text).value = b"invalid argument"

    def _cuDeviceGetAttribute(self, out: int, attribute: int, device: int) -> None:
        ctypes.c_int.from_address(out).value = 9 if attribute == 75 else 0

    def _cuDevicePrimaryCtxRetain(self, out: int, device: int) -> None:
        _put(out, CONTEXT)

    def _cuCtxGetCurrent(self, out: int) -> None:
        _put(out, self.current)

    def _cuCtxSetCurrent(self, context: int) -> None:
        self.current = context

    def _cuCtxGetDevice(self, out: int) -> None:
        ctypes.c_int.from_address(out).value = 0

    def _cuStreamGetCtx(self, stream: int, out: int) -> None:
        assert stream == XLA_STREAM
        _put(out, CONTEXT)

    def _cuModuleLoadData(self, out: int, image: bytes) -> None:
        assert image == b"code for 90" and self.current == CONTEXT
        _put(out, MODULE)

    def _cuModuleGetFunction(self, out: int, module: int, name: bytes) -> None:
        _put(out, FIRST_FUNCTION + KERNELS.index(name.decode()))

    def _cuStreamCreateWithPriority(self, out: int, flags: int, priority: int) -> None:
        _put(out, TRANSFER_STREAM)

    def _cuEventCreate(self, out: int, flags: int) -> None:
        self.events += 1
        _put(out, FIRST_EVENT + self.events)

    def _cuEventRecord(self, event: int, stream: int) -> None:
        if stream == TRANSFER_STREAM:
            self.recorded[event] = list(self.queue)

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        if stream == XLA_STREAM:
            for work in self.recorded.get(event, []):
                if work in self.queue:
                    self.queue.remove(work)
                    work()

    def _cuLaunchKernel(self, function: int, *arguments: Any) -> None:
        blocks, _, _, threads, _, _, _, stream, parameters, _ = arguments
        name = KERNELS[function - FIRST_FUNCTION]
        count = PARAMETERS[name.rstrip("_0123456789")]
        # The driver copies the parameters before it returns.
        values = [
            ctypes.c_uint64.from_buffer_copy(ctypes.string_at(address, 8))
            for address in (ctypes.c_void_p * count).from_address(parameters)
        ]

        def work() -> None:
            copied = (ctypes.c_void_p * count)(*map(ctypes.addressof, values))
            self.kernel(name, blocks, threads, ctypes.addressof(copied))

        if stream == XLA_STREAM:
            work()
        else:
            self.queue.append(work)


class FakeLauncher(Launcher):
    """On the CPU XLA has no stream to tell."""

    def stream(self, frame: Frame) -> int:
        return XLA_STREAM


def _put(address: int, value: int) -> None:
    ctypes.c_void_p.from_address(address).value = value


def install(kernel: Callable[[str, int, int, int], None]) -> FakeCuda:
    """Register the handlers for the CPU, on a driver that runs kernels by `kernel`."""
    fake = FakeCuda(kernel)
    launcher = FakeLauncher(Driver(fake), lambda architecture: f"code for {architecture}".encode())
    launcher.register(jax.default_backend())
    return fake


@functools.cache
def emulated() -> FakeCuda:
    """The driver whose kernels are the emulation's. XLA keeps one set of handlers a process."""
    emulator = emulated_kernels()
    return install(
        lambda name, blocks, threads, parameters: emulator.launch(
            name, blocks, min(threads, 64), parameters, 1
        )
    )
