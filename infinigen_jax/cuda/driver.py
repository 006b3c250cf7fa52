"""The part of the CUDA driver API that launches a kernel on a stream, through ctypes."""

import ctypes
from typing import Any

HANDLE = ctypes.c_void_p
OUT = ctypes.c_void_p  # address of the call's result
INT = ctypes.c_int
UINT = ctypes.c_uint

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (UINT,),
    "cuDriverGetVersion": (OUT,),
    "cuDeviceGetAttribute": (OUT, INT, INT),
    "cuDevicePrimaryCtxRetain": (OUT, INT),
    "cuCtxGetCurrent": (OUT,),
    "cuCtxSetCurrent": (HANDLE,),
    "cuCtxGetDevice": (OUT,),
    "cuCtxGetStreamPriorityRange": (OUT, OUT),
    "cuModuleLoadData": (OUT, ctypes.c_char_p),
    "cuModuleGetFunction": (OUT, HANDLE, ctypes.c_char_p),
    "cuStreamCreateWithPriority": (OUT, UINT, INT),
    "cuStreamGetCtx": (HANDLE, OUT),
    "cuEventCreate": (OUT, UINT),
    "cuEventRecord": (HANDLE, HANDLE),
    "cuStreamWaitEvent": (HANDLE, HANDLE, UINT),
    "cuLaunchKernel": (HANDLE, *[UINT] * 7, HANDLE, ctypes.c_void_p, ctypes.c_void_p),
    "cuGetErrorString": (INT, OUT),
}
NON_BLOCKING_STREAM = 1  # does not wait for the legacy default stream
NO_TIMING = 2  # flag of an event
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76  # device attributes


class CudaError(RuntimeError):
    """A call to the driver failed."""


class Driver:
    """Functions of libcuda as methods; all raise CudaError.

    Handles are integers. Calls keep Python's GIL: each is short, and releasing it five times per
    launch would let other threads delay the launch five times.
    """

    def __init__(self, library: Any = None):
        """Load the library.

        Raises:
            OSError: no driver is installed.
        """
        self.library = ctypes.PyDLL("libcuda.so.1") if library is None else library
        for name, types in SIGNATURES.items():
            function = getattr(self.library, name)
            function.argtypes, function.restype = types, INT
        self.event_record = self.library.cuEventRecord
        self.stream_wait_event = self.library.cuStreamWaitEvent
        self.launch_kernel = self.library.cuLaunchKernel

    def call(self, name: str, *arguments: Any) -> None:
        """Call a driver function by name."""
        self.check(getattr(self.library, name)(*arguments), name)

    def check(self, code: int, name: str) -> None:
        """Raise CudaError for a code other than success."""
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(code, ctypes.addressof(text))
            reason = text.value.decode() if text.value else "unknown error"
            raise CudaError(f"{name}: {reason} (CUDA error {code})")

    def get(self, name: str, *arguments: Any, kind: Any = HANDLE) -> int:
        """Call a function whose first parameter receives its result; return the result."""
        result = kind()
        self.call(name, ctypes.addressof(result), *arguments)
        return result.value or 0

    def compute_capability(self, device: int) -> int:
        """Return the compute capability of a device: 90 for 9.0."""
        major, minor = (
            self.get("cuDeviceGetAttribute", attribute, device, kind=INT)
            for attribute in (COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR)
        )
        return 10 * major + minor

    def enter(self, context: int) -> None:
        """Make a context current in the calling thread, unless it is already."""
        if self.get("cuCtxGetCurrent") != context:
            self.call("cuCtxSetCurrent", context)

    def context_of(self, stream: int) -> int:
        """Return the context of a stream."""
        context = HANDLE()
        self.call("cuStreamGetCtx", stream, ctypes.addressof(context))
        return context.value or 0
