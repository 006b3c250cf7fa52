"""Planned temporaries of steps: matrices decoded from small weights, scores of device layers."""

from runtime import SPARSE, engine

from infinigen_jax.engine.workspace import decode_bytes, step_bytes
from infinigen_jax.models.small_weights import FEW_ROWS, shrink


def test_products_with_few_rows_decode_no_matrix():
    made = engine("gqa", SPARSE)
    decoder, whole = made.decoder, made.runtime.weights.params
    small = {
        "embedding": shrink(whole["embedding"], "int8"),
        "layers": [shrink(layer, "int8") for layer in whole["layers"]],
    }
    one = decode_bytes(decoder, small, 1, 128)
    assert (
        one
        == decode_bytes(decoder, small, 1, 128, FEW_ROWS)
        == decode_bytes(decoder, whole, 1, 128)
    )
    matrices = [x["weight"].size for x in whole["layers"][0].values() if "weight" in x]
    decoded = decode_bytes(decoder, small, 1, 128, FEW_ROWS + 1) - one
    assert decoded >= 4 * sum(matrices)
    # A verification of 16 tokens decodes nothing for one sequence.
    assert step_bytes(decoder, small, 1, 128, 16, 0) == step_bytes(decoder, whole, 1, 128, 16, 0)
    assert step_bytes(decoder, small, 2, 128, 16, 0) > step_bytes(decoder, whole, 2, 128, 16, 0)


def test_layers_on_the_device_hold_all_tokens_next_to_a_pool():
    made = engine("gqa", SPARSE, 1)
    sizes = made.decoder, made.runtime.weights.params, 2
    scores = 2 * 4 * 2 * made.decoder.config.num_heads
    grown = decode_bytes(*sizes, 8192, slots=64) - decode_bytes(*sizes, 4096, slots=64)
    assert grown == scores * 4096
