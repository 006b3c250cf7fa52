"""Options of XLA's compiler for the programs that need them."""

import functools
import logging
import os

import jax
import jax.numpy as jnp

from infinigen_jax.cuda.launch import CONCURRENT
from infinigen_jax.decode.layout import Layout
from infinigen_jax.files.user_cache import CPU_INFO, cpu_info

logger = logging.getLogger(__name__)

Options = dict[str, int | str]

# XLA's limit of concurrent asynchronous operations. By default a third copy starts only after the
# first has been awaited. A step begins with the weight copies of two layers, one copy per matrix.
COPIES_IN_FLIGHT: Options = {"xla_gpu_experimental_parallel_async_compute_limit": 32}
# On the CPU, products with two-byte weights are computed in float32. The default schedule converts
# the weights of all layers first, for concurrency, and holds them all in memory.
ONE_AFTER_THE_OTHER: Options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
# XLA prefers 256-bit vectors even where longer ones exist, because the first AVX-512 processors
# lowered their clock for them. Processors with LONG_VECTORS (Ice Lake, Zen 4 and later) do not.
WIDTH = "xla_cpu_prefer_vector_width"
WIDE: Options = {WIDTH: 512}
LONG_VECTORS = "avx512_vbmi2"
# The YNN library multiplies a few queries by many rows, or rows by weights, faster than XLA's own
# loops. Its reductions are good for the scores of a chunk, but take several times as long for those
# of a few queries, since it materialises their operands; it therefore gets products only.
LIBRARY = "xla_cpu_experimental_ynn_fusion_type"
PRODUCTS: Options = {LIBRARY: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


def chunk_options(layout: Layout) -> Options:
    """Return options for programs of a layer over many tokens: vectors, and copies of weights."""
    options = _known("vectors stay short", **WIDE) if long_vectors() else {}
    if layout.weights_on_host:
        options = options | _known("copies will hardly overlap", **COPIES_IN_FLIGHT)
    return options


def layer_options(layout: Layout) -> Options:
    """Return options for programs of a layer over few tokens: products as well."""
    options = chunk_options(layout)
    if jax.default_backend() == "cpu" and LIBRARY not in os.environ.get("XLA_FLAGS", ""):
        options = options | _known(**PRODUCTS)
    return options


def step_options(layout: Layout) -> Options:
    """Return options for programs of a step, of all layers or of one."""
    options = layer_options(layout)
    if layout.transfer.concurrent and layout.selecting:
        options = options | _known("transfers will not overlap", **CONCURRENT)
    if layout.as_bits and layout.dtype.itemsize == 2:
        options = options | _known("weights in float32 take more memory", **ONE_AFTER_THE_OTHER)
    return options


def long_vectors() -> bool:
    """Whether this CPU has full-clock 512-bit vectors and the environment sets no vector width."""
    if jax.default_backend() != "cpu" or WIDTH in os.environ.get("XLA_FLAGS", ""):
        return False
    return LONG_VECTORS in cpu_info(CPU_INFO)


@functools.cache
def _known(without: str | None = None, **options: int | str) -> Options:
    """Return the options if this XLA accepts them, else none, after one warning.

    `without` is the effect of missing options, for the warning; None gives no warning.
    """
    try:
        jax.jit(lambda: jnp.int32(0), compiler_options=options)()
    except jax.errors.JaxRuntimeError as error:
        if without is not None:
            logger.warning("%s: %s", without, error)
        return {}
    return options
