"""The engine: prompts in, tokens out, and what it took.

    engine = Engine(load(path), policy=InfiniGen(budget=0.1))
    for step in engine.stream(["Once upon a time"], max_new_tokens=64):
        ...

A `Run` is one generation in progress: a batch of prompts with its cache. Python's part of a token
is to dispatch the next step and then to read the previous step's tokens, the one synchronisation
of a token; which rows are fetched never passes through here.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from infinigen_jax.cache import Cache
from infinigen_jax.checkpoint import Model
from infinigen_jax.compilations import compilations
from infinigen_jax.decode import SCHEDULES, STREAM_BLOCK, Decoder, Weights, steps
from infinigen_jax.errors import InputError
from infinigen_jax.memory import Placement, default_mesh
from infinigen_jax.planning import check_memory, plan_memory
from infinigen_jax.policies import InfiniGen, Policy
from infinigen_jax.prefill import prefill
from infinigen_jax.sampling import Sampling
from infinigen_jax.text import TextStream
from infinigen_jax.transfer import make_transfer

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Step:
    """One token of every sequence.

    Attributes:
        tokens: the new token of each prompt; None for a sequence that has ended.
        texts: the text that the new tokens complete, possibly empty; empty strings for a model
            without a tokenizer.
    """

    tokens: list[int | None]
    texts: list[str]


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a generation took.

    Attributes:
        prompt_tokens, new_tokens: totals over the batch.
        prefill_seconds: from the call to the first token.
        decode_seconds, decode_tokens_per_second: whole batch, without the first decode step, which
            may compile (unless it is the only one).
        fetched_fraction: rows fetched over rows cached, mean over steps, host layers, KV heads and
            sequences. Padding that a transfer moves beside them is not counted here...
        host_to_device_bytes_per_token: ...but it is here: all bytes of rows that were moved.
        host_cache_bytes, device_index_bytes: size of the host cache and of the policy's state.
        compilations_after_warmup: XLA compilations behind the first decode step; 0 is expected.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    decode_tokens_per_second: float
    fetched_fraction: float
    host_to_device_bytes_per_token: float
    host_cache_bytes: int
    device_index_bytes: int
    compilations_after_warmup: int
    policy: str
    schedule: str
    transfer: str


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of `Engine.generate`: new tokens and text of each prompt, and the stats."""

    tokens: list[list[int]]
    texts: list[str]
    stats: Stats


class Engine:
    """Generates text with a model, a policy and a schedule.

    Args:
        model: from `load`.
        policy: which cached rows are fetched; `InfiniGen()` by default.
        dense_layers: leading layers whose cache stays on the device in full (the paper: 2).
        schedule: "fused" or "layerwise"; equal results.
        transfer: "auto" or "xla".
        mesh: axes "data" and "model"; one device by default.

    Raises:
        InputError: for settings out of range.
    """

    def __init__(
        self,
        model: Model,
        *,
        policy: Policy | None = None,
        dense_layers: int = 2,
        schedule: str = "fused",
        transfer: str = "auto",
        mesh: Mesh | None = None,
    ):
        if dense_layers < 0:
            raise InputError(f"--dense-layers {dense_layers}: it must be 0 or more")
        if schedule not in SCHEDULES:
            raise InputError(f"--schedule {schedule}: use {' or '.join(SCHEDULES)}")
        chosen: Policy = InfiniGen() if policy is None else policy
        dense_layers = min(dense_layers, model.config.num_layers)
        self.model = model
        self.schedule = schedule
        self.mesh = mesh or default_mesh()
        self.decoder = Decoder(
            model.config, model.dtype, chosen, make_transfer(transfer), dense_layers, self.mesh
        )
        host_layers = range(dense_layers, model.config.num_layers)
        prepared = tuple(chosen.prepare(model, i) for i in host_layers)
        self.weights = jax.device_put(Weights(model.params, prepared), Placement(self.mesh).whole)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token numbers of a prompt.

        Raises:
            InputError: for an empty prompt or a token that the model does not have.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise InputError("--prompt: the prompt is empty; give at least one character")
            if self.model.tokenizer is None:
                raise InputError("this model has no tokenizer; give prompts as token numbers")
            prompt = self.model.tokenizer.encode(prompt)
        tokens = [int(token) for token in prompt]
        if not tokens:
            raise InputError("--prompt: the prompt has no tokens; give at least one")
        vocabulary = self.model.config.vocab_size
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise InputError(
                f"--prompt: token {max(tokens)} is not among the model's {vocabulary} tokens; "
                "the tokenizer is not this model's"
            )
        return tokens

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling | None = None,
    ) -> "Run":
        """Process prompts, given as token numbers, and draw their first tokens.

        Raises:
            InputError: if the model has too few positions, or memory is too small.
        """
        if not prompts:
            raise InputError("--prompt: give at least one prompt")
        if max_new_tokens < 1:
            raise InputError(f"--max-new-tokens {max_new_tokens}: it must be at least 1")
        longest = max(len(prompt) for prompt in prompts)
        limit = self.model.config.max_positions
        if longest + max_new_tokens > limit:
            raise InputError(
                f"--max-new-tokens {max_new_tokens}: a prompt of {longest} tokens leaves room for "
                f"{max(limit - longest, 0)}, for the model has {limit} positions; give fewer "
                "new tokens or a shorter prompt"
            )
        return Run(self, [list(p) for p in prompts], max_new_tokens, sampling or Sampling())

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        max_new_tokens: int = 64,
        *,
        ignore_eos: bool = False,
    ) -> Iterator[Step]:
        """Yield a Step per token until every sequence has ended or has `max_new_tokens`."""
        run = self.start([self.encode(p) for p in prompts], max_new_tokens, sampling)
        for tokens in run.tokens(ignore_eos=ignore_eos):
            yield Step(tokens, run.push_text(tokens))
        tail = run.finish_text()
        if any(tail):
            yield Step([None] * len(tail), tail)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        max_new_tokens: int = 64,
        *,
        ignore_eos: bool = False,
    ) -> Generation:
        """Everything at once; arguments as for `stream`."""
        run = self.start([self.encode(p) for p in prompts], max_new_tokens, sampling)
        for tokens in run.tokens(ignore_eos=ignore_eos):
            run.push_text(tokens)
        run.finish_text()
        return Generation(run.new_tokens, run.texts, run.stats())


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
        self, engine: Engine, prompts: list[list[int]], max_new_tokens: int, sampling: Sampling
    ):
        self._clock = time.perf_counter()
        self.engine = engine
        self.decoder = engine.decoder
        self.max_new_tokens = max_new_tokens
        self.prompt_lengths = np.array([len(p) for p in prompts], np.int32)
        longest = int(self.prompt_lengths.max())
        config = engine.model.config
        self.capacity = round_up_capacity(longest + max_new_tokens)
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
        self._counts: list[jax.Array] = []

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
        self._flush()  # compiles it; before the first step it only repeats what prefill wrote
        self._times: list[float] = []
        self._compiled = None
        self.new_tokens: list[list[int]] = [[] for _ in prompts]
        self.texts = [""] * len(prompts)
        self._streams: list[TextStream] | None = None

    def advance(self) -> None:
        """Dispatch one decode step: `drawn` becomes the next tokens. Does not wait."""
        if self._since_flush == self.decoder.policy.window:
            self._flush()
        self._since_flush += 1
        with jax.transfer_guard("disallow"):
            if self.engine.schedule == "fused":
                self._advance_fused()
            else:
                self._advance_layerwise()

    def _advance_fused(self) -> None:
        cache = self.cache
        local, lengths, self.drawn, self._step, count = self._steps.fused(
            self.engine.weights,
            cache.host,
            cache.states,
            cache.local,
            cache.lengths,
            self.drawn,
            self._seed,
            self._step,
            sampling=self._sampling,
        )
        self.cache = cache._replace(local=local, lengths=lengths)
        self._counts.append(count)

    def _advance_layerwise(self) -> None:
        cache, run, decoder = self.cache, self._steps, self.decoder
        weights, numbers, positions = self.engine.weights, self._numbers, cache.lengths
        carry = run.embed(weights.params["embedding"], self.drawn, positions)

        def following(number: int) -> Any:
            inside = 0 <= number < decoder.host_layers
            return decoder.following(weights, cache, number, numbers[number]) if inside else None

        if decoder.dense_layers == 0 and (first := following(0)) is not None:
            carry = run.first(carry, first, cache.host, positions)
        updated = []
        for i, params in enumerate(weights.params["layers"]):
            own = i - decoder.dense_layers
            ahead = following(own + 1)
            carry, local = (run.layer if ahead is None else run.fetching_layer)(
                params,
                carry,
                cache.local[i],
                cache.host,
                numbers[own] if own >= 0 else None,
                ahead,
                positions,
            )
            updated.append(local)
        self.drawn, self._step, lengths = run.draw(
            weights.params["embedding"],
            carry.x,
            self._seed,
            self._step,
            positions,
            sampling=self._sampling,
        )
        self.cache = cache._replace(local=tuple(updated), lengths=lengths)
        self._counts.append(carry.count)

    def _flush(self) -> None:
        if self.cache.host is not None:
            cache = self.cache
            host, states = self._steps.flush(
                self.engine.weights.policy, cache.local, cache.host, cache.states, cache.lengths
            )
            self.cache = cache._replace(host=host, states=states)
        self._since_flush = 0

    def tokens(self, *, ignore_eos: bool = False) -> Iterator[list[int | None]]:
        """Yield the drawn tokens, step by step; None for sequences that have ended."""
        eos = set() if ignore_eos else set(self.engine.model.config.eos_ids)
        ended = [False] * len(self.new_tokens)
        for number in range(self.max_new_tokens):
            drawn = self.drawn
            if number + 1 < self.max_new_tokens:
                self.advance()  # the device has its next step before the host reads this one's
            values: list[int | None] = [int(token) for token in np.asarray(drawn)]
            self._times.append(self._lap())
            if number == 1:
                self._compiled = compilations()
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

    def push_text(self, tokens: list[int | None]) -> list[str]:
        """Text that one step's tokens complete, per sequence."""
        tokenizer = self.engine.model.tokenizer
        if tokenizer is None:
            return [""] * len(tokens)
        if self._streams is None:
            self._streams = [TextStream(tokenizer) for _ in tokens]
        pairs = zip(self._streams, tokens, strict=True)
        return self._add_text(["" if t is None else stream.push([t]) for stream, t in pairs])

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
        steps_of = np.array([len(tokens) - 1 for tokens in self.new_tokens])  # decode steps
        later = slice(2, None) if len(self._times) > 2 else slice(1, None)
        timed = sum(len(range(*later.indices(len(tokens)))) for tokens in self.new_tokens)
        seconds = sum(self._times[later])
        moved = len(self._times[1:]) * self._bytes_per_step()
        return Stats(
            prompt_tokens=int(self.prompt_lengths.sum()),
            new_tokens=sum(map(len, self.new_tokens)),
            prefill_seconds=self.prefill_seconds,
            decode_seconds=seconds,
            decode_tokens_per_second=timed / seconds if seconds else 0.0,
            fetched_fraction=self._fetched_fraction(steps_of),
            host_to_device_bytes_per_token=moved / max(1, int(steps_of.sum())),
            host_cache_bytes=plan.host_cache,
            device_index_bytes=plan.index,
            compilations_after_warmup=compilations() - (self._compiled or compilations()),
            policy=decoder.policy.name,
            schedule=self.engine.schedule,
            transfer=decoder.transfer.name,
        )

    def _bytes_per_step(self) -> int:
        """Bytes of rows that one step moves to the device, padding included."""
        decoder = self.decoder
        rows = decoder.policy.request_size(self.capacity)
        width = 2 * decoder.config.head_dim * decoder.dtype.itemsize
        heads = decoder.config.num_kv_heads * decoder.host_layers
        return len(self.new_tokens) * heads * rows * width

    def _fetched_fraction(self, steps_of: np.ndarray) -> float:
        """Mean over the steps that made a token that was kept."""
        if not self.decoder.host_layers or not steps_of.sum():
            return 0.0
        number = steps_of.max()
        counts = np.stack([np.asarray(count) for count in self._counts[:number]])  # [steps, b]
        step = np.arange(number)[:, None]
        cached = (self.prompt_lengths + step) * self.decoder.host_layers
        fraction = counts / (cached * self.decoder.config.num_kv_heads)
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
