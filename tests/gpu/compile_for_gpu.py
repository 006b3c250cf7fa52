"""Compile a JAX function for an NVIDIA GPU on a machine that has none, and inspect the result.

JAX's CUDA plugin contains the whole compiler. Given a description of a GPU it compiles "for" that
GPU without a driver, and the optimised HLO that comes out is the program a real H200 would run:
which operations copy the KV cache, where the transfers start and end, what is updated in place,
how much temporary memory is needed in device memory and in pinned host memory. It says nothing
about speed: nothing is executed.

Packages, on top of the ordinary (CPU) `jax`; measured with jax 0.10.2 on Python 3.11:

    pip install jax-cuda12-plugin==<version of jax> nvidia-cuda-nvcc-cu12

    jax-cuda12-plugin      8 MB to download,  20 MB installed
    jax-cuda12-pjrt      167 MB             458 MB            (comes with the plugin)
    nvidia-cuda-nvcc-cu12 39 MB              95 MB            (ptxas and libdevice)

That is all: no driver, no toolkit, no cuDNN, no cuBLAS. In particular not `jax[cuda12]`, which is
5 GB. With CUDA 13 (jax 0.11 and newer): jax-cuda13-plugin and nvidia-cuda-nvcc, which brings
nvidia-nvvm; 257 MB to download, 726 MB installed.

Put these in a virtual environment of their own, and run with JAX_PLATFORMS=cpu: without that,
JAX tries the plugin, prints a traceback about the missing driver and carries on with the CPU.

    from compile_for_gpu import compile_for_gpu, on_device, on_host, assert_no_copy_larger_than

    program = compile_for_gpu(step, on_host(cache_shape, jnp.bfloat16), on_device((8,), jnp.int32),
                              donate_argnums=0)
    assert_no_copy_larger_than(program, 1 << 20)
    assert_updated_in_place(program, cache_bytes)
    for pair in async_pairs(program):
        print(pair.start.name, [i.name for i in pair.between])

Works with jax 0.10.2, 0.11.2 and 0.12.0.1. A few names come from jax._src, which may change; each
of them is imported in `_compile`, so that a failure is easy to place.
"""

import ctypes
import dataclasses
import functools
import importlib.util
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

HOST_SPACE = 5  # memory space of pinned host buffers in HLO layouts: "{1,0:S(5)}"

# What XLA needs to know about the GPU, as a text proto. To get one for another GPU, run any jitted
# function there with XLA_FLAGS=--xla_dump_to=DIR and take the *.gpu_target_config.pbtxt.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 }
"""


class Program(NamedTuple):
    """What came out of the compiler.

    hlo: text of the optimised module. `is_scheduled=true`: inside a computation, instructions stand
        in the order in which they are launched.
    memory: byte counts of one device: argument, output, temp, alias and the same with host_ before
        the name, for buffers in pinned host memory.
    stablehlo: the module that JAX handed to the compiler.
    """

    hlo: str
    memory: dict[str, int]
    stablehlo: str


# ------------------------------------------------------------------------------- compiling


def available() -> bool:
    """Whether the CUDA plugin is installed. Meant for pytest.mark.skipif."""
    return _cuda_version() is not None


def on_host(shape, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An argument in pinned host memory (no memory is allocated)."""
    return _abstract(shape, dtype, "pinned_host")


def on_device(shape, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An argument in device memory (no memory is allocated)."""
    return _abstract(shape, dtype, "device")


def compile_for_gpu(
    fun,
    *args,
    options: dict[str, Any] | None = None,
    target_config: str = H200,
    static: dict[str, Any] | None = None,
    **jit_options,
) -> Program:
    """Compile `fun(*args)` for a GPU.

    Args:
        fun: the function; already jitted is fine, then without `jit_options`.
        *args: pytrees of arrays or of `on_host(...)` / `on_device(...)`. For a sharded program, use
            `jax.ShapeDtypeStruct` with a NamedSharding over a mesh of CPU devices
            (XLA_FLAGS=--xla_force_host_platform_device_count=N): it is compiled for N GPUs.
        options: compiler options by name, such as
            {"xla_gpu_enable_latency_hiding_scheduler": True} or
            {"xla_disable_automatic_host_compute_offload": True}; the latter turns arithmetic and
            gathers on host memory into a compile error.
        target_config: the GPU, see H200.
        static: keyword arguments of a jitted function that are static.
        **jit_options: for jax.jit, such as donate_argnums.

    The function is traced with the CPU as the default backend (so jax.default_backend() is "cpu"
    inside it) and lowered for CUDA (so lax.platform_dependent takes the cuda branch).
    """
    jitted = fun if hasattr(fun, "trace") and not jit_options else jax.jit(fun, **jit_options)
    lowered = jitted.trace(*args, **(static or {})).lower(lowering_platforms=("cuda",))
    executable = _compile(lowered, options, target_config)
    statistics = executable.get_compiled_memory_stats()
    memory = {
        name.removesuffix("_size_in_bytes"): getattr(statistics, name)
        for name in dir(statistics)
        if name.endswith("_size_in_bytes")
    }
    return Program(executable.hlo_modules()[0].to_string(), memory, lowered.as_text())


def register_placeholder(*targets: str) -> None:
    """Register FFI targets for CUDA which do nothing, so that calls to them compile.

    The compiler wants to know every custom call's handler. With this, a program that uses a CUDA
    kernel through jax.ffi can be compiled where the kernel itself cannot be built.
    """
    _topology(H200, 1)  # load the plugin, which owns the registry
    for target in targets:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(_DO_NOTHING), platform="CUDA")


def _abstract(shape, dtype, memory_kind):
    # NamedSharding, because a ShapeDtypeStruct with a SingleDeviceSharding loses the memory space.
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("device",))
    sharding = jax.NamedSharding(mesh, jax.P(), memory_kind=memory_kind)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _cuda_version() -> int | None:
    for version in (13, 12):
        if importlib.util.find_spec(f"jax_cuda{version}_plugin"):
            return version
    return None


@functools.cache
def _topology(target_config: str, devices: int):
    from jax.experimental import topologies

    version = _cuda_version()
    if version is None:
        raise ModuleNotFoundError("install jax-cuda12-plugin or jax-cuda13-plugin")
    if "runtime_version" not in target_config:
        target_config += f"runtime_version {{ major: {version} minor: 0 patch: 0 }}\n"
    return topologies.get_topology_desc(
        platform="cuda", target_config=target_config, topology=f"1x1x{devices}"
    )


def _compile(lowered, options, target_config):
    from jax._src import compiler
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    module = lowered.compiler_ir("stablehlo")
    partitions = module.operation.attributes["mhlo.num_partitions"].value
    devices = tuple(_topology(target_config, partitions).devices)
    compile_options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=partitions,
        device_assignment=np.array([[device.id for device in devices]]),
        env_options_overrides=options,
    )
    return devices[0].client.compile(
        module, executable_devices=_jax.DeviceList(devices), compile_options=compile_options
    )


# ------------------------------------------------------------------------------- reading HLO


class Buffer(NamedTuple):
    """One array of an instruction's result."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    on_host: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation. `results` are the arrays it produces, without operands that the
    text of an asynchronous start repeats in its result type."""

    computation: str
    name: str
    opcode: str
    operands: tuple[str, ...]
    results: tuple[Buffer, ...]
    inlines: str | None  # the computation that is part of this kernel: a fusion's, a reduction's
    target: str | None  # custom_call_target
    op_name: str  # where it comes from: "jit(step)/layer2/mlp/dot_general", by jax.named_scope
    text: str

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.results)


class AsyncPair(NamedTuple):
    """A start, the work that is launched while it runs, and the done that waits for it."""

    start: Instruction
    done: Instruction
    between: tuple[Instruction, ...]


def computations(program: Program | str) -> dict[str, list[Instruction]]:
    """All computations by name, each a list of instructions in scheduled order."""
    hlo = program if isinstance(program, str) else program.hlo
    return _parse(hlo)


def schedule(program: Program | str) -> dict[str, list[Instruction]]:
    """As `computations`, but only what is launched: no fused bodies and no bookkeeping."""
    everything = computations(program)
    inlined = {i.inlines for body in everything.values() for i in body}
    return {
        name: [i for i in body if i.opcode not in _BOOKKEEPING]
        for name, body in everything.items()
        if name not in inlined
    }


def copies(program: Program | str, min_bytes: int = 0) -> list[Instruction]:
    """Every copy of at least min_bytes, inside fusions too."""
    return [
        i
        for body in computations(program).values()
        for i in body
        if i.opcode in ("copy", "copy-start") and i.nbytes >= min_bytes
    ]


def host_copies(program: Program | str, min_bytes: int = 0) -> list[Instruction]:
    """The copies that read or write pinned host memory: transfers, and host-to-host copies."""
    bodies = computations(program)

    def touches_host(copy):
        defined = {i.name: i for i in bodies[copy.computation]}
        involved = [copy] + [defined[name] for name in copy.operands if name in defined]
        return any(buffer.on_host for i in involved for buffer in i.results)

    return [copy for copy in copies(program, min_bytes) if touches_host(copy)]


def large_results(program: Program | str, min_bytes: int) -> list[Instruction]:
    """Everything launched that fills a new buffer of at least min_bytes, be it a copy or not.

    Finds what a search for copies misses: the cache converted, transposed, sliced or gathered as a
    whole. Operations that only pass buffers on are left out, and so are updates: if one of them is
    not in place, a copy in front of it or the temporaries in `memory` tell.
    """
    bodies = computations(program)

    def fills_buffer(i):
        parts = [i, *bodies.get(i.inlines, [])]
        in_place = any(
            part.opcode in ("dynamic-update-slice", "scatter") and part.nbytes >= min_bytes
            for part in parts
        )
        return not (
            in_place
            or i.opcode in _NO_NEW_BUFFER
            or i.opcode.endswith(("-done", "-update"))
            or "output_to_operand_aliasing" in i.text
            or i.target == "AllocateBuffer"
        )

    launched = [i for body in schedule(program).values() for i in body]
    return [i for i in launched if i.nbytes >= min_bytes and fills_buffer(i)]


def async_pairs(program: Program | str) -> list[AsyncPair]:
    """Every asynchronous operation, with the work scheduled between its start and its done.

    An empty `between` means that nothing overlaps with it.
    """
    pairs = []
    for body in schedule(program).values():
        for position, start in enumerate(body):
            if not start.opcode.endswith("-start"):
                continue
            for end in range(position + 1, len(body)):
                if body[end].opcode.endswith("-done") and start.name in body[end].operands:
                    pairs.append(AsyncPair(start, body[end], tuple(body[position + 1 : end])))
    return pairs


def between_custom_calls(program: Program | str, first: str, last: str) -> list[Instruction]:
    """The work scheduled between a custom call to `first` and the next one to `last`.

    For a transfer that is started by one FFI call and awaited by another: what overlaps with it.
    Raises ValueError where the two do not occur in this order in any computation.
    """
    for body in schedule(program).values():
        targets = [i.target for i in body]
        if first in targets:
            begin = targets.index(first)
            return body[begin + 1 : targets.index(last, begin)]
    raise ValueError(f"no custom call to {first}")


def assert_no_copy_larger_than(program: Program | str, limit_bytes: int) -> None:
    """Raise AssertionError, naming the instructions, if anything above the limit is copied."""
    offenders = copies(program, limit_bytes + 1)
    listing = "\n".join(f"  {i.computation}: {i.text[:200]}" for i in offenders)
    assert not offenders, f"copies of more than {limit_bytes} bytes:\n{listing}"


def assert_updated_in_place(program: Program, cache_bytes: int) -> None:
    """Raise AssertionError unless a donated host cache of this size is returned in its own buffer,
    and no pinned temporary of that size exists."""
    alias, temp = program.memory["host_alias"], program.memory["host_temp"]
    assert alias >= cache_bytes, f"only {alias} bytes of host memory are aliased, not {cache_bytes}"
    assert temp < cache_bytes, f"{temp} bytes of pinned temporaries, the cache has {cache_bytes}"


_NO_NEW_BUFFER = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call opt-barrier "
    "after-all add-dependency".split()
)
_BOOKKEEPING = _NO_NEW_BUFFER - {"while", "conditional", "call"}
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*->.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "token": 0}  # others carry their width in their name


@functools.lru_cache(maxsize=8)
def _parse(hlo):
    bodies, current = {}, None
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            current = header.group(1)
            bodies[current] = []
        elif current and (match := _LINE.match(line)):
            bodies[current].append(_instruction(current, *match.groups()))
    return bodies


def _instruction(computation, name, rest):
    result_type, rest = _split_type(rest)
    opcode, _, rest = rest.partition("(")
    inside, attributes = _until_closing(rest)
    called = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", attributes)
    if opcode.startswith(("call", "async")):
        called = None  # a computation with a schedule of its own
    target = re.search(r'custom_call_target="([^"]*)"', attributes)
    op_name = re.search(r'metadata=\{[^}]*op_name="([^"]*)"', attributes)
    attributes = re.sub(r", metadata=\{[^}]*\}", "", attributes)
    return Instruction(
        computation=computation,
        name=name,
        opcode=opcode,
        operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
        results=tuple(map(_buffer, _ARRAY.findall(_own_results(opcode, result_type)))),
        inlines=called and called.group(1),
        target=target and target.group(1),
        op_name=op_name.group(1) if op_name else "",
        text=f"{name} = {result_type} {opcode}({inside}){attributes}",
    )


def _split_type(text):
    if text.startswith("("):
        inside, rest = _until_closing(text[1:])
        return f"({inside})", rest.strip()
    result_type, _, rest = text.partition(" ")
    return result_type, rest


def _until_closing(text):
    """Split at the parenthesis that closes one opened just before `text`."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:position], text[position + 1 :]
    raise ValueError(f"unbalanced parentheses in {text[:200]!r}")


def _own_results(opcode, result_type):
    """The part of a result type that an operation produces. Asynchronous starts repeat their
    operands: a copy-start has the type (destination, source, context), a fusion-start or call-start
    ((operands), results, context), an all-gather-start (operand, result), an all-reduce-start none.
    """
    if not opcode.endswith("-start") or not result_type.startswith("("):
        return result_type
    if result_type.startswith("(("):
        return _until_closing(result_type[2:])[1]
    arrays = [match.group() for match in _ARRAY.finditer(result_type)]
    return arrays[0] if opcode == "copy-start" else " ".join(arrays[1:])


def _buffer(match):
    dtype, dimensions, layout = match
    shape = tuple(int(d) for d in dimensions.split(",") if d)
    bits = _BITS[dtype] if dtype in _BITS else int(re.findall(r"\d+", dtype)[0])
    return Buffer(dtype, shape, math.prod(shape) * bits // 8, f"S({HOST_SPACE})" in layout)


# ---------------------------------------------------------- an FFI handler that does nothing


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
