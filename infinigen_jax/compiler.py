"""Options of XLA's compiler, for the programs that need them."""

import functools
import logging

import jax
import jax.numpy as jnp

from infinigen_jax.layout import Layout

logger = logging.getLogger(__name__)

Options = dict[str, int | bool]

# XLA's limit of asynchronous work under way: two by default, and a third copy is started only
# when the first has been awaited. A step begins with those of two layers, a matrix each.
COPIES_IN_FLIGHT: Options = {"xla_gpu_experimental_parallel_async_compute_limit": 32}
# On the CPU a product with weights of two bytes takes them in float32. Scheduled for concurrency,
# as by default, a step converts those of all layers first, and has them all in memory.
ONE_AFTER_THE_OTHER: Options = {"xla_cpu_enable_concurrency_optimized_scheduler": False}


def layer_options(layout: Layout) -> Options:
    """For functions of a layer: of those whose weights are copied beside other work."""
    return _known(COPIES_IN_FLIGHT, "copies will hardly overlap") if layout.weights_on_host else {}


def step_options(layout: Layout) -> Options:
    """For a step, of all layers or of one."""
    options = layer_options(layout)
    if layout.as_bits and layout.dtype.itemsize == 2:
        options = options | _known(ONE_AFTER_THE_OTHER, "a step takes more memory")
    return options


def _known(options: Options, without: str) -> Options:
    """The options if this XLA has them; else none, after one warning of what comes of it."""
    return options if _compiles(tuple(options.items()), without) else {}


@functools.cache
def _compiles(options: tuple[tuple[str, int | bool], ...], without: str) -> bool:
    try:
        jax.jit(lambda: jnp.int32(0), compiler_options=dict(options))()
    except jax.errors.JaxRuntimeError as error:
        logger.warning("%s: %s", without, error)
        return False
    return True
