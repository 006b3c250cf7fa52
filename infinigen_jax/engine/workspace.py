"""Memory that is taken for a while: by a prompt's layer, and by a decode step."""

from infinigen_jax.cuda.scoring import LEADING
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.machine.memory_limits import tree_bytes
from infinigen_jax.prefill.attention import CPU_WIDE_TILE, DEVICE_TILE_BYTES
from infinigen_jax.prefill.earlier_rows import BLOCK
from infinigen_jax.transfer.host_weights import in_host_memory

FLOAT32 = 4  # bytes


def prefill_bytes(decoder: Decoder, batch: int, chunk: int, capacity: int) -> int:
    """Temporaries of one layer over a chunk of so many tokens of each prompt."""
    beside = FLOAT32 * batch * decoder.config.vocab_size + _arriving_bytes(decoder)
    if decoder.transfer.in_place:
        return _prefill_on_cpu(decoder, batch, chunk, capacity) + beside
    config, item = decoder.config, decoder.dtype.itemsize
    width = 3 * config.hidden_size + 2 * config.query_width
    width += 3 * config.intermediate_size + 4 * config.num_kv_heads * config.head_dim
    # Scores and weights of the tiles at a time, in float32; two blocks of rows.
    blocks = 2 * batch * config.num_kv_heads * BLOCK * 2 * config.head_dim * item
    return batch * chunk * width * item + 2 * DEVICE_TILE_BYTES + blocks + beside


def _prefill_on_cpu(decoder: Decoder, batch: int, chunk: int, capacity: int) -> int:
    """Attention and MLP come one after the other there, and compute in float32.

    Beside either of them there are the layer's input and output, and the rows that it makes; and
    of two-byte weights the layer's in float32.
    """
    config, item, tokens = decoder.config, decoder.dtype.itemsize, batch * chunk
    queries = config.query_width
    rows = 2 * config.num_kv_heads * config.head_dim
    block = min(BLOCK, capacity)
    # Queries in tiles, their weighted sums, the output; keys and values by head; one tile's scores;
    # a block of earlier rows, and its values without what was never written.
    attention = (
        tokens * (3 * queries + rows) + CPU_WIDE_TILE * block + batch * block * rows * 3 // 2
    )
    mlp = tokens * 3 * config.intermediate_size
    weights = 0
    if item < FLOAT32:
        weights = config.hidden_size * (2 * queries + rows + 3 * config.intermediate_size)
    beside = tokens * (2 * config.hidden_size + rows) * item
    return beside + FLOAT32 * (max(attention, mlp) + weights)


def decode_bytes(decoder: Decoder, batch: int, capacity: int) -> int:
    """Of a step: rows that are read and those on their way, speculated scores, logits."""
    config = decoder.config
    selecting = any(not decoder.streams(number) for number in range(decoder.host_layers))
    requested = decoder.policy.request_size(capacity) if selecting else 0
    row = batch * config.num_kv_heads * 2 * config.head_dim * decoder.dtype.itemsize
    # Two layers have their rows on the device at a time.
    moved = 0 if decoder.transfer.in_place and not decoder.hot_set else 2 * requested * row
    # Scores, what they are ranked by, and which of them pass, in float32.
    scores = 3 * FLOAT32 * batch * config.num_heads * capacity if selecting else 0
    if selecting and (block := decoder.policy.tail_block) > 1:  # with mean entries of the blocks
        scores += FLOAT32 * batch * config.num_heads * (capacity // block) * LEADING[-1]
    ends = FLOAT32 * batch * (2 * config.vocab_size + 4 * config.intermediate_size)
    ends += _arriving_bytes(decoder)
    return moved + scores + ends + _converted_bytes(decoder, batch, capacity)


def _arriving_bytes(decoder: Decoder) -> int:
    """Weights that are kept in host memory: two layers' worth is on the device, see `weights`."""
    if not decoder.weights_on_host:
        return 0
    return 2 * tree_bytes(in_host_memory(decoder.blueprint.layer_shapes))


def _converted_bytes(decoder: Decoder, batch: int, capacity: int) -> int:
    """The largest factor of a product, in float32 where it is not (see `compiler`)."""
    config = decoder.config
    if not decoder.transfer.in_place or decoder.dtype.itemsize == FLOAT32:
        return 0
    widest = max(config.vocab_size, 2 * config.intermediate_size)
    on_device = decoder.host_layers < config.num_layers
    rows = batch * config.num_kv_heads * config.head_dim * capacity if on_device else 0
    return FLOAT32 * max(config.hidden_size * widest, 2 * rows)
