"""--check: a NaN or an infinity is reported with layer and position, wherever it arises."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from runtime import SPARSE, random_model

from infinigen_jax.decode.finite_check import NotFiniteError
from infinigen_jax.engine.engine import Engine

BAD = 7


@pytest.fixture
def params():
    return random_model("gqa").params


def engine(params) -> Engine:
    model = dataclasses.replace(random_model("gqa"), params=params)
    return Engine(model, policy=SPARSE, dense_layers=1, check=True)


def spoiled(params, path: str, value: float = jnp.nan):
    """Return the parameters with one number in a leaf replaced."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    names = [jax.tree_util.keystr(place, simple=True, separator=".") for place, _ in leaves]
    at, arrays = names.index(path), [leaf for _, leaf in leaves]
    arrays[at] = arrays[at].at[(BAD,) * arrays[at].ndim].set(value)
    return jax.tree.unflatten(tree, arrays)


def place(error: pytest.ExceptionInfo[NotFiniteError]) -> tuple[str, int, int]:
    text = str(error.value)
    found = re.match(r"check: the (.+) of prompt (\d+) holds a NaN .* at position (\d+); ", text)
    assert found
    return found[1], int(found[2]), int(found[3])


PROMPTS = [[3] * 5, [4] * 20, [5] * 9]  # of the second, 14 rows are only on the host


@pytest.mark.parametrize(
    ("leaf", "value", "second", "expected"),
    [
        ("layers.0.down.weight", jnp.nan, PROMPTS[1], ("output of layer 0", 1, 0)),
        ("layers.1.down.weight", jnp.inf, PROMPTS[1], ("output of layer 1", 1, 0)),
        ("embedding.head.weight", jnp.nan, PROMPTS[1], ("logits", 1, 4)),
        # One token's embedding is not finite: the first of these tokens.
        ("embedding.tokens.embedding", jnp.nan, [4, 4, 4, BAD, 4, BAD], ("embedding", 2, 3)),
    ],
)
def test_weights_that_are_not_finite(params, leaf, value, second, expected):
    prompts = [PROMPTS[0], second, PROMPTS[2]]
    with pytest.raises(NotFiniteError) as error:
        engine(spoiled(params, leaf, value)).start(prompts, max_new_tokens=4)
    assert place(error) == expected


def test_a_token_that_was_drawn(params):
    """In a decode step, with the sequence and the position of the token."""
    bad = spoiled(params, "embedding.tokens.embedding")
    run = engine(bad).start(PROMPTS, max_new_tokens=8)
    tokens = run.tokens(ignore_eos=True)
    next(tokens)
    next(tokens)
    run.drawn, following = run.drawn.at[1].set(BAD), int(run.cache.lengths[1])
    with pytest.raises(NotFiniteError) as error:
        for _ in tokens:
            pass
    what, prompt, position = place(error)
    assert (what, prompt) == ("embedding", 2)
    assert position == following > len(PROMPTS[1])


def test_rows_on_the_host(params):
    """The first step that fetches spoiled rows of the last layer is refused."""
    run = engine(params).start(PROMPTS, max_new_tokens=8)
    tokens, host = run.tokens(ignore_eos=True), run.cache.host
    assert host is not None and host.shape[0] == len(run.decoder.on_host) > 0
    rows = jax.device_put(host, jax.memory.Space.Device).at[-1, 1].set(jnp.nan)
    run.cache = run.cache._replace(host=jax.device_put(rows, host.sharding))
    with pytest.raises(NotFiniteError) as error:
        for _ in tokens:
            pass
    assert place(error) == ("output of layer 1", 2, len(PROMPTS[1]))
