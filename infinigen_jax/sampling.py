"""Choosing the next token from the logits: greedy, temperature, top-k, top-p.

A row's draw depends on the seed, the number it is given and the step, and on nothing else. The
engine gives every row the same one: a prompt continues the same way alone and in a batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer, Key

from infinigen_jax.errors import InputError
from infinigen_jax.numeric import LARGEST_FACTOR, check_range

# Below this a division by the temperature could overflow; the draw would be greedy all the same.
GREEDY_BELOW = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Hashable, so that it can be a static argument of a jitted function.

    The settings apply in the order temperature, top-k, top-p: top-p counts its mass among the
    tokens that top-k left.

    Attributes:
        temperature: the logits are divided by it; 0 (anything below 1e-5) is greedy.
        top_k: draw among this many likeliest tokens; 0 is off.
        top_p: draw among the fewest likeliest tokens that together have at least this probability,
            above 0 and up to 1; 1 is off.
        seed: from 0 up to 2**32 - 1.

    Raises:
        InputError: for a value out of range, naming the option.
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
        """Whether the likeliest token is always taken, so that no keys are needed."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def unseeded(self) -> "Sampling":
        """The same for every seed, so that programs are not compiled for each."""
        return dataclasses.replace(self, seed=0)


def row_keys(
    seed: int | Integer[Array, ""],
    rows: Integer[Array, " b"],
    step: int | Integer[Array, ""] | Integer[Array, " b"],
) -> Key[Array, " b"]:
    """One random key for each row of a batch.

    Args:
        seed: of the run.
        rows: numbers by which the rows are told apart, such as `jnp.arange(b)`. A row keeps its
            number when the batch around it changes.
        step: how many tokens were drawn before, of all rows or of each; may be traced.
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
        logits: of any floating dtype; computed with in float32. Of equal logits the token with the
            lower number counts as the likelier one.
        sampling: static under jit.
        keys: from `row_keys`; not needed, and not looked at, when `sampling.greedy`.

    Returns:
        Token ids, int32.
    """
    if sampling.greedy:
        return lax.argmax(logits, 1, jnp.int32)
    if keys is None:
        raise ValueError("sample: keys are needed unless sampling.greedy")
    logits = logits.astype(jnp.float32)
    # With the maximum at 0 the division cannot overflow to +inf.
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
    """Of descending logits keep the fewest first ones with at least this share of the probability.

    A token stays if those before it do not suffice; so the first one always does.
    """
    if mass == 1:
        return logits
    probabilities = jax.nn.softmax(logits, axis=1)
    before = jnp.cumsum(probabilities, axis=1) - probabilities
    return jnp.where((before < mass).at[:, 0].set(True), logits, -jnp.inf)
