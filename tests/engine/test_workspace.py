"""Planned temporaries of steps: matrices decoded from small weights, scores of device layers."""

from runtime import SPARSE, engine

from infinigen_jax.engine.workspace import step_bytes
from infinigen_jax.models.small_weights import FEW_ROWS, shrink


def test_products_with_few_rows_decode_no_matrix():
    made = engine("gqa", SPARSE)
    decoder, whole = made.decoder, made.runtime.weights.params
    small = {
        "embedding": shrink(whole["embedding"], "int8"),
        "layers": [shrink(layer, "int8") for layer in whole["layers"]],
    }
    for drafted in (0, FEW_ROWS):
        step = step_bytes(decoder, small, 1, 128, drafted)
        assert step == step_bytes(decoder, whole, 1, 128, drafted)
    matrices = [x["weight"].size for x in whole["layers"][0].values() if "weight" in x]
    sizes = 1, 128, FEW_ROWS + 1
    decoded = step_bytes(decoder, small, *sizes) - step_bytes(decoder, whole, *sizes)
    assert decoded >= 4 * sum(matrices)
    # A verification of 16 tokens decodes nothing for one sequence.
    assert step_bytes(decoder, small, 1, 128, 16, 0) == step_bytes(decoder, whole, 1, 128, 16, 0)
    assert step_bytes(decoder, small, 2, 128, 16, 0) > step_bytes(decoder, whole, 2, 128, 16, 0)


def test_layers_on_the_device_hold_all_tokens_next_to_a_pool():
    made = engine("gqa", SPARSE, 1)
    sizes = made.decoder, made.runtime.weights.params, 2
    scores = 2 * 4 * 2 * made.decoder.config.num_heads
    grown = step_bytes(*sizes, 8192, slots=64) - step_bytes(*sizes, 4096, slots=64)
    assert grown == scores * 4096
