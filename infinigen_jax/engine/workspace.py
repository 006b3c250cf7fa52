"""Temporary memory of prefill and of a decode step."""

from infinigen_jax.cuda.scoring import LEADING
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.machine.memory_limits import tree_bytes
from infinigen_jax.models import Params
from infinigen_jax.models.small_weights import decoded_size
from infinigen_jax.prefill.attention import CPU_TILE, DEVICE_TILE_BYTES
from infinigen_jax.prefill.prior_rows import BLOCK
from infinigen_jax.transfer.host_weights import in_host_memory

FLOAT32 = 4  # bytes


def prefill_bytes(decoder: Decoder, params: Params, batch: int, chunk: int, capacity: int) -> int:
    """Return the bytes of temporaries of a layer for `chunk` tokens of each prompt."""
    common = FLOAT32 * batch * decoder.config.vocab_size + _arriving_bytes(decoder, params)
    common += _decoded_bytes(decoder, params, batch * chunk, batch)
    if decoder.transfer.in_place:
        return _prefill_on_cpu(decoder, batch, chunk, capacity) + common
    config, item = decoder.config, decoder.dtype.itemsize
    width = 3 * config.hidden_size + 2 * config.query_width
    width += 3 * config.intermediate_size + 4 * config.num_kv_heads * config.head_dim
    # Scores and weights of a tile, in float32; two blocks of rows.
    blocks = 2 * batch * config.num_kv_heads * BLOCK * 2 * config.head_dim * item
    return batch * chunk * width * item + 2 * DEVICE_TILE_BYTES + blocks + common


def _prefill_on_cpu(decoder: Decoder, batch: int, chunk: int, capacity: int) -> int:
    """Return the bytes of temporaries on a CPU.

    Attention and MLP run one after the other, in float32. Memory also holds the layer's input,
    output and new rows, and weights in float32 if they are stored in two bytes.
    """
    config, item, tokens = decoder.config, decoder.dtype.itemsize, batch * chunk
    queries = config.query_width
    rows = 2 * config.num_kv_heads * config.head_dim
    block = min(BLOCK, capacity)
    # Queries in tiles, their weighted sums and the output; keys and values by head; the scores of a
    # tile; a block of earlier rows, and its values with unwritten rows masked.
    scores = min(CPU_TILE, chunk * config.num_heads // config.num_kv_heads) * block
    attention = tokens * (3 * queries + rows) + scores + batch * block * rows * 3 // 2
    mlp = tokens * 3 * config.intermediate_size
    if config.parallel_mlp:  # it may run before attention's arrays are released
        mlp += tokens * (config.hidden_size + queries + rows)
    weights = 0
    if item < FLOAT32:
        weights = config.hidden_size * (2 * queries + rows + 3 * config.intermediate_size)
    common = tokens * (2 * config.hidden_size + rows) * item
    return common + FLOAT32 * (max(attention, mlp) + weights)


def step_bytes(
    decoder: Decoder,
    params: Params,
    batch: int,
    capacity: int,
    drafted: int = 0,
    resident: int = 0,
    slots: int | None = None,
) -> int:
    """Return the bytes of temporaries of a decode step, or of a round with `drafted` tokens.

    The tokens include the one that is drawn in the end. A draft copies `resident` bytes of rows for
    its undo. Layers on the device have `capacity` tokens of each sequence; the others have `slots`,
    fewer with a pool.
    """
    tokens, config = max(1, drafted), decoder.config
    slots = capacity if slots is None else slots
    selecting = bool(decoder.selecting)
    requested = decoder.request_size(slots) if selecting else 0
    row = batch * config.num_kv_heads * 2 * config.head_dim * decoder.dtype.itemsize
    # The rows of two layers are on the device at a time.
    moved = 0 if decoder.transfer.in_place and not decoder.hot_set else 2 * requested * row
    # Scores, ranking keys and masks, in float32.
    scores = 3 * FLOAT32 * batch * config.num_heads * slots if selecting else 0
    if selecting and (block := decoder.policy.tail_block) > 1:  # with mean entries of the blocks
        scores += FLOAT32 * batch * config.num_heads * (slots // block) * LEADING[-1]
    on_device = [layer for layer in range(config.num_layers) if layer not in decoder.on_host]
    longest = max((decoder.ring_size(x, capacity) or capacity for x in on_device), default=0)
    scores = max(scores, 2 * FLOAT32 * batch * config.num_heads * longest)  # scores and weights
    ends = FLOAT32 * batch * (2 * config.vocab_size + 4 * config.intermediate_size)
    ends += _arriving_bytes(decoder, params)
    ends += _decoded_bytes(decoder, params, batch * tokens, batch * tokens)
    step = moved + scores + ends + _converted_bytes(decoder, batch, longest)
    if not drafted:
        return step
    rows = config.num_layers * config.num_kv_heads * 2 * config.head_dim * decoder.dtype.itemsize
    return step + resident + batch * drafted * (rows + 2 * FLOAT32 * config.vocab_size)


def _arriving_bytes(decoder: Decoder, params: Params) -> int:
    """Return the device bytes of weights kept in host memory, two layers at a time."""
    if not decoder.weights_on_host:
        return 0
    return 2 * tree_bytes(in_host_memory(params["layers"][0]))


def _decoded_bytes(decoder: Decoder, params: Params, rows: int, ends: int) -> int:
    """Return the bytes of decoded matrices, of a layer for `rows` or of the logits for `ends` rows.

    XLA may decode all matrices of a layer at the same time.
    """
    embedding = params["embedding"]
    layer = decoded_size(params["layers"][0], rows)
    logits = decoded_size({"": embedding.get("head", embedding["tokens"])}, ends)
    return max(layer, logits) * decoder.dtype.itemsize


def _converted_bytes(decoder: Decoder, batch: int, tokens: int) -> int:
    """Return the bytes of the largest matrix that XLA converts to float32 for a product.

    The longest layer on the device has `tokens` tokens of each sequence.
    """
    config = decoder.config
    if not decoder.transfer.in_place or decoder.dtype.itemsize == FLOAT32:
        return 0
    widest = max(config.vocab_size, 2 * config.intermediate_size)
    rows = batch * config.num_kv_heads * config.head_dim * tokens
    return FLOAT32 * max(config.hidden_size * widest, 2 * rows)
