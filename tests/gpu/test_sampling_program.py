"""The draw of a token, compiled for a GPU."""

import jax
import jax.numpy as jnp
from compile_for_gpu import compile_for_gpu, on_device

from infinigen_jax.sampling import Sampling, sample, settings_of


def test_the_host_waits_for_no_loop():
    """A loop of unknown length stops the host until the end of the step."""
    settings = settings_of([Sampling(temperature=1.0)] * 8)
    shapes = jax.tree.map(lambda x: on_device(x.shape, x.dtype), settings)
    logits, uniform = on_device((8, 32_000), jnp.float32), on_device((8,), jnp.float32)
    program = compile_for_gpu(sample, logits, shapes, uniform)
    loops = [line for line in program.hlo.splitlines() if " while(" in line]
    assert loops and all("known_trip_count" in line for line in loops)
