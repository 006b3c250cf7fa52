"""Part of XLA's foreign function interface that handlers written in Python need.

The structures mirror xla/ffi/api/c_api.h, which jaxlib ships. Their layout is the same in versions
0.3 (jax 0.10.2) and 0.4 (0.11) of the interface; tests/cuda/test_ffi.py compares it.

A handler receives a `Frame`: the addresses of its operands and results, XLA's stream, and one
attribute `config`, an array of int32. It runs at every launch, so its speed matters: `struct` reads
a frame several times faster than ctypes' attribute access.
"""

import ctypes
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

VERSION = (0, 3)  # of the interface; XLA supports older ones for at least a year
METADATA = 1  # type of the extension that queries a handler's version and traits
INTERNAL = 13  # error code
POINTER = ctypes.sizeof(ctypes.c_void_p)


class Header(ctypes.Structure):
    """Fields that most structures begin with."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p)]


class ApiVersion(Header):
    """XLA_FFI_Api_Version: version of the interface."""

    _fields_ = [("major_version", ctypes.c_int), ("minor_version", ctypes.c_int)]


class Extension(ctypes.Structure):
    """XLA_FFI_Extension_Base: header of an extension, linked to the next one."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p)]


class Metadata(ctypes.Structure):
    """XLA_FFI_Metadata: version and traits of a handler."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("api_version", ApiVersion),
        ("traits", ctypes.c_uint32),
    ]


class MetadataExtension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension: request for the metadata of a handler."""

    _fields_ = [("extension_base", Extension), ("metadata", ctypes.POINTER(Metadata))]


class Buffer(Header):
    """XLA_FFI_Buffer: dtype, shape and address of an operand or result."""

    _fields_ = [
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]


class Array(ctypes.Structure):
    """An attribute that is an array."""

    _fields_ = [("dtype", ctypes.c_int), ("size", ctypes.c_size_t), ("data", ctypes.c_void_p)]


class Values(Header):
    """Operands or results: pointers to buffers."""

    _fields_ = [("size", ctypes.c_int64), ("types", ctypes.c_void_p), ("values", ctypes.c_void_p)]


class Attributes(Header):
    """XLA_FFI_Attrs: types, names and values of the attributes."""

    _fields_ = [
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("attrs", ctypes.c_void_p),
    ]


class CallFrame(Header):
    """XLA_FFI_CallFrame: arguments of a handler's call."""

    _fields_ = [
        ("api", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("args", Values),
        ("rets", Values),
        ("attrs", Attributes),
    ]


class ErrorCreate(Header):
    """XLA_FFI_Error_Create_Args: message and code of an error."""

    _fields_ = [("message", ctypes.c_char_p), ("errc", ctypes.c_int)]


class StreamGet(Header):
    """XLA_FFI_Stream_Get_Args: context of a call, and its stream as the result."""

    _fields_ = [("ctx", ctypes.c_void_p), ("stream", ctypes.c_void_p)]


class Api(Header):
    """XLA's table of functions, in part."""

    _fields_ = [
        ("api_version", ApiVersion),
        ("internal_api", ctypes.c_void_p),
        ("error_create", ctypes.c_void_p),
        ("error_get_message", ctypes.c_void_p),
        ("error_destroy", ctypes.c_void_p),
        ("handler_register", ctypes.c_void_p),
        ("stream_get", ctypes.c_void_p),
    ]


def _reader(*offsets: int) -> struct.Struct:
    """Return a reader of the 64-bit words at these ascending offsets."""
    layout, end = "<", 0
    for offset in offsets:
        layout += f"{offset - end}xQ"
        end = offset + 8
    return struct.Struct(layout)


_frame = _reader(
    CallFrame.extension_start.offset,
    CallFrame.api.offset,
    CallFrame.ctx.offset,
    CallFrame.args.offset + Values.size.offset,
    CallFrame.args.offset + Values.values.offset,
    CallFrame.rets.offset + Values.size.offset,
    CallFrame.rets.offset + Values.values.offset,
    CallFrame.attrs.offset + Attributes.size.offset,
    CallFrame.attrs.offset + Attributes.attrs.offset,
)
_FrameBytes = ctypes.c_char * _frame.size
_Words = [ctypes.c_uint64 * n for n in range(33)]
_CreateError = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_GetStream = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
stream_getters: dict[int, Any] = {}  # keyed by the address of XLA's table of functions
_kept: list[Any] = []  # keeps callbacks of programs from being collected


class Frame(NamedTuple):
    """One call of a handler.

    Attributes:
        api: address of XLA's table of functions.
        context: execution context of this call, an argument of those functions.
        operands, results: addresses of `Buffer`s.
        config: address of the attribute's first int32.
    """

    api: int
    context: int
    operands: ctypes.Array
    results: ctypes.Array
    config: int
    config_size: int

    def stream(self) -> int:
        """The CUDA stream of this call."""
        get = stream_getters.get(self.api)
        if get is None:
            get = _GetStream(Api.from_address(self.api).stream_get or 0)
            stream_getters[self.api] = get
        request = StreamGet(ctypes.sizeof(StreamGet), None, self.context, None)
        if get(ctypes.addressof(request)):
            raise RuntimeError("this platform has no stream")
        return request.stream or 0


def read_frame(address: int) -> Frame:
    """Read the frame at an address; its only attribute, if any, is `config`."""
    _, api, context, operands, operand_list, results, result_list, attributes, attribute_list = (
        _frame.unpack_from(_FrameBytes.from_address(address))
    )
    config = size = 0
    if attributes:
        (attribute,) = _Words[1].from_address(attribute_list)
        _, size, config = _Words[3].from_address(attribute)
    return Frame(
        api,
        context,
        _Words[operands].from_address(operand_list) if operands else _Words[0](),
        _Words[results].from_address(result_list) if results else _Words[0](),
        config,
        size,
    )


def register(name: str, handler: Callable[[Frame], None], platform: str = "CUDA") -> None:
    """Register `handler` as the FFI target `name`. Its exceptions become XLA errors.

    It declares no traits, so calls stay outside CUDA graphs. XLA would capture each call by itself,
    and a start cannot be captured without its wait in the same graph.
    """

    def entry(address: int) -> int | None:
        try:
            extension = _Words[2].from_address(address)[1]
            if extension and Extension.from_address(extension).type == METADATA:
                _answer(extension)
                return None
            handler(read_frame(address))
        except BaseException as error:
            return _error(address, f"{name}: {error}")
        return None

    function = _HANDLER(entry)
    _kept.append(function)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform=platform)


def _answer(extension: int) -> None:
    metadata = MetadataExtension.from_address(extension).metadata.contents
    metadata.api_version.major_version, metadata.api_version.minor_version = VERSION
    metadata.traits = 0


def _error(address: int, message: str) -> int | None:
    """Make an error that XLA takes ownership of; return None if that is impossible."""
    api = CallFrame.from_address(address).api
    if not api:
        return None
    create = _CreateError(Api.from_address(api).error_create or 0)
    request = ErrorCreate(ctypes.sizeof(ErrorCreate), None, message.encode(), INTERNAL)
    return create(ctypes.addressof(request))
