"""Speculation: with every column and the layer's own input, it is the layer's own attention."""

import jax.numpy as jnp
import numpy as np
import pytest
from runtime import check_speculated_logits, random_basis, random_model

from infinigen_jax.loading.load import Basis, Model


def balanced(name: str) -> Model:
    """With queries by one factor, and keys by its inverse transposed."""
    model = random_model(name, with_basis=True)
    config, bases = model.config, []
    stretch = jnp.asarray(np.geomspace(8, 1 / 8, config.head_dim), jnp.float32)[None, None]
    for i in range(config.num_layers):
        a = random_basis(config.num_kv_heads, config.head_dim, i).query
        bases.append(Basis(a * stretch, a / stretch))
    return Model.from_params(config, model.params, model.dtype, bases=bases, skew="balanced")


CASES = {
    "opt, absorbed": lambda: random_model("opt", with_basis=False),
    "opt, with basis": lambda: random_model("opt", with_basis=True),
    "opt, balanced": lambda: balanced("opt"),
    "rope, gqa": lambda: random_model("gqa"),
    "rope, balanced": lambda: balanced("gqa"),
    "biases on queries and keys": lambda: random_model("qwen2"),
    "norms on queries and keys": lambda: random_model("qwen3"),
}


@pytest.mark.parametrize("case", CASES)
def test_all_columns_and_own_input_give_the_true_logits(case):
    check_speculated_logits(CASES[case](), 1)
