"""Launches of the emulated kernels, so that programs which call kernels run on the CPU."""

import collections
from typing import Any

import jax
import numpy as np
import pytest
from cuda_emulation import compiler, emulated_kernels

from infinigen_jax.cuda import calls, scoring

MARKS = [
    pytest.mark.skipif(compiler() is None, reason="needs g++"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="stands in for a GPU on the CPU"),
]
"""Of the tests that use it."""

UNDEFINED = 0xFF  # bytes of results that a kernel has not written: NaN, -1

most_threads = 64
"""Threads of a block; a kernel may have fewer."""
order = 1
"""Seed of the order in which threads run."""

launched: collections.Counter[str] = collections.Counter()
"""How often each kernel ran. Compiled programs outlive a test, and so does this."""
failing: set[str] = set()
"""Kernels whose launches fail."""
wrong: set[str] = set()
"""Kernels whose first result has other bits than it should."""


def call(kernel: str, operands: Any, results: Any, grid: Any, integers: Any, **options: Any) -> Any:
    """Act like `launch.call`."""

    def run(*arrays: Any) -> tuple[np.ndarray, ...]:
        if kernel in failing:
            raise RuntimeError(f"{kernel} failed")
        inputs = [np.array(x, order="C") for x in arrays]
        outputs = [np.full(x.size * x.dtype.itemsize, UNDEFINED, np.uint8) for x in results]
        for operand, result in (options.get("aliases") or {}).items():
            outputs[result] = inputs[operand].reshape(-1).view(np.uint8)
        blocks, threads = grid
        emulated_kernels().run(
            *(kernel, blocks, min(threads, most_threads), order, *inputs, *outputs, *integers)
        )
        launched[kernel] += 1
        if kernel in wrong:
            outputs[0][:4].view(np.uint32)[:] ^= 0x40000041
        return tuple(
            out.view(like.dtype).reshape(like.shape)
            for out, like in zip(outputs, results, strict=True)
        )

    return tuple(jax.pure_callback(run, results, *operands))


def case_name(case: Any) -> str:
    """Return the name of a case of `check_kernels`, the same in every process."""
    return f"{case.func.__name__} {[x for x in case.args if isinstance(x, int | float)]}"


def install(patch: pytest.MonkeyPatch) -> None:
    """Let the package's functions launch these kernels."""
    launched.clear()
    failing.clear()
    wrong.clear()
    for module in (calls, scoring):
        patch.setattr(module, "call", call)
