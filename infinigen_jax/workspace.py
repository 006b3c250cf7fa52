"""Memory that is taken for a while: by a prompt's layer, and by a decode step."""

import jax

from infinigen_jax.decode import Decoder
from infinigen_jax.prompt_attention import BLOCK, CPU_WIDE_TILE, DEVICE_TILE_BYTES


def prefill_bytes(decoder: Decoder, batch: int, chunk: int) -> int:
    """Temporaries of one layer over a chunk of so many tokens of each prompt."""
    config = decoder.config
    width = 3 * config.hidden_size + 2 * config.num_heads * config.head_dim
    width += 3 * config.intermediate_size + 4 * config.num_kv_heads * config.head_dim
    # Scores and weights of the tiles at a time, and the logits, in float32; two blocks of rows.
    together = jax.default_backend() != "cpu"
    scores = DEVICE_TILE_BYTES if together else 4 * CPU_WIDE_TILE * BLOCK
    blocks = 2 * batch * config.num_kv_heads * BLOCK * 2 * config.head_dim * decoder.dtype.itemsize
    extra = 2 * scores + blocks + 4 * batch * config.vocab_size
    return batch * chunk * width * decoder.dtype.itemsize + extra


def decode_bytes(decoder: Decoder, batch: int, capacity: int) -> int:
    """Of a step: two layers' rows on their way, the speculated scores, the logits."""
    config = decoder.config
    requested = max(decoder.request_sizes(capacity), default=0)
    row = batch * config.num_kv_heads * 2 * config.head_dim * decoder.dtype.itemsize
    moved = 0 if decoder.transfer.in_place and not decoder.hot_set else 2 * requested * row
    # Scores, what they are ranked by, and which of them pass, in float32.
    scores = 3 * 4 * batch * config.num_heads * capacity if decoder.selecting else 0
    return moved + scores + 4 * batch * (2 * config.vocab_size + 4 * config.intermediate_size)
