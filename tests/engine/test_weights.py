"""Weights in host memory give what weights on the device give."""

from typing import Any

import jax
import numpy as np
import pytest
from runtime import engine

from infinigen_jax.engine.engine import Engine
from infinigen_jax.errors import InputError
from infinigen_jax.loading.load import embedded, load
from infinigen_jax.transfer.host_weights import STAYS

pytestmark = pytest.mark.usefixtures("shallow")


def kinds(layers: Any) -> dict[str, set[str | None]]:
    """Memory kinds of each part of the layers."""
    return {
        name: {x.sharding.memory_kind for x in jax.tree.leaves([each[name] for each in layers])}
        for name in layers[0]
    }


def assert_on_host(layers: Any) -> None:
    """The matrices, but those that queries are made by."""
    for layer in layers:
        for name, part in layer.items():
            for x in jax.tree.leaves(part):
                moved = name not in STAYS and x.ndim == 2
                assert x.sharding.memory_kind == ("pinned_host" if moved else "device"), name


@pytest.mark.parametrize("name", ["tiny-llama", pytest.param("tiny-opt", marks=pytest.mark.slow)])
def test_loading_onto_the_host(name):
    model = load(embedded(name), weights="host")
    assert_on_host(model.params["layers"])
    here = load(embedded(name))
    assert kinds(here.params["layers"])["q"] == kinds(here.params["layers"])["kv"] == {"device"}
    jax.tree.map(np.testing.assert_array_equal, model.params, here.params)
    if name == "tiny-llama":  # whose text is that of the command, below
        return
    prompts = ["The king said to the", "It was a dark and stormy night"]
    texts = [Engine(m, weights=w).generate(prompts, max_new_tokens=8).texts for m, w in
             ((model, "host"), (here, "device"))]  # fmt: skip
    assert texts[0] == texts[1]


def test_places_that_do_not_exist():
    with pytest.raises(InputError, match="weights disk"):
        engine("gqa", weights="disk")
