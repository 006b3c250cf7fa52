"""A generation in progress: a batch of prompts with its cache, stepped token by token.

Python's part of a token is to dispatch the next step and then to read the previous step's tokens,
the one synchronisation of a token; which rows are fetched never passes through here.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from infinigen_jax.batching import IDLE, Owners, admission
from infinigen_jax.cache import Cache
from infinigen_jax.carry import Counts
from infinigen_jax.checking import Places, refuse
from infinigen_jax.compilations import compilations
from infinigen_jax.errors import InputError
from infinigen_jax.host_attention import STREAM_BLOCK
from infinigen_jax.memory import Placement
from infinigen_jax.planning import MemoryPlan, check_memory, plan_memory
from infinigen_jax.prefill import Notify, chunk_for, extend, prefill
from infinigen_jax.prefix import common_prefix, plan_sharing, spread
from infinigen_jax.sampling import Sampling
from infinigen_jax.stats import Stats, bytes_moved, fraction, rows_per_step
from infinigen_jax.steps import Watch, steps
from infinigen_jax.text import TextStream
from infinigen_jax.weights import bring, merged

if TYPE_CHECKING:
    from infinigen_jax.engine import Engine


class Begun(NamedTuple):
    """A cache that a run goes on with.

    Attributes:
        cache: None for an empty one; its arrays are donated.
        cached: how many of each prompt's tokens it has, the first ones; fewer than all.
        drawn: tokens drawn before, for each prompt.
    """

    cache: Cache | None
    cached: list[int]
    drawn: int = 0


class Run:
    """One generation in progress; made by `Engine.start`.

    Attributes:
        cache: what is cached now; replaced by every step (its old arrays are donated).
        plan: the memory it takes.
        owners: which prompt each row of the batch belongs to.
        capacity: tokens of a sequence that the layers on the device have room for.
        slots: rows of a sequence that the host has room for; as many, but for a pool.
        new_tokens: tokens drawn so far and read back, per prompt.
        texts: their text.
        tokens_read: of the prompts, all that were computed: not those that were cached.
    """

    cache: Cache

    def __init__(
        self,
        engine: "Engine",
        prompts: list[list[int]],
        max_new_tokens: int,
        sampling: Sampling,
        batch: int | None = None,
        notify: Notify | None = None,
        begun: Begun | None = None,
        capacity: int | None = None,
        share: bool = False,
    ):
        """As in `Engine.start`, and:

        Args:
            begun: go on with this cache, of the first prompts.
            capacity: of its layers, if it is not what the prompts and the new tokens need.
            share: read what all prompts begin with once, and store it once, see `prefix`.
        """
        self._clock = time.perf_counter()
        self.engine = engine
        self.decoder = engine.decoder
        self.max_new_tokens = max_new_tokens
        self.prompt_lengths = np.array([len(p) for p in prompts], np.int32)
        longest = int(self.prompt_lengths.max())
        self._prompts = prompts
        self.owners = Owners(self.prompt_lengths, min(batch or len(prompts), len(prompts)))
        # A flush writes a whole window.
        tokens = longest + max_new_tokens
        self._sharing = None
        if share and (prefix := common_prefix(prompts)):
            self._sharing = plan_sharing(self.decoder, prefix, tokens, self.owners.rows)
            capacity = self._sharing.capacity
        self.capacity = capacity or round_up_capacity(max(tokens, self.decoder.policy.window))
        self.slots = self.decoder.host_slots(tokens, self.capacity)
        rows = self.owners.rows
        begun = begun or Begun(None, [0] * rows)
        chunk = self._chunk_length(longest - min(begun.cached), rows)
        self.plan = self._plan(rows, 0, chunk)
        self._admission = admission(self.decoder) if self.owners.waiting else None
        # A prompt that is admitted later is processed beside the batch, and so is a prefix.
        beside = (self._admission is not None) + (self._sharing is not None)
        if begun.cache is None:
            check_memory(self._plan(rows, beside, chunk), engine.mesh.devices.flat[0])
        compilations()

        # The seed is an argument, not part of the compiled program.
        at = Placement(engine.mesh)
        self._seed = jax.device_put(np.uint32(sampling.seed), at.whole)
        self._sampling = dataclasses.replace(sampling, seed=0)
        self._steps = steps(self.decoder)
        self._numbers = [
            jax.device_put(np.int32(i), at.whole) for i in range(self.decoder.host_layers)
        ]
        self._step = jax.device_put(np.full(rows, begun.drawn + 1, np.int32), at.batch)
        self._since_flush = 0
        self.tokens_read = 0
        self._counts: list[Counts] = []
        self._place: list[jax.Array] = []
        self._prefix: Cache | None = None
        if self._sharing is not None:
            prefix = [prompts[0][: self._sharing.tokens]]
            self._prefix = self._read(prefix, [0], Begun(None, [0]), notify)[0]
        self.cache, self.drawn = self._prefill(range(rows), begun, notify)
        if self._admission is None:
            self._prefix = None
        self.drawn.block_until_ready()
        self.prefill_seconds = self._lap()
        self._times: list[float] = []
        self._decoded: list[int] = []
        self._admitted_lengths: set[int] = set()
        self._compiled = None
        self.new_tokens: list[list[int]] = [[] for _ in prompts]
        self.texts = [""] * len(prompts)
        self._streams: dict[int, TextStream] = {}

    def _plan(self, rows: int, beside: int, chunk: int) -> MemoryPlan:
        """Memory of a batch, and of some sequences beside it."""
        together = rows + beside
        plan = plan_memory(self.decoder, together, chunk, self.capacity, self.slots)
        if self._sharing is None:
            return plan
        slots = self._sharing.host_rows(rows) * self._sharing.own + beside * self.capacity
        host = plan.host_cache // (together * self.capacity) * slots
        return dataclasses.replace(plan, host_cache=host)

    def _chunk_length(self, longest: int, rows: int) -> int:
        """Of prompts of this many rows."""
        most = self.engine.prefill_chunk
        return min(chunk_for(self.decoder, rows, longest, most), self.capacity)

    def _prefill(
        self, numbers: Sequence[int], begun: Begun | None = None, notify: Notify | None = None
    ) -> tuple[Cache, jax.Array]:
        """The cache of these prompts alone, and their first tokens."""
        begun = begun or Begun(None, [0] * len(numbers))
        if self._prefix is not None:
            assert self._sharing is not None
            cache = spread(self.decoder, self._prefix, len(numbers), self._sharing)
            begun = Begun(cache, [self._sharing.tokens] * len(numbers))
        return self._read([self._prompts[i] for i in numbers], numbers, begun, notify)

    def _read(
        self,
        prompts: list[list[int]],
        numbers: Sequence[int],
        begun: Begun,
        notify: Notify | None,
    ) -> tuple[Cache, jax.Array]:
        """Process what is not cached of prompts of these numbers."""
        rest = [prompt[n:] for prompt, n in zip(prompts, begun.cached, strict=True)]
        lengths = np.array([len(prompt) for prompt in rest], np.int32)
        tokens = np.zeros((len(rest), int(lengths.max())), np.int32)
        for row, prompt in zip(tokens, rest, strict=True):
            row[: len(prompt)] = prompt
        self.tokens_read += int(lengths.sum())
        weights, sampling, seed = self.engine.weights, self._sampling, self._seed
        places = Places(self.decoder, weights.params["embedding"], len(prompts))
        chunk, look = self.engine.prefill_chunk, places if self.engine.check else None
        if begun.cache is None:
            given = (self.decoder, weights, tokens, lengths, self.capacity)
            outcome = prefill(*given, sampling, seed, self.slots, chunk, notify, look)
        else:
            step = np.full(len(prompts), begun.drawn, np.int32)
            step = jax.device_put(step, Placement(self.engine.mesh).batch)
            given = (self.decoder, weights, begun.cache, tokens, lengths)
            outcome = extend(*given, sampling, seed, step, chunk, notify, look)
        refuse([places.place], self.decoder.config.num_layers, numbers)
        return outcome

    def settle(self) -> None:
        """Bring every row that is cached to the host."""
        self._flush()

    def advance(self) -> None:
        """Dispatch one decode step: `drawn` becomes the next tokens. Does not wait.

        Raises:
            InputError: when the cache is full.
        """
        self._make_room()
        with jax.transfer_guard("disallow"):
            if self.engine.schedule == "fused" or self.engine.check:
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
            cache.pool,
        )
        self._replace(new)
        self._counts.append(counts)
        return scores, records[0] if records else ()

    def _replace(self, new: Cache) -> None:
        """Take over what a step replaced."""
        cache = self.cache
        states = new.states if self.decoder.policy.observes else cache.states
        self.cache = new._replace(
            host=cache.host, scales=cache.scales, states=states, pool=cache.pool
        )

    def _make_room(self) -> None:
        if int(self.owners.cached.max()) >= self.capacity:
            raise InputError(f"the cache of {self.capacity} tokens is full; start a longer run")
        # Before the first step a flush only repeats what prefill wrote; it is compiled there, so
        # that neither the first token nor a later step waits for it.
        if not self._counts or self._since_flush == self.decoder.policy.window:
            self._rest()
            self._flush()
        self._since_flush += 1
        self.owners.step()

    def _advance_fused(self) -> None:
        cache, step = self.cache, self._steps.checked if self.engine.check else self._steps.fused
        new, self.drawn, self._step, counts, *self._place = step(
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
            pool=cache.pool,
        )
        self._replace(new)
        self._counts.append(counts)

    def _advance_layerwise(self) -> None:
        cache, run, decoder = self.cache, self._steps, self.decoder
        weights, numbers, positions = self.engine.weights, self._numbers, cache.lengths
        carry = run.embed(weights.params["embedding"], self.drawn, positions)

        def following(number: int) -> Any:
            there = 0 <= number < decoder.host_layers
            return decoder.following(weights, cache, number, numbers[number]) if there else None

        hot, states, updated = list(cache.hot), list(cache.states), []
        if decoder.requests_first and (first := following(0)) is not None:
            carry, hot[0] = run.first(carry, first, hot[0], cache.host, positions)
        stored, params = weights.params["layers"], weights.params["layers"][0]
        if decoder.weights_on_host:
            params, x = bring(decoder.mesh, params, carry.x)
            carry = carry._replace(x=x)
        for i in range(len(stored)):
            own = decoder.host_number(i)
            target = decoder.fetches_for(i)
            ahead = following(target)
            observes = own >= 0 and decoder.policy.observes
            hands_over = ahead is not None and decoder.policy.ahead
            run_layer = run.fetching_layer if hands_over else run.layer
            upcoming = stored[i + 1 : i + 2]
            carry, local, new_hot, state, coming = run_layer(
                params,
                carry,
                cache.local[i],
                None if ahead is None else hot[target],
                states[own] if observes else None,
                cache.host,
                decoder.own_layer(weights, cache, own, numbers[own] if own >= 0 else None),
                ahead,
                positions,
                stored=upcoming if decoder.weights_on_host else [],
            )
            if upcoming:
                params = upcoming[0] if coming is None else merged(upcoming[0], coming)
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
        if self.cache.pool:
            self.cache = self._steps.flush_pool(self.engine.weights.policy, self.cache)
        elif self.cache.host is not None:
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

    def _rest(self) -> None:
        """Set rows back that belong to nobody, in a run that admits prompts."""
        if self._admission is None:
            return
        idle = jax.device_put(self.owners.idle, Placement(self.engine.mesh).batch)
        self.cache = self.cache._replace(lengths=self._admission.rest(self.cache.lengths, idle))
        self.owners.rest()

    def _admit(self) -> None:
        """Give rows that became idle to prompts that wait."""
        if self._admission is None:
            return
        policy = self.decoder.policy
        paged = policy.paged or self.decoder.pool is not None  # rows give way at a flush
        if paged and self._since_flush < policy.window and not self.owners.idle.all():
            return  # its rows are all at the same step of the window
        idle = np.flatnonzero(self.owners.idle)
        for row in idle[: len(self.owners.waiting)]:
            self._begin(self.owners.waiting.popleft(), int(row))
        if self.owners.idle.any():
            self._rest()
        if len(idle):
            self._flush()  # as before a first step

    def _begin(self, prompt: int, row: int) -> None:
        """Process a prompt beside the batch and put its cache and first token into a row."""
        assert self._admission is not None
        self.drawn.block_until_ready()
        self._times[-1] += self._lap()  # of a step that is under way
        before = compilations()
        one, first = self._prefill([prompt])
        at = jax.device_put(np.int32(row), Placement(self.engine.mesh).whole)
        self.cache, self.drawn, self._step = self._admission.insert(
            self.cache, self.drawn, self._step, one, first, at
        )
        self.owners.give(row, prompt)
        self.drawn.block_until_ready()
        self.prefill_seconds += self._lap()
        # The first prompt of a chunk length belongs to the warm-up.
        length = self._chunk_length(int(self.prompt_lengths[prompt]), 1)
        if self._compiled is not None and length not in self._admitted_lengths:
            self._compiled += compilations() - before
        self._admitted_lengths.add(length)

    def tokens(self, *, ignore_eos: bool = False) -> Iterator[list[int | None]]:
        """Yield the drawn tokens, step by step; None for prompts that wait or have ended."""
        eos = set() if ignore_eos else set(self.engine.model.config.eos_ids)
        while True:
            drawn, place = self.drawn, self._place
            # Once steps are compiled, the device has its next one before the host reads this one's.
            ahead = self._compiled is not None and self._goes_on(1)
            if ahead:
                self.advance()
            refuse(place, self.decoder.config.num_layers, self.owners.owner)
            values = self._take(np.asarray(drawn), eos)
            yield values
            if self.owners.idle.all() and not self.owners.waiting:
                return
            if not ahead and self._goes_on(0):
                self.advance()  # only now: the first token need not wait for compilation
                self._compiled = compilations()
            self._admit()

    def _goes_on(self, unread: int) -> bool:
        """Whether a row wants more than the tokens that are read and `unread` ones."""
        made = [len(self.new_tokens[i]) for i in self.owners.owner if i != IDLE]
        return any(number + unread < self.max_new_tokens for number in made)

    def _take(self, drawn: np.ndarray, eos: set[int]) -> list[int | None]:
        """Keep the tokens of a step; a row whose prompt has ended with it becomes idle."""
        self._times.append(self._lap())
        values: list[int | None] = [None] * len(self.new_tokens)
        decoded = 0
        for row, prompt in enumerate(self.owners.owner):
            if prompt == IDLE:
                continue
            token, made = int(drawn[row]), self.new_tokens[prompt]
            values[prompt] = token
            decoded += bool(made)
            made.append(token)
            if token in eos or len(made) == self.max_new_tokens:
                self.owners.leave(row)
        self._decoded.append(decoded)
        return values

    def push_text(self, tokens: list[int | None]) -> list[str]:
        """Text that one step's tokens complete, per sequence."""
        pieces = [""] * len(tokens)
        for i, token in enumerate(tokens):
            if token is not None and self._tokenizer is not None:
                stream = self._streams.get(i) or TextStream(self._tokenizer)
                self._streams[i] = stream
                pieces[i] = stream.push([token])
            elif i in self._streams:
                # What was held back is text before anything is printed behind it.
                pieces[i] = self._streams.pop(i).finish()
        return self._add_text(pieces)

    def finish_text(self) -> list[str]:
        """Text that was held back because a character was incomplete, per sequence."""
        pieces = [""] * len(self.texts)
        while self._streams:
            i, stream = self._streams.popitem()
            pieces[i] = stream.finish()
        return self._add_text(pieces)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        try:
            return self.engine.model.tokenizer
        except InputError:
            # Missing or damaged; a prompt of text would have been refused with this error, for
            # one of token numbers it is not needed.
            return None

    def _add_text(self, pieces: list[str]) -> list[str]:
        for i, piece in enumerate(pieces):
            self.texts[i] += piece
        return pieces

    def stats(self) -> Stats:
        """What the generation took, up to now."""
        decoder, plan = self.decoder, self.plan
        steps_of = np.array([max(0, len(tokens) - 1) for tokens in self.new_tokens])  # decode steps
        later = slice(2, None) if len(self._times) > 2 else slice(1, None)
        timed = sum(self._decoded[later])
        seconds = sum(self._times[later], 0.0)
        rows, (selected, fetched) = self._rows(steps_of)
        moved = bytes_moved(decoder, rows, self.slots, self.owners.rows, len(self._times[1:]))
        return Stats(
            prompt_tokens=int(self.prompt_lengths.sum()),
            prompt_tokens_read=self.tokens_read,
            new_tokens=sum(map(len, self.new_tokens)),
            prefill_seconds=self.prefill_seconds,
            decode_seconds=seconds,
            decode_tokens_per_second=timed / seconds if seconds else 0.0,
            selected_fraction=selected,
            fetched_fraction=fetched,
            hot_set_hit_rate=1 - float(rows.moved.sum()) / max(1, int(rows.selected.sum())),
            host_to_device_bytes_per_token=moved / max(1, int(steps_of.sum())),
            host_cache_bytes=plan.host_cache,
            device_index_bytes=plan.index,
            hot_set_bytes=plan.hot,
            pool_tokens=0 if decoder.pool is None else self.slots,
            pool_bytes=plan.pool,
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
        steps_of = np.full(len(self.new_tokens), self.capacity)  # however many there were
        return self._rows(steps_of)[1]

    def _rows(self, steps_of: np.ndarray) -> tuple[Counts, tuple[float, float]]:
        """Rows of the steps that made a token that was kept, and as fractions of those cached."""
        kept, cached = self.owners.history(steps_of)
        rows = rows_per_step(self._counts, kept)
        cached = np.minimum(cached, self.slots)
        selected, moved = (fraction(self.decoder, of, kept, cached) for of in rows)
        return rows, (selected, moved)

    def _lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._clock = now - self._clock, now
        return elapsed


def round_up_capacity(tokens: int) -> int:
    """Capacities come in a few sizes, so that few programs are compiled; multiples of a block."""
    unit = 128 if tokens <= STREAM_BLOCK else STREAM_BLOCK
    return -(-tokens // unit) * unit
