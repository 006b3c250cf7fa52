"""A generation in progress: a batch of prompts with its cache, stepped token by token.

For each token, Python dispatches the next step and then reads the tokens of the previous step, the
only synchronisation per token. Python never reads which rows are fetched.
"""

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax.decode.finite_check import refuse
from infinigen_jax.decode.state import Counts
from infinigen_jax.decode.steps import Watch
from infinigen_jax.engine.batch import Batch, Stepped
from infinigen_jax.engine.draft_length import DraftLength
from infinigen_jax.engine.encoding import encode
from infinigen_jax.engine.memory_plan import LENGTHS, Remedies, check_memory
from infinigen_jax.engine.prompts import Begun, PromptReader, batch_that_fits
from infinigen_jax.engine.results import (
    Choice,
    Clock,
    Stats,
    Step,
    choices_of,
    moved_by,
    rows_per_step,
)
from infinigen_jax.engine.runtime import Runtime
from infinigen_jax.engine.sampler import Drawn, Sampler, repetitions
from infinigen_jax.errors import InputError, ParameterError
from infinigen_jax.ops.used_slots import largest_below
from infinigen_jax.prefill.prefill import Notify, Prefilled
from infinigen_jax.programs.compilations import compilations
from infinigen_jax.sampling import LogProbs
from infinigen_jax.settings.sampling import Sampling
from infinigen_jax.text.detokenize import MOST_HELD, Texts

IDLE = -1  # the owner of a sequence without a prompt


class Run(Batch):
    """A generation in progress; create it with `Engine.start`.

    Attributes:
        drawn: [b] next tokens, not cached yet.
        owner: [b] prompt of each sequence, or IDLE; replaced, never changed in place.
        waiting: prompts that have no sequence yet.
        counts: numbers of selected and moved rows of each decode step.
        phases: memory of each phase of the run; the largest has to fit.
        capacity, slots: sizes of the cache, see `PromptReader`.
        new_tokens: tokens drawn and read back so far, per prompt.
        log_probs: log-probabilities of each new token, per prompt, if asked for.
        draft_length: chooser of the number of drafted tokens; None unless lossless.
    """

    draft_length: DraftLength | None = None

    def __init__(
        self,
        runtime: Runtime,
        prompts: list[list[int]],
        max_new_tokens: int,
        sampling: Sequence[Sampling],
        batch: int | None = None,
        begun: Begun | None = None,
        capacity: int | None = None,
        prefix: int = 0,
        fit: bool = False,
        log_probs: int | None = None,
        stops: Sequence[str] = (),
        continues: bool = False,
    ):
        """Prepare a run; arguments not listed are those of `Engine.start`.

        Args:
            begun: cache of a conversation's earlier turns, which the prompt extends.
            capacity: capacity of the cache; by default the size of the prompts and new tokens.
            fit: whether to reduce the batch size until it fits into memory.
            stops: strings of `checked_stops`.
        """
        self.clock = Clock()
        self.max_new_tokens = max_new_tokens
        self.prompt_lengths = np.array([len(p) for p in prompts], np.int32)
        self._prompts, self._sampling = prompts, sampling
        self._kind = all(s.greedy for s in sampling), any(s.penalises for s in sampling)
        self._streams = repetitions(prompts, sampling)
        longest = int(self.prompt_lengths.max())

        def reader(batch: int) -> PromptReader:
            room = longest + max_new_tokens + runtime.draft_room
            return PromptReader(runtime, prompts, room, batch, capacity, prefix)

        size = min(batch or len(prompts), len(prompts))
        if fit:
            size = batch_that_fits(runtime, reader, longest, size)
        self.owner, self._reader = np.arange(size), reader(size)
        self.waiting = collections.deque(range(size, len(prompts)))
        self.capacity, self.slots = self._reader.capacity, self._reader.slots
        # Not for the turns of a conversation, which all use the same programs.
        shortest = int(self.prompt_lengths.min()) if capacity is None else 0
        exceeded = largest_below(shortest, self.capacity)
        super().__init__(runtime, self.prompt_lengths[:size], exceeded)
        begun, waiting = begun or Begun(), bool(self.waiting)
        self.plan = self._reader.cache_plan(size)
        self.phases = self._reader.phases(size, begun.cached, waiting=waiting)
        if begun.cache is None:
            lengths = LENGTHS if capacity is None else ("`context`",)
            may_pool = capacity is None and not self._reader.shared
            remedies = Remedies(self.decoder, lengths, size, waiting, may_pool)
            for plan in self.phases:
                check_memory(plan, runtime.device, remedies)
        self.counts: list[Counts] = []
        self._dispatched: list[tuple[np.ndarray, np.ndarray]] = []  # see `_record`
        self._place: Sequence[jax.Array] = ()
        self._begun, self._alternatives = begun, log_probs
        self._admitted_lengths: set[int] = set()
        self._compiled, self._taking = None, False
        self.new_tokens: list[list[int]] = [[] for _ in prompts]
        self.log_probs: list[list[Choice]] = [[] for _ in prompts]
        contexts = [prompt[-MOST_HELD:] for prompt in prompts] if continues else ()
        self._texts = Texts(runtime.model, len(prompts), stops, contexts)

    def start(self, notify: Notify | None = None) -> None:
        """Read the first prompts, draw their first tokens and wait for them."""
        numbers, waiting = range(len(self.owner)), bool(self.waiting)
        self._reader.read_prefix(notify)
        read = self._reader.read(numbers, self._begun, notify, last=not waiting)
        self.cache, self._sampler = read.cache, self._make_sampler(numbers, self._begun.drawn)
        self.drawn, self._log_probs = self._draw(self._sampler, read)
        self._begun = Begun()  # its arrays were donated
        self.drawn.block_until_ready()
        self.clock.read_prompts()

    def _make_sampler(self, numbers: Sequence[int], drawn: int = 0) -> Sampler:
        """Return the sampler of prompts that have drawn the same number of tokens before."""
        fixed = self.runtime.mesh, self.runtime.model.config.vocab_size
        of_all: Any = self._sampling, self._prompts, self._streams
        sampling, prompts, streams = ([x[i] for i in numbers] for x in of_all)
        return Sampler(*fixed, sampling, prompts, streams, drawn, *self._kind)

    def _draw(self, sampler: Sampler, given: Prefilled | Stepped) -> Drawn:
        return sampler.draw(given.logits, given.best, log_probs=self._alternatives is not None)

    def advance(self) -> None:
        """Dispatch one decode step without waiting; `drawn` becomes the next tokens.

        Raises:
            InputError: if the cache is full.
        """
        stepped = self._step(self.drawn)
        self._place = stepped.place
        self.drawn, self._log_probs = self._draw(self._sampler, stepped)

    def predict(self, tokens: Sequence[int] | np.ndarray) -> Float[Array, "b v"]:
        """Dispatch one decode step over given tokens instead of drawn ones, without waiting.

        Return the natural log-probabilities of all next tokens, float32. `drawn` then holds the
        most probable next tokens, and `advance` can continue from them.

        Raises:
            InputError: if the cache is full.
        """
        return self.watch(None, tokens)[0]

    def watch(
        self, watch: Watch | None, tokens: Sequence[int] | np.ndarray
    ) -> tuple[Float[Array, "b v"], tuple[Any, ...]]:
        """Dispatch a step as `predict` does, and record values of every layer.

        `watch` is called between the layers, if any; see `Dispatcher.step`. Return the
        log-probabilities, and the results of `watch`, one per layer.
        """
        if self.idle.any():
            raise InputError("a prompt of this run has ended; start another run to score tokens")
        prompt: Any = tokens
        given = np.array(encode(self.runtime.model, prompt), np.int32)
        if len(given) != len(self.cached):
            count = len(self.cached)
            raise ParameterError("tokens", f"give {count}, one of each sequence", len(given))
        stepped = self._step(jax.device_put(given, self._at.batch), watch)
        self.drawn = stepped.best
        return jax.nn.log_softmax(stepped.logits), stepped.records

    def _step(self, tokens: Int[Array, " b"], watch: Watch | None = None) -> Stepped:
        if int(self.cached[~self.idle].max(initial=0)) >= self.capacity:
            raise InputError(f"the cache of {self.capacity} tokens is full; start a longer run")
        if not self.counts:
            # These change nothing before the first step, but compile programs that the first token
            # or a later step would otherwise wait for.
            self.rest()
            self.settle()
        self._record(self.owner, self.cached)
        stepped = super()._step(tokens, watch)
        self.counts.append(stepped.counts)
        return stepped

    @property
    def idle(self) -> np.ndarray:
        return self.owner == IDLE

    def _record(self, owner: np.ndarray, cached: np.ndarray, steps: int = 1) -> None:
        """Record dispatched steps after `cached` tokens, [b], and the owners at that time."""
        self._dispatched += [(owner, cached + step) for step in range(steps)]

    def _history(self, steps_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which sequences count in each step, and the tokens cached before it, [steps, b].

        The leading `steps_of` steps of each prompt count.
        """
        steps = np.array(self._dispatched, np.int32).reshape(-1, 2, len(self.owner))
        owner, cached = steps[:, 0], steps[:, 1]
        age = cached - self.prompt_lengths[owner]
        return (owner != IDLE) & (age < steps_of[owner]), cached

    def _admit(self) -> None:
        if self.waiting and self.can_join:
            for sequence in np.flatnonzero(self.idle)[: len(self.waiting)]:
                self._begin(self.waiting.popleft(), int(sequence))

    def _begin(self, prompt: int, sequence: int) -> None:
        """Process a prompt outside the batch; insert its cache and first token into a sequence."""
        self.drawn.block_until_ready()
        self.clock.step_went_on()
        before = compilations()
        read, sampler = self._reader.read([prompt]), self._make_sampler([prompt])
        first = self._draw(sampler, read)
        self._sampler.replace(sequence, sampler)
        drawn, size = Drawn(self.drawn, self._log_probs), int(self.prompt_lengths[prompt])
        self.drawn, self._log_probs = self._insert(sequence, read.cache, size, drawn, first)
        self._give(sequence, prompt)
        self.drawn.block_until_ready()
        self.clock.read_prompts()
        # Compilations for the first prompt of a chunk length belong to the warm-up.
        length = self._reader.chunk_length(size - self._reader.shared, 1)
        if self._compiled is not None and length not in self._admitted_lengths:
            self._compiled += compilations() - before
        self._admitted_lengths.add(length)

    def tokens(self, *, ignore_eos: bool = False) -> Iterator[list[int | None]]:
        """Yield the drawn tokens of each step; None for prompts that wait or have ended."""
        eos = self._begin_taking(ignore_eos)
        owner = list(self.owner)  # when the step was dispatched whose tokens come next
        while True:
            drawn, place, log_probs = self.drawn, self._place, self._log_probs
            # Once compiled, the next step is dispatched before the tokens of this step are read.
            ahead = self._compiled is not None and bool((self._needed() > 1).any())
            before, owner = owner, list(self.owner)
            if ahead:
                self.advance()
            same = [x if x == y else IDLE for x, y in zip(owner, before, strict=True)]
            refuse(place, self.decoder.config.num_layers, same)
            decoded = sum(bool(self.new_tokens[i]) for i in self.owner if i != IDLE)
            values = self._take(np.asarray(drawn), eos, log_probs)
            self.clock.step(decoded)
            yield values
            if self.idle.all() and not self.waiting:
                return
            if not ahead and self._needed().any():
                owner = list(self.owner)
                self.advance()  # not earlier: the first token does not wait for the compilation
                self._compiled = compilations()
            self._admit()

    def stream(self, *, ignore_eos: bool = False) -> Iterator[Step]:
        """Yield the steps of `tokens` with their texts; a prompt ends at a stop string in its text.

        A last step may have text that was held back: a part of a character or of a stop string.
        """
        for tokens in self.tokens(ignore_eos=ignore_eos):
            pieces = self._texts.push(tokens, self.ended)
            for sequence, prompt in enumerate(self.owner):
                if prompt != IDLE and self._texts.stopped(int(prompt)):
                    self._leave(sequence)
            choices = None
            if self._alternatives is not None:
                pairs = zip(tokens, self.log_probs, strict=True)
                choices = [None if token is None else known[-1] for token, known in pairs]
            yield Step(tokens, pieces, choices)
        if any(tail := self._texts.finish()):
            yield Step([None] * len(tail), tail)

    def _begin_taking(self, ignore_eos: bool) -> frozenset[int]:
        """Return the tokens that end a sequence; a run's tokens are taken by one iterator."""
        if self._taking:
            raise InputError("the tokens of a run are taken once; go on with the first iterator")
        self._taking = True
        return frozenset() if ignore_eos else self.runtime.model.eos_ids

    def _needed(self) -> np.ndarray:
        """Return the tokens each sequence may still get, [b] int32; 0 for idle ones."""
        most, new = self.max_new_tokens, self.new_tokens
        needed = [0 if i == IDLE else most - len(new[i]) for i in self.owner]
        return np.array(needed, np.int32)

    def _take(
        self, drawn: np.ndarray, eos: frozenset[int], log_probs: LogProbs | None
    ) -> list[int | None]:
        """Store the tokens of a step, below 0 for none; sequences of ended prompts become idle."""
        values: list[int | None] = [None] * len(self.new_tokens)
        choices = None if log_probs is None else choices_of(log_probs, self._alternatives or 0)
        for sequence, prompt in enumerate(self.owner):
            if prompt == IDLE or drawn[sequence] < 0:
                continue
            token, answer = int(drawn[sequence]), self.new_tokens[prompt]
            values[prompt] = token
            answer.append(token)
            if choices is not None:
                self.log_probs[prompt].append(choices[sequence])
            if token in eos or len(answer) == self.max_new_tokens:
                self._leave(sequence)
        return values

    def _give(self, sequence: int, prompt: int) -> None:
        """Assign a sequence to a prompt, or to none: IDLE."""
        self.owner = np.where(np.arange(len(self.owner)) == sequence, prompt, self.owner)

    def _leave(self, sequence: int) -> None:
        self._give(sequence, IDLE)
        self._sampler.leave(sequence)
        self._left = True

    def ended(self, prompt: int) -> bool:
        """Return whether a prompt gets no more tokens."""
        return prompt not in self.owner and prompt not in self.waiting

    def counted_steps(self, kept: Bool[np.ndarray, "n b"]) -> int:
        """Return the number of steps whose transfers count: a token was read (`_history`)."""
        return int(kept.any(axis=1).sum())

    @property
    def texts(self) -> list[str]:
        """Text of the steps of `stream` so far, per prompt."""
        return self._texts.whole

    def stats(self) -> Stats:
        """Return the statistics of the generation so far."""
        decoder, clock = self.decoder, self.clock
        steps_of = np.array([max(0, len(tokens) - 1) for tokens in self.new_tokens])  # decode steps
        seconds, timed = clock.decoding()
        late = 0 if self._compiled is None else compilations() - self._compiled
        kept, cached = self._history(steps_of)
        rows = rows_per_step(self.counts, kept)
        transfers = self.counted_steps(kept) * len(self.owner)
        moved = moved_by(self, rows, kept, cached, int(steps_of.sum()), transfers)
        return Stats(
            prompt_tokens=int(self.prompt_lengths.sum()),
            prompt_tokens_read=self._reader.tokens_read,
            new_tokens=sum(map(len, self.new_tokens)),
            prefill_seconds=clock.prefill,
            decode_seconds=seconds,
            decode_tokens_per_second=timed / seconds if seconds else 0.0,
            **moved.per_token(),
            pool_tokens=0 if decoder.pool is None else self.slots,
            pool_bytes=self.plan.pool,
            compilations_after_warmup=late,
            policy=decoder.policy.name,
            schedule=self.runtime.settings.schedule,
            transfer=decoder.transfer.name,
            rows=decoder.row_format.name,
        )
