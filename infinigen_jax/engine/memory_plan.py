"""Memory of a generation, estimated before anything is allocated; what to change if it is short."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from infinigen_jax.cuda.calls import LEADING
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.errors import MemoryShortageError
from infinigen_jax.machine.memory_limits import (
    available_device_bytes,
    available_host_bytes,
    pinned_bytes_in_use,
    pinned_pool_limit_bytes,
    tree_bytes,
    unused_pinned_bytes,
    widen_pool_to,
)
from infinigen_jax.messages import format_bytes
from infinigen_jax.models import ModelConfig, Params
from infinigen_jax.models.small_weights import decoded_size, small_dtype
from infinigen_jax.numeric import listed
from infinigen_jax.prefill.attention import CPU_TILE, DEVICE_TILE_BYTES
from infinigen_jax.prefill.prior_rows import BLOCK
from infinigen_jax.transfer.host_weights import in_host_memory

FLOAT32 = 4  # bytes
LEAST = 0.05  # smallest share of the memory for which a parameter is suggested
LENGTHS = ("the prompt length", "`max_new_tokens`")


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a generation, excluding the model's weights."""

    host_cache: int  # rows of the host layers
    dense_cache: int  # rows of the device layers, including those of sliding windows
    index: int  # state of the policy
    resident: int  # sinks, recent windows and sums of values
    hot: int  # hot sets with their directories
    pool: int  # directories of a pool
    # Temporaries of prefill, of a decode step, or of the larger of the two, including weights on
    # their way from host memory.
    workspace: int
    prefixes: int = 0  # a server's copies of prompt prefixes, in host memory that is not pinned

    @property
    def total(self) -> int:
        """Bytes of host and device memory."""
        return self.host_cache + self.prefixes + self.device

    @property
    def device(self) -> int:
        """Bytes of device memory."""
        kept = self.dense_cache + self.index + self.resident + self.hot + self.pool
        return kept + self.workspace

    def __add__(self, other: "MemoryPlan") -> "MemoryPlan":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return MemoryPlan(*(one + another for one, another in pairs))

    def at_work(self, workspace: int) -> "MemoryPlan":
        """Return the plan with another workspace."""
        return dataclasses.replace(self, workspace=workspace)


def plan_cache(decoder: Decoder, batch: int, capacity: int, slots: int | None = None) -> MemoryPlan:
    """Estimate the memory of the caches of `batch` sequences, without a workspace.

    `slots` is the host's capacity if it is limited.
    """
    slots = capacity if slots is None else slots
    config, policy, item = decoder.config, decoder.policy, decoder.dtype.itemsize
    row = batch * config.row_width * item
    stored_row = batch * config.num_kv_heads * decoder.row_format.width
    stored_row *= decoder.row_format.storage.itemsize
    selecting = len(decoder.selecting)
    index = selecting * _bytes(lambda: policy.init(config, batch, slots)) if selecting else 0
    hot = selecting * _bytes(lambda: decoder.empty_hot_set(batch, slots)) if selecting else 0
    pool = 0
    if decoder.pool is not None:
        entries = batch * config.num_kv_heads * slots
        pool = decoder.host_layers * 4 * entries
        pool += selecting * entries * decoder.pool.use_bytes
    blocks = decoder.slots.blocks(slots) if policy.has_tail else 0
    sums = FLOAT32 * batch * blocks * config.row_width // 2
    on_device = set(range(config.num_layers)) - set(decoder.on_host)
    dense = sum(
        config.of(layer).row_width * (decoder.ring_size(layer, capacity) or capacity)
        for layer in on_device
    )
    return MemoryPlan(
        host_cache=decoder.host_layers * slots * stored_row,
        dense_cache=batch * dense * item,
        index=index,
        resident=decoder.host_layers * decoder.slots.size * row + selecting * sums,
        hot=hot,
        pool=pool,
        workspace=0,
    )


def _widest(config: ModelConfig) -> tuple[int, int]:
    """Return the largest `query_width` and `row_width` of a model's layers."""
    kinds = config, config.windowed
    return max(of.query_width for of in kinds), max(of.row_width for of in kinds)


def _bytes(make: Callable[[], Any]) -> int:
    return tree_bytes(jax.eval_shape(make))


def prefill_bytes(decoder: Decoder, params: Params, batch: int, chunk: int, capacity: int) -> int:
    """Return the bytes of temporaries of a layer for `chunk` tokens of each prompt."""
    common = FLOAT32 * batch * decoder.config.vocab_size + _arriving_bytes(decoder, params)
    common += _decoded_bytes(decoder, params, batch * chunk, batch)
    if decoder.transfer.in_place:
        return _prefill_on_cpu(decoder, params, batch, chunk, capacity) + common
    config, item = decoder.config, decoder.dtype.itemsize
    queries, rows = _widest(config)
    width = 3 * config.hidden_size + (2 + config.attention_gates) * queries
    width += 3 * config.intermediate_size + 2 * rows
    # Scores and weights of a tile, in float32; two blocks of rows.
    blocks = 2 * batch * BLOCK * rows * item
    return batch * chunk * width * item + 2 * DEVICE_TILE_BYTES + blocks + common


def _prefill_on_cpu(decoder: Decoder, params: Params, batch: int, chunk: int, capacity: int) -> int:
    """Return the bytes of temporaries on a CPU.

    Attention and MLP run one after the other, in float32. Memory also holds the layer's input,
    output and new rows, and converted weights.
    """
    config, item, tokens = decoder.config, decoder.dtype.itemsize, batch * chunk
    queries, rows = _widest(config)
    block = min(BLOCK, capacity)
    # Queries in tiles, their weighted sums and the output; keys and values by head; the scores of a
    # tile; a block of earlier rows, and its values with unwritten rows masked.
    scores = min(CPU_TILE, chunk * config.num_heads // config.num_kv_heads) * block
    attention = tokens * (3 * queries + rows) + scores + batch * block * rows * 3 // 2
    if config.attention_gates:  # with attention's input, and the gate
        attention += tokens * (config.hidden_size + queries)
    mlp = tokens * 3 * config.intermediate_size
    if config.parallel_mlp:  # it may run before attention's arrays are released
        mlp += tokens * (config.hidden_size + queries + rows)
    weights = 0
    if _converts(decoder, params):
        projections = (2 + config.attention_gates) * queries + rows
        weights = config.hidden_size * (projections + 3 * config.intermediate_size)
    common = tokens * (2 * config.hidden_size + rows) * item
    return common + FLOAT32 * (max(attention, mlp) + weights)


def step_bytes(
    decoder: Decoder,
    params: Params,
    batch: int,
    capacity: int,
    drafted: int = 0,
    slots: int | None = None,
) -> int:
    """Return the bytes of temporaries of a decode step, or of a round with `drafted` tokens.

    The tokens include the one that is drawn in the end. Layers on the device have `capacity` tokens
    of each sequence; the others have `slots`, fewer with a pool.
    """
    tokens, config = max(1, drafted), decoder.config
    slots = capacity if slots is None else slots
    selecting = bool(decoder.selecting)
    requested = decoder.request_size(slots) if selecting else 0
    item = batch * decoder.dtype.itemsize
    row = item * config.row_width
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
    step = moved + scores + ends + _converted_bytes(decoder, params, batch, longest)
    if not drafted:
        return step
    cache = plan_cache(decoder, batch, capacity, slots)
    widths = [config.of(layer).row_width for layer in range(config.num_layers)]
    rings = sum(widths[x] * (decoder.ring_size(x, capacity) or 0) for x in on_device)
    copied = cache.resident + item * rings
    copied += cache.index if decoder.policy.observes else 0  # by `rounds.save`
    logits = 2 * FLOAT32 * batch * config.vocab_size
    return step + copied + drafted * (item * sum(widths) + logits)


def _arriving_bytes(decoder: Decoder, params: Params) -> int:
    """Return the device bytes of weights kept in host memory, two layers at a time."""
    if not decoder.weights_on_host:
        return 0
    return 2 * max(tree_bytes(in_host_memory(layer)) for layer in params["layers"])


def _decoded_bytes(decoder: Decoder, params: Params, rows: int, ends: int) -> int:
    """Return the bytes of decoded matrices, of a layer for `rows` or of the logits for `ends` rows.

    XLA may decode all matrices of a layer at the same time, on a CPU to float32.
    """
    embedding = params["embedding"]
    layer = max(decoded_size(layer, rows) for layer in params["layers"])
    logits = decoded_size({"": embedding.get("head", embedding["tokens"])}, ends)
    return max(layer, logits) * (FLOAT32 if decoder.transfer.in_place else decoder.dtype.itemsize)


def _converts(decoder: Decoder, params: Params) -> bool:
    """Return whether XLA converts matrices to float32: plain ones in two bytes, on a CPU."""
    two_bytes = decoder.transfer.in_place and decoder.dtype.itemsize < FLOAT32
    return two_bytes and small_dtype(params["layers"][0]) is None


def _converted_bytes(decoder: Decoder, params: Params, batch: int, tokens: int) -> int:
    """Return the bytes of the largest array that XLA converts to float32 for a product.

    The longest layer on the device has `tokens` tokens of each sequence.
    """
    config = decoder.config
    if not decoder.transfer.in_place or decoder.dtype.itemsize == FLOAT32:
        return 0
    widest = max(config.vocab_size, 2 * config.intermediate_size)
    matrix = config.hidden_size * widest if _converts(decoder, params) else 0
    return FLOAT32 * max(matrix, batch * _widest(config)[1] * tokens)


@dataclasses.dataclass(frozen=True)
class Remedies:
    """Advice on the parameters of a generation if memory is too small."""

    decoder: Decoder
    lengths: tuple[str, ...] = LENGTHS  # parameters, in backticks, that determine the capacity
    batch: int = 1
    waiting: bool = False  # whether prompts are admitted later, each prefilled outside the batch
    may_pool: bool = True

    def for_host(self, plan: MemoryPlan, *, unified: bool) -> str:
        decoder = self.decoder
        prefixes = ["`prefix_bytes`"] * bool(plan.prefixes)
        lower, use = [*self.lengths, *prefixes, *self._batch()], []
        stored = decoder.row_format
        if plan.host_cache and stored.exact and dataclasses.replace(stored, name="int8").groups:
            use.append("`rows` int8")
        use += self._pool()
        if unified:
            smaller = not stored.exact or decoder.pool is not None  # a host layer needs less
            lower += self._parts(plan, plan.total, dense=smaller)
        else:
            use += ["more `dense_layers`"] * bool(decoder.host_layers)
            use += ["`weights` device"] * decoder.weights_on_host
        return _advice(lower, use)

    def for_device(self, plan: MemoryPlan) -> str:
        lower = [*self.lengths, *self._batch(), *self._parts(plan, plan.device, dense=True)]
        use = ["`weights` host"] * (not self.decoder.weights_on_host) + self._pool()
        return _advice(lower, use)

    def _batch(self) -> list[str]:
        if self.batch > 1:
            return ["`batch`"]
        return ["the number of prompts to 1"] * self.waiting

    def _pool(self) -> list[str]:
        decoder = self.decoder
        pools = decoder.host_layers and decoder.policy.pools and decoder.pool is None
        return ["`pool.tokens`"] * bool(self.may_pool and pools)

    def _parts(self, plan: MemoryPlan, whole: int, *, dense: bool) -> Iterator[str]:
        """Return the parameters that determine the larger parts of the memory.

        `dense` states whether a dense layer needs more memory than a host layer.
        """
        sizes = {
            "`dense_layers`": plan.dense_cache if dense and self.decoder.dense_layers else 0,
            # With a pool, prompts are read in one piece.
            "`prefill_chunk`": plan.workspace if self.decoder.pool is None else 0,
            "`hot_set`": plan.hot,
            "`partial_ratio`": plan.index if hasattr(self.decoder.policy, "partial_ratio") else 0,
        }
        return (name for name, size in sizes.items() if size > LEAST * whole)


def _advice(lower: Sequence[str], use: Sequence[str]) -> str:
    parts = [f"{verb} {listed(names)}" for verb, names in (("lower", lower), ("use", use)) if names]
    return ", or ".join(parts)


class Shortage(NamedTuple):
    """Description of a shortage, and the memory that is too small: host, pinned or device."""

    what: str
    memory: str


def shortage(plan: MemoryPlan, device: Any, share: float = 1.0) -> Shortage | None:
    """Return the shortage if a plan exceeds a share of the free memory; None if it fits."""
    host = available_host_bytes() + unused_pinned_bytes(device)
    needed = plan.host_cache + plan.prefixes + (plan.device if device.platform == "cpu" else 0)
    if needed > share * host:
        cache = f"(KV cache {format_bytes(plan.host_cache)})"
        text = f"{format_bytes(needed)} of host memory {cache}, and {format_bytes(host)} are"
        return Shortage(f"{text} available", "host")
    pool = pinned_pool_limit_bytes(device)
    if pool is not None and plan.host_cache + (used := pinned_bytes_in_use(device)) > pool:
        text = f"{format_bytes(plan.host_cache)} of pinned memory for the KV cache, and JAX may"
        rest = f", of which {format_bytes(used)} are in use" if used else ""
        return Shortage(f"{text} take {format_bytes(pool)}{rest}", "pinned")
    room = None if device.platform == "cpu" else available_device_bytes(device)
    if room is not None and plan.device > share * room:
        text = f"{format_bytes(plan.device)} of device memory, and {format_bytes(room)} are free"
        return Shortage(text, "device")
    return None


def check_memory(plan: MemoryPlan, device: Any, remedies: Remedies) -> None:
    """Raise MemoryShortageError, with the sizes and the remedy, if a plan does not fit."""
    lack = shortage(plan, device)
    if lack is None:
        return
    if lack.memory == "pinned":
        remedy = widen_pool_to(plan.host_cache + pinned_bytes_in_use(device))
    elif lack.memory == "host":
        remedy = remedies.for_host(plan, unified=device.platform == "cpu")
    else:
        remedy = remedies.for_device(plan)
    raise MemoryShortageError(f"this generation needs {lack.what}: {remedy}")
