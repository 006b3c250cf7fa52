"""A generation in progress: a batch of prompts with its cache, stepped token by token.

Python's part of a token is to dispatch the next step and then to read the previous step's tokens,
the one synchronisation of a token; which rows are fetched never passes through here.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from infinigen_jax.cache import Cache
from infinigen_jax.compilations import compilations
from infinigen_jax.decode import STREAM_BLOCK, Counts
from infinigen_jax.errors import InputError
from infinigen_jax.memory import Placement
from infinigen_jax.planning import check_memory, plan_memory
from infinigen_jax.prefill import prefill
from infinigen_jax.sampling import Sampling
from infinigen_jax.steps import Watch, steps
from infinigen_jax.text import TextStream

if TYPE_CHECKING:
    from infinigen_jax.engine import Engine


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a generation took.

    Attributes:
        prompt_tokens, new_tokens: totals over the batch.
        prefill_seconds: from the call to the first token.
        decode_seconds, decode_tokens_per_second: whole batch, without the first decode step, which
            may compile (unless it is the only one).
        selected_fraction: rows selected over rows cached, mean over steps, host layers, KV heads
            and sequences.
        fetched_fraction: likewise of the rows that had to be fetched: those selected that the hot
            set did not have. Padding that a transfer moves beside them is not counted here...
        host_to_device_bytes_per_token: ...but it is here: all bytes of rows that were moved.
        hot_set_hit_rate: share of the rows selected that the hot set had; 0 without one.
        host_cache_bytes, device_index_bytes, hot_set_bytes: size of the host cache, of the policy's
            state and of the hot sets.
        compilations_after_warmup: XLA compilations behind the first decode step; 0 is expected.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    decode_tokens_per_second: float
    selected_fraction: float
    fetched_fraction: float
    hot_set_hit_rate: float
    host_to_device_bytes_per_token: float
    host_cache_bytes: int
    device_index_bytes: int
    hot_set_bytes: int
    compilations_after_warmup: int
    policy: str
    schedule: str
    transfer: str
    rows: str


class Run:
    """One generation in progress; made by `Engine.start`.

    Attributes:
        cache: what is cached now; replaced by every step (its old arrays are donated).
        plan: the memory it takes.
        new_tokens: tokens drawn so far and read back, per prompt.
        texts: their text.
    """

    cache: Cache

    def __init__(
        self, engine: "Engine", prompts: list[list[int]], max_new_tokens: int, sampling: Sampling
    ):
        self._clock = time.perf_counter()
        self.engine = engine
        self.decoder = engine.decoder
        self.max_new_tokens = max_new_tokens
        self.prompt_lengths = np.array([len(p) for p in prompts], np.int32)
        longest = int(self.prompt_lengths.max())
        config = engine.model.config
        # A flush writes a whole window.
        self.capacity = round_up_capacity(max(longest + max_new_tokens, self.decoder.policy.window))
        padded = min(round_up_prompt(longest), self.capacity, config.max_positions)
        self.plan = plan_memory(self.decoder, len(prompts), padded, self.capacity)
        check_memory(self.plan, engine.mesh.devices.flat[0])
        compilations()

        # The seed is an argument, not part of the compiled program.
        at = Placement(engine.mesh)
        self._seed = jax.device_put(np.uint32(sampling.seed), at.whole)
        self._sampling = dataclasses.replace(sampling, seed=0)
        self._steps = steps(self.decoder)
        self._numbers = [
            jax.device_put(np.int32(i), at.whole) for i in range(self.decoder.host_layers)
        ]
        self._step = jax.device_put(np.int32(1), at.whole)
        self._since_flush = 0
        self._counts: list[Counts] = []

        tokens = np.zeros((len(prompts), padded), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        self.cache, self.drawn = prefill(
            self.decoder,
            engine.weights,
            jax.device_put(tokens, at.batch),
            jax.device_put(self.prompt_lengths, at.batch),
            self.capacity,
            self._sampling,
            self._seed,
        )
        self.drawn.block_until_ready()
        self.prefill_seconds = self._lap()
        self._times: list[float] = []
        self._compiled = None
        self.new_tokens: list[list[int]] = [[] for _ in prompts]
        self.texts = [""] * len(prompts)
        self._streams: list[TextStream] | None = None

    def advance(self) -> None:
        """Dispatch one decode step: `drawn` becomes the next tokens. Does not wait.

        Raises:
            InputError: when the cache is full.
        """
        self._make_room()
        with jax.transfer_guard("disallow"):
            if self.engine.schedule == "fused":
                self._advance_fused()
            else:
                self._advance_layerwise()

    def score(self, tokens: np.ndarray, targets: np.ndarray) -> jax.Array:
        """One decode step over given tokens, whatever was drawn. Does not wait.

        `drawn` is then the likeliest next tokens, from which `advance` can go on.

        Args:
            tokens: [b] the tokens at the next position, int32.
            targets: [b] the tokens behind them, int32.

        Returns:
            [b] float32, the natural log-probabilities of the targets.

        Raises:
            InputError: when the cache is full.
        """
        return self._score(self._steps.scored, tokens, targets)[0]

    def watch(
        self, watch: Watch, tokens: np.ndarray, targets: np.ndarray
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """As `score`, with a look at every layer.

        Args:
            watch: is traced into the step; the same function object, the same compilation.

        Returns:
            The log-probabilities, and what `watch` recorded, one record a layer.
        """
        step = functools.partial(self._steps.watched, watch=watch)
        scores, records = self._score(step, tokens, targets)
        return scores, records

    def _score(self, step: Any, tokens: np.ndarray, targets: np.ndarray) -> tuple[Any, Any]:
        """The scores of a step, and the records of one that is watched."""
        self._make_room()
        cache, at = self.cache, Placement(self.engine.mesh)
        new, scores, self.drawn, counts, *records = step(
            self.engine.weights,
            cache.host,
            cache.states,
            cache.scales,
            cache.local,
            cache.hot,
            cache.lengths,
            jax.device_put(np.asarray(tokens, np.int32), at.batch),
            jax.device_put(np.asarray(targets, np.int32), at.batch),
        )
        self._replace(new)
        self._counts.append(counts)
        return scores, records[0] if records else ()

    def _replace(self, new: Cache) -> None:
        """Take over what a step replaced."""
        cache = self.cache
        states = new.states if self.decoder.policy.observes else cache.states
        self.cache = new._replace(host=cache.host, scales=cache.scales, states=states)

    def _make_room(self) -> None:
        if len(self._counts) >= self.capacity - int(self.prompt_lengths.max()):
            raise InputError(f"the cache of {self.capacity} tokens is full; start a longer run")
        # Before the first step a flush only repeats what prefill wrote; it is compiled there, so
        # that neither the first token nor a later step waits for it.
        if not self._counts or self._since_flush == self.decoder.policy.window:
            self._flush()
        self._since_flush += 1

    def _advance_fused(self) -> None:
        cache = self.cache
        new, self.drawn, self._step, counts = self._steps.fused(
            self.engine.weights,
            cache.host,
            cache.states,
            cache.scales,
            cache.local,
            cache.hot,
            cache.lengths,
            self.drawn,
            self._seed,
            self._step,
            sampling=self._sampling,
        )
        self._replace(new)
        self._counts.append(counts)

    def _advance_layerwise(self) -> None:
        cache, run, decoder = self.cache, self._steps, self.decoder
        weights, numbers, positions = self.engine.weights, self._numbers, cache.lengths
        carry = run.embed(weights.params["embedding"], self.drawn, positions)

        def following(number: int) -> Any:
            inside = 0 <= number < decoder.host_layers
            return decoder.following(weights, cache, number, numbers[number]) if inside else None

        hot, states, updated = list(cache.hot), list(cache.states), []
        if decoder.requests_first and (first := following(0)) is not None:
            carry, hot[0] = run.first(carry, first, hot[0], cache.host, positions)
        for i, params in enumerate(weights.params["layers"]):
            own = i - decoder.dense_layers
            target = decoder.fetches_for(i)
            ahead = following(target)
            observes = own >= 0 and decoder.policy.observes
            hands_over = ahead is not None and decoder.policy.ahead
            carry, local, new_hot, state = (run.fetching_layer if hands_over else run.layer)(
                params,
                carry,
                cache.local[i],
                None if ahead is None else hot[target],
                states[own] if observes else None,
                cache.host,
                decoder.own_layer(weights, cache, own, numbers[own] if own >= 0 else None),
                ahead,
                positions,
            )
            updated.append(local)
            if ahead is not None:
                hot[target] = new_hot
            if observes:
                states[own] = state
        self.drawn, self._step, lengths = run.draw(
            weights.params["embedding"],
            carry.x,
            self._seed,
            self._step,
            positions,
            sampling=self._sampling,
        )
        self.cache = cache._replace(
            local=tuple(updated), hot=tuple(hot), states=tuple(states), lengths=lengths
        )
        self._counts.append(carry.counts)

    def _flush(self) -> None:
        if self.cache.host is not None:
            cache = self.cache
            host, states = self._steps.flush(
                self.engine.weights.policy,
                cache.local,
                cache.host,
                cache.states,
                cache.scales,
                cache.lengths,
            )
            self.cache = cache._replace(host=host, states=states)
        self._since_flush = 0

    def tokens(self, *, ignore_eos: bool = False) -> Iterator[list[int | None]]:
        """Yield the drawn tokens, step by step; None for sequences that have ended."""
        eos = set() if ignore_eos else set(self.engine.model.config.eos_ids)
        ended = [False] * len(self.new_tokens)
        for number in range(self.max_new_tokens):
            drawn = self.drawn
            more = number + 1 < self.max_new_tokens
            if number and more:
                self.advance()  # the device has its next step before the host reads this one's
            values: list[int | None] = [int(token) for token in np.asarray(drawn)]
            self._times.append(self._lap())
            for i, token in enumerate(values):
                if ended[i]:
                    values[i] = None
                    continue
                assert token is not None
                self.new_tokens[i].append(token)
                ended[i] = token in eos
            yield values
            if all(ended):
                return
            if not number and more:
                self.advance()  # only now: the first token need not wait for the step's compilation
                self._compiled = compilations()

    def push_text(self, tokens: list[int | None]) -> list[str]:
        """Text that one step's tokens complete, per sequence."""
        if self._streams is None:
            try:
                tokenizer = self.engine.model.tokenizer
            except InputError:
                # Missing or damaged; a prompt of text would have been refused with this error,
                # for one of token numbers it is not needed.
                tokenizer = None
            if tokenizer is None:
                return [""] * len(tokens)
            self._streams = [TextStream(tokenizer) for _ in tokens]
        pairs = zip(self._streams, tokens, strict=True)
        # What an ended sequence held back is its text before anything is printed behind it.
        return self._add_text([s.finish() if t is None else s.push([t]) for s, t in pairs])

    def finish_text(self) -> list[str]:
        """Text that was held back because a character was incomplete, per sequence."""
        return self._add_text([stream.finish() for stream in self._streams or []])

    def _add_text(self, pieces: list[str]) -> list[str]:
        for i, piece in enumerate(pieces):
            self.texts[i] += piece
        return pieces

    def stats(self) -> Stats:
        """What the generation took, up to now."""
        decoder, plan = self.decoder, self.plan
        steps_of = np.array([max(0, len(tokens) - 1) for tokens in self.new_tokens])  # decode steps
        later = slice(2, None) if len(self._times) > 2 else slice(1, None)
        timed = sum(len(range(*later.indices(len(tokens)))) for tokens in self.new_tokens)
        seconds = sum(self._times[later], 0.0)
        rows = self._rows_per_step(steps_of)
        selected, fetched = (self._fraction(counts, steps_of) for counts in rows)
        return Stats(
            prompt_tokens=int(self.prompt_lengths.sum()),
            new_tokens=sum(map(len, self.new_tokens)),
            prefill_seconds=self.prefill_seconds,
            decode_seconds=seconds,
            decode_tokens_per_second=timed / seconds if seconds else 0.0,
            selected_fraction=selected,
            fetched_fraction=fetched,
            hot_set_hit_rate=1 - float(rows.moved.sum()) / max(1, int(rows.selected.sum())),
            host_to_device_bytes_per_token=self._bytes_moved(rows) / max(1, int(steps_of.sum())),
            host_cache_bytes=plan.host_cache,
            device_index_bytes=plan.index,
            hot_set_bytes=plan.hot,
            compilations_after_warmup=0
            if self._compiled is None
            else compilations() - self._compiled,
            policy=decoder.policy.name,
            schedule=self.engine.schedule,
            transfer=decoder.transfer.name,
            rows=decoder.row_format.name,
        )

    def fractions(self) -> tuple[float, float]:
        """Rows selected, and rows fetched, over rows cached: means over all steps so far."""
        steps_of = np.full(len(self.new_tokens), len(self._counts))
        rows = self._rows_per_step(steps_of)
        return self._fraction(rows.selected, steps_of), self._fraction(rows.moved, steps_of)

    def _rows_per_step(self, steps_of: np.ndarray) -> Counts:
        """Counts as numpy [steps, b] of the steps that made a token that was kept."""
        number = int(steps_of.max(initial=0))
        kept = np.arange(number)[:, None] < steps_of

        def stack(field: str) -> Any:
            rows = [np.asarray(getattr(counts, field)) for counts in self._counts[:number]]
            return np.where(kept, np.stack(rows), 0) if rows else np.zeros((0, len(steps_of)))

        return Counts(stack("selected"), stack("moved"))

    def _bytes_moved(self, rows: Counts) -> int:
        """Bytes of rows that were moved to the device, padding included."""
        decoder = self.decoder
        width = decoder.row_format.width * decoder.row_format.storage.itemsize
        requested = decoder.padded_rows(self.capacity)
        if requested is None:
            return int(rows.moved.sum()) * width
        heads = len(self.new_tokens) * decoder.config.num_kv_heads
        return len(self._times[1:]) * heads * requested * width

    def _fraction(self, counts: Any, steps_of: np.ndarray) -> float:
        """Of the rows cached: mean over the steps that made a token that was kept."""
        decoder = self.decoder
        if not decoder.host_layers or not steps_of.sum():
            return 0.0
        step = np.arange(len(counts))[:, None]
        cached = (self.prompt_lengths + step) * decoder.host_layers
        fraction = counts / (cached * decoder.config.num_kv_heads)
        return float(fraction[step < steps_of].mean())

    def _lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._clock = now - self._clock, now
        return elapsed


def round_up_capacity(tokens: int) -> int:
    """Capacities come in a few sizes, so that few programs are compiled; multiples of a block."""
    unit = 128 if tokens <= STREAM_BLOCK else STREAM_BLOCK
    return -(-tokens // unit) * unit


def round_up_prompt(tokens: int) -> int:
    """Padded prompt lengths: multiples of 64 up to 512, then of 512."""
    unit = 64 if tokens <= 512 else 512
    return -(-tokens // unit) * unit
