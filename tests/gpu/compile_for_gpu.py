"""Compile a JAX function for an NVIDIA GPU on a machine without one, and get the result.

JAX's CUDA plugin contains the whole compiler: given a description of a GPU, it compiles without a
driver. The optimised HLO is the program that this GPU would run. `make compile-gpu` sets up the
environment; `reading` reads the outcome. Works with jax 0.10.2, 0.11.2 and 0.12.0.1: the names from
jax._src, which may change, are in `_compile`.
"""

import functools
import importlib.util
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# XLA's description of the GPU, as a text proto. To get one for another GPU, run any jitted
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
    """The text of the optimised module, in the order of launches, and byte counts of one device.

    They are of argument, output, temp and alias; with host_ before the name, of host memory.
    """

    hlo: str
    memory: dict[str, int]


def cuda_version() -> int | None:
    """Return the version of the installed CUDA plugin."""
    for version in (13, 12):
        if importlib.util.find_spec(f"jax_cuda{version}_plugin"):
            return version
    return None


def _abstract(memory: str, shape, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """Return an argument in a memory of the device or the host; nothing is allocated."""
    # NamedSharding, because a ShapeDtypeStruct with a SingleDeviceSharding loses the memory space.
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("device",))
    sharding = jax.NamedSharding(mesh, jax.P(), memory_kind=memory)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


on_device = functools.partial(_abstract, "device")
on_host = functools.partial(_abstract, "pinned_host")


def compile_for_gpu(
    fun,
    *args,
    options: dict[str, Any] | None = None,
    keywords: dict[str, Any] | None = None,
    **jit_options,
) -> Program:
    """Compile `fun(*args)` for an H200.

    Arguments are pytrees of arrays or of `on_host(...)` / `on_device(...)`, `keywords` those by
    name, `options` the compiler's and `jit_options` those of jax.jit. The function is traced with
    the CPU as the default backend, and lowered for CUDA (so lax.platform_dependent takes that
    branch).
    """
    jitted = fun if hasattr(fun, "trace") and not jit_options else jax.jit(fun, **jit_options)
    lowered = jitted.trace(*args, **(keywords or {})).lower(lowering_platforms=("cuda",))
    executable = _compile(lowered, options or {})
    statistics = executable.get_compiled_memory_stats()
    memory = {
        name.removesuffix("_size_in_bytes"): getattr(statistics, name)
        for name in dir(statistics)
        if name.endswith("_size_in_bytes")
    }
    return Program(executable.hlo_modules()[0].to_string(), memory)


@functools.cache
def _topology(devices: int):
    from jax.experimental import topologies

    target = f"{H200}runtime_version {{ major: {cuda_version()} minor: 0 patch: 0 }}\n"
    return topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=f"1x1x{devices}"
    )


def _compile(lowered, options):
    from jax._src import compiler
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    module = lowered.compiler_ir("stablehlo")
    partitions = module.operation.attributes["mhlo.num_partitions"].value
    devices = tuple(_topology(partitions).devices)
    compile_options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=partitions,
        device_assignment=np.array([[device.id for device in devices]]),
        env_options_overrides={**dict(lowered._lowering._compiler_options_kvs), **options},
    )
    return devices[0].client.compile(
        module, executable_devices=_jax.DeviceList(devices), compile_options=compile_options
    )
