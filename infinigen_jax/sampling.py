"""Sampling of the next token from logits: greedy, temperature, top-k, top-p.

A row's draw depends only on the seed, the row's number and the step. The engine gives every row the
same number, so a prompt continues the same way alone and in a batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer, Key

from infinigen_jax.errors import InputError
from infinigen_jax.numeric import LARGEST_FACTOR, check_range

# Below this temperature the division could overflow, and the draw would be greedy anyway.
GREEDY_BELOW = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings; hashable, so they can be a static argument of a jitted function.

    They apply in the order temperature, top-k, top-p: top-p accumulates the probabilities of the
    tokens that top-k keeps.

    Attributes:
        temperature: divisor of the logits; 0 (anything below 1e-5) is greedy.
        top_k: number of most likely tokens to draw from; 0 turns it off.
        top_p: draw from the fewest most likely tokens whose probabilities sum to at least this,
            above 0 and up to 1; 1 turns it off.
        seed: random seed, from 0 to 2**32 - 1.

    Raises:
        InputError: a value is out of range; the message names the option.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        check_range("--temperature", self.temperature, 0, LARGEST_FACTOR)
        check_range("--top-k", self.top_k, 0)
        if not 0 < self.top_p <= 1:
            raise InputError(f"--top-p {self.top_p}: give a number above 0 and up to 1 (off)")
        check_range("--seed", self.seed, 0, 2**32 - 1)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, so that no keys are needed."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def unseeded(self) -> "Sampling":
        """These settings with seed 0, so that a program is compiled once for all seeds."""
        return dataclasses.replace(self, seed=0)


def row_keys(
    seed: int | Integer[Array, ""],
    rows: Integer[Array, " b"],
    step: int | Integer[Array, ""] | Integer[Array, " b"],
) -> Key[Array, " b"]:
    """Return one random key for each row of a batch.

    Args:
        seed: random seed of the generation.
        rows: number of each row, such as `jnp.arange(b)`. A row keeps its number when the batch
            around it changes.
        step: number of tokens drawn before, one for all rows or one per row; may be traced.
    """
    key = jax.random.key(seed)
    steps = jnp.broadcast_to(jnp.asarray(step), rows.shape)
    return jax.vmap(lambda row, step: jax.random.fold_in(jax.random.fold_in(key, row), step))(
        rows, steps
    )


def sample(
    logits: Float[Array, "b v"], sampling: Sampling, keys: Key[Array, " b"] | None = None
) -> Int[Array, " b"]:
    """Draw one token for each row.

    Args:
        logits: any floating dtype; computed in float32. Among equal logits the lower token id
            counts as more likely.
        sampling: settings, static under jit.
        keys: from `row_keys`; unused when `sampling.greedy`.

    Returns:
        Token ids, int32.

    Raises:
        ValueError: `keys` is missing.
    """
    if sampling.greedy:
        return lax.argmax(logits, 1, jnp.int32)
    if keys is None:
        raise ValueError("sample: keys are needed unless sampling.greedy")
    logits = logits.astype(jnp.float32)
    # With a maximum of 0 the division cannot overflow to +inf.
    logits = (logits - logits.max(axis=1, keepdims=True)) / sampling.temperature
    draw = jax.vmap(jax.random.categorical)
    vocabulary = logits.shape[1]
    count = min(sampling.top_k or vocabulary, vocabulary)
    if count == vocabulary and sampling.top_p == 1:
        return draw(keys, logits).astype(jnp.int32)
    candidates, tokens = lax.top_k(logits, count)
    chosen = draw(keys, _keep_mass(candidates, sampling.top_p))
    return jnp.take_along_axis(tokens, chosen[:, None], axis=1)[:, 0].astype(jnp.int32)


def _keep_mass(logits: Float[Array, "b n"], mass: float) -> Float[Array, "b n"]:
    """Keep the fewest leading logits, of descending ones, whose probabilities sum to `mass`.

    A token stays if those before it do not reach `mass`, so the first one always stays.
    """
    if mass == 1:
        return logits
    probabilities = jax.nn.softmax(logits, axis=1)
    preceding = jnp.cumsum(probabilities, axis=1) - probabilities
    return jnp.where((preceding < mass).at[:, 0].set(True), logits, -jnp.inf)
