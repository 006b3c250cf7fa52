"""The start of a reference model's training."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.reference_models.induction import with_induction
from benchmarks.reference_models.model import Training, attention, initial_params, token_losses
from benchmarks.reference_models.recipes import BOS, SIZES, hf_config
from infinigen_jax.models import blueprint, config_from_hf


def test_the_start_looks_up() -> None:
    """Untrained, the tokens of a copy are likelier than chance: by these heads alone."""
    size = SIZES["cpu"]
    config = config_from_hf(hf_config(size, size.vocabulary))
    training = Training(blueprint(config, jnp.float32), attention(jnp.float32), False)
    rng = np.random.default_rng(0)
    tokens = np.concatenate([[BOS], np.tile(rng.integers(4, size.vocabulary, 60), 3)])
    params = initial_params(config, 0)

    def nats(params: Any) -> float:
        losses = token_losses(training, params, jnp.asarray(tokens[None], jnp.int32))
        return float(np.mean(losses[0, 60:]))

    assert nats(params) > np.log(size.vocabulary) - 0.2
    assert nats(with_induction(params, config, 0)) < np.log(size.vocabulary) - 1
