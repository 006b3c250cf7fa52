"""FFI targets that do nothing, for programs that call kernels of their own."""

import ctypes

import jax
from compile_for_gpu import load_compiler


def register_placeholder(*targets: str) -> None:
    """Register FFI targets for CUDA which do nothing, so that calls to them compile.

    The compiler wants to know every custom call's handler. With this, a program that uses a CUDA
    kernel through jax.ffi can be compiled where the kernel itself cannot be built.
    """
    load_compiler()  # it owns the registry
    for target in targets:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(_DO_NOTHING), platform="CUDA")


class _Extension(ctypes.Structure):
    pass


_Extension._fields_ = [
    ("size", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("next", ctypes.POINTER(_Extension)),
]


class _Metadata(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("version_size", ctypes.c_size_t),
        ("version_extension", ctypes.c_void_p),
        ("version_major", ctypes.c_int),
        ("version_minor", ctypes.c_int),
        ("traits", ctypes.c_uint32),
    ]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("base", _Extension), ("metadata", ctypes.POINTER(_Metadata))]


class _CallFrame(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("extension", ctypes.POINTER(_Extension))]


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
def _DO_NOTHING(frame):
    extension = frame.contents.extension
    if extension and extension.contents.type == 1:  # a query for metadata, made on registration
        query = ctypes.cast(extension, ctypes.POINTER(_MetadataExtension)).contents
        answer = query.metadata.contents
        answer.version_major, answer.version_minor, answer.traits = 0, 1, 0
    return None
