"""Weights that are loaded onto the host are those that are loaded onto the device."""

import jax
import numpy as np
import pytest

from infinigen_jax.loading.load import embedded, load
from infinigen_jax.transfer.host_weights import STAYS


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-opt"])
def test_loading_onto_the_host(name):
    """The matrices, but those that queries are made by."""
    there, here = (load(embedded(name), weights=place) for place in ("host", "device"))
    for layer, other in zip(there.params["layers"], here.params["layers"], strict=True):
        for part, parameters in layer.items():
            for x in jax.tree.leaves(parameters):
                moved = part not in STAYS and x.ndim == 2
                assert x.sharding.memory_kind == ("pinned_host" if moved else "device"), part
        assert {x.sharding.memory_kind for x in jax.tree.leaves(other)} == {"device"}
    jax.tree.map(np.testing.assert_array_equal, there.params, here.params)
