"""Attention of a prompt's chunk by cuDNN's fused kernel: NVIDIA GPUs, half precision.

Scores stay on chip, while `prefill.attention` writes a tile of them to memory and reads it again.
For one group of keys the kernel returns the weighted mean of the values and the log-sum-exp of the
scores. `join_softmax` combines the groups into one softmax.

    the chunk's own keys    causal, within the sliding window if there is one
    whole blocks before it  every row is visible to every sequence: no mask and no copy
    the other blocks        masked: the last blocks of a batch of different lengths, and rings

The blocks that need no mask depend on the shortest sequence of a batch. A sequence's last bits
therefore depend on the lengths of the others.
"""

import functools
import logging
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from infinigen_jax import cuda
from infinigen_jax.cuda.first_use import OFF, SWITCH
from infinigen_jax.ops.attention import Softmax, join_softmax
from infinigen_jax.prefill.prior_rows import NOWHERE, ChunkAttention, PriorRows, Rows

logger = logging.getLogger(__name__)

CHECKED_WINDOW = 40
# Tolerances of the check. Outputs of about 0.1 to 1 are rounded to half precision once per group,
# with errors below 0.01. Log-sums are not rounded: bfloat16 would give errors of 0.015.
TOLERANCE, LOG_TOLERANCE = 0.03, 0.005


def usable(
    q: Float[Array, "b c h d"],
    kv_heads: int,
    prior: PriorRows | None = None,
    window: int | None = None,
) -> bool:
    """Whether attention of these queries, traced now, should use the kernel."""
    mesh, d = jax.typeof(q).sharding.mesh, q.shape[-1]
    if jax.default_backend() != "gpu" or q.dtype.itemsize != 2 or d % 8 or mesh.size > 1:
        return False
    dtype, block = q.dtype.name, None if prior is None else prior.size
    reason = unavailable(dtype, d, window is not None)
    return (reason or refusal(dtype, q.shape, kv_heads, block, window)) is None


@functools.cache
def unavailable(dtype: str, head_dim: int, windowed: bool = False) -> str | None:
    """Return one line on why this process cannot use the kernel for such heads; None if it can.

    The first call compares the kernel with plain attention on a small prompt.
    """
    if os.environ.get(SWITCH) == OFF:
        return f"{SWITCH} is {OFF}"
    try:
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            error = _error(jnp.dtype(dtype), head_dim, CHECKED_WINDOW if windowed else None)
        if error < 1:  # False for NaN
            return None
        reason = f"differs from plain attention by {error:.2g} times its tolerance"
    except Exception as raised:  # the type depends on the missing component
        reason = cuda.reason_of(raised)
    return _refused(f"{dtype}, heads of {head_dim}", reason)


@functools.cache
def refusal(
    dtype: str, shape: tuple[int, ...], kv_heads: int, block: int | None, window: int | None
) -> str | None:
    """Return one line on why cuDNN rejects queries of shape [b, c, h, d]; None if it accepts them.

    Supported sizes differ by version and GPU. A program with an unsupported call fails as a whole.
    `block` is the number of prior rows per block; None without prior rows.
    """
    b, c, h, d = shape

    def some(*shape: int, of: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, of)

    q, chunk_keys = some(b, h, c, d), some(b, kv_heads, c, d)
    calls: list[tuple[Any, ...]] = [
        (functools.partial(_kernel, causal=True, window=window), chunk_keys)
    ]
    if block is not None:
        calls.append((_kernel, some(b, kv_heads, block, d), some(b, 1, c, block, of=bool)))
        if window is None:
            calls.append((_kernel, some(b, kv_heads, block, d)))
    try:
        for kernel, rows, *mask in calls:
            jax.jit(kernel).lower(q, rows, rows, *mask).compile()
    except Exception as raised:  # any type
        return _refused(f"{dtype} queries {list(shape)}", cuda.reason_of(raised))
    return None


def _refused(what: str, reason: str) -> str:
    logger.warning("attention of prompts by XLA, not cuDNN (%s): %s", what, reason)
    return reason


def attend(
    prior: PriorRows | None,
    window: int | None,
    q: Float[Array, "b c h d"],
    keys: Float[Array, "b c k d"],
    values: Float[Array, "b c k d"],
) -> ChunkAttention:
    """Return the result of `prefill.attention.attend_chunk`."""
    q, keys, values = (x.swapaxes(1, 2) for x in (q, keys, values))
    state = _kernel(q, keys, values, causal=True, window=window)
    if prior is not None:
        state = _attend_prior(prior, window, q, state)
    output = (state.weighted / state.total[..., None]).astype(q.dtype)
    log_sum = state.peak + jnp.log(state.total)
    return ChunkAttention(output.swapaxes(1, 2), log_sum.swapaxes(1, 2))


def _attend_prior(
    prior: PriorRows, window: int | None, q: Float[Array, "b h c d"], state: Softmax
) -> Softmax:
    """Attend to the blocks before the chunk as well; the next one is read meanwhile."""

    def visit_whole(number: Array, carry: tuple[Softmax, Rows]) -> tuple[Softmax, Rows]:
        state, rows = carry
        next_rows = prior.rows(number + 1)
        return join_softmax(state, _kernel(q, *rows)), next_rows

    def visit(number: Array, carry: tuple[Softmax, Rows]) -> tuple[Softmax, Rows]:
        state, rows = carry
        next_rows = prior.rows(number + 1)
        block = prior.placed(number, rows)
        visible = (block.positions < NOWHERE)[:, None, None]
        # The mask is added to the scores, so keys in unwritten slots must not be NaN.
        keys = jnp.where(visible.swapaxes(2, 3), block.keys, 0)
        if window is not None:
            row = prior.start[:, None] + jnp.arange(q.shape[2], dtype=jnp.int32)[None]
            distance = row[:, None, :, None] - block.positions[:, None, None]
            visible = visible & (distance < window)
        mask = jnp.broadcast_to(visible, (q.shape[0], 1, q.shape[2], keys.shape[2]))
        return join_softmax(state, _kernel(q, keys, block.values, mask=mask)), next_rows

    first = jnp.int32(0)
    carry = (state, prior.rows(first))
    # With a sliding window every block may need a mask.
    whole = first if window is not None else prior.whole_blocks
    carry = lax.fori_loop(first, whole, visit_whole, carry)
    return lax.fori_loop(whole, prior.blocks, visit, carry)[0]


def _kernel(
    q: Float[Array, "b h c d"],
    keys: Float[Array, "b k n d"],
    values: Float[Array, "b k n d"],
    mask: Bool[Array, "b 1 c n"] | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Softmax:
    """Return attention over one group of keys; if all are masked, the peak has no weight."""
    # `jax.nn.dot_product_attention` rounds the log-sums to the output's eight bits, which would
    # cause errors of a few percent when groups are combined.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    outcome: Any = cudnn.dot_product_attention(
        *(q, keys, values),
        mask=mask,
        scale=1.0,
        mask_type=cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK,
        sliding_window_length=window,
        qkv_layout="BNTH",
        return_residual=True,
    )
    output, log_sum = outcome
    return Softmax(log_sum, jnp.ones_like(log_sum), output.astype(jnp.float32))


def _error(dtype: Any, head_dim: int, window: int | None) -> float:
    """Return the largest difference from plain attention, in multiples of its tolerance.

    The test case has whole, partly filled and empty blocks before the chunk.
    """
    b, c, h, k, size, capacity = 3, 48, 4, 2, 64, 224
    random = np.random.default_rng(0)
    start = np.array([150, 70, 200], np.int32)

    def draw(tokens: int, heads: int, scale: float = 1.0) -> Any:
        return jnp.asarray(random.normal(0, scale, (b, heads, tokens, head_dim)), dtype)

    # Keys and values: slots before the chunk, some of them unwritten, and then the chunk's own.
    q, all_rows = draw(c, h, head_dim**-0.5), [draw(capacity + c, k) for _ in range(2)]
    written = np.arange(capacity) < start[:, None]
    before = [jnp.where(written[:, None, :, None], x[:, :, :capacity], jnp.nan) for x in all_rows]
    chunk = [x.swapaxes(1, 2) for x in (q, *(x[:, :, capacity:] for x in all_rows))]

    def read(at: Array, size: int) -> tuple[Array, Array]:
        keys, values = (lax.dynamic_slice_in_dim(x, at, size, axis=2) for x in before)
        return keys, values

    prior = PriorRows(read, size, capacity, jnp.asarray(start))
    result = jax.jit(functools.partial(attend, prior, window))(*chunk)
    q, keys, values = (np.asarray(x, np.float64) for x in (q, *all_rows))
    keys, values = (np.repeat(x, h // k, axis=1) for x in (keys, values))
    row = start[:, None] + np.arange(c)
    column = np.concatenate([np.where(written, np.arange(capacity), NOWHERE), row], axis=1)
    distance = row[:, :, None] - column[:, None]
    visible = ((distance >= 0) & (distance < (window or NOWHERE)))[:, None]
    scores = np.where(visible, np.einsum("bhcd,bhnd->bhcn", q, keys), -np.inf)
    log_sum = np.log(np.sum(np.exp(scores), axis=-1))
    output = np.einsum("bhcn,bhnd->bchd", np.exp(scores - log_sum[..., None]), values)
    log_sum = log_sum.swapaxes(1, 2)
    pairs = ((result.output, output, TOLERANCE), (result.log_sum, log_sum, LOG_TOLERANCE))
    errors = [np.max(np.abs(np.asarray(x, np.float64) - y)) / most for x, y, most in pairs]
    return float(np.max(errors))
