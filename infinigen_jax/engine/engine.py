"""The engine: prompts in, tokens out, and what it took.

engine = Engine(load(path), policy=InfiniGen(budget=0.1))
for step in engine.stream(["Once upon a time"], max_new_tokens=64):
    ...
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from infinigen_jax.cache.host_array import Placement, checked_mesh
from infinigen_jax.cache.pool import Pool
from infinigen_jax.cache.row_format import row_format
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Weights
from infinigen_jax.decode.steps import SCHEDULES
from infinigen_jax.engine.generation import Run
from infinigen_jax.engine.stats import Stats
from infinigen_jax.errors import InputError
from infinigen_jax.loading.load import DENSE_UNKNOWN, Model
from infinigen_jax.models import Params
from infinigen_jax.models.joined import join, split
from infinigen_jax.numeric import LARGEST_FACTOR, check_range
from infinigen_jax.policies import POLICIES, InfiniGen, Policy
from infinigen_jax.prefill.prefill import Notify
from infinigen_jax.programs.program import Program
from infinigen_jax.sampling import Sampling
from infinigen_jax.selection.select import budget_fraction
from infinigen_jax.speculation.layer_budgets import Curves
from infinigen_jax.text.detokenize import checked_text
from infinigen_jax.transfer import make_transfer
from infinigen_jax.transfer.host_weights import check_weights, placement

if TYPE_CHECKING:
    from infinigen_jax.engine.conversation import Conversation

Prompt = str | Sequence[int]
HOT_SET = 2.0  # by default, in multiples of a request
FUSED_LAYERS = 8  # most layers that are compiled as one program on a CPU
UNSETTLED = 8  # last tokens of a text, which what comes behind it may change


@dataclasses.dataclass(frozen=True)
class Step:
    """One token of every sequence.

    Attributes:
        tokens: the new token of each prompt; None for one that has ended or not begun yet.
        texts: the text that the new tokens complete, possibly empty; empty strings for a model
            without a tokenizer.
    """

    tokens: list[int | None]
    texts: list[str]


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of `Engine.generate`: new tokens and text of each prompt, and the stats."""

    tokens: list[list[int]]
    texts: list[str]
    stats: Stats


def check_pool(pool: Pool | None, policy: Policy) -> None:
    """Refuse a limit for a policy that cannot have one.

    Raises:
        InputError: naming the policies that can.
    """
    if pool is not None and not policy.pools:
        names = " or ".join(name for name, kind in POLICIES.items() if kind.pools)
        raise InputError(f"--pool-tokens: policy {policy.name} cannot have a limit; use {names}")


def curves_for(model: Model, policy: Policy) -> Curves | None:
    """What a budget is shared out among the layers by, if the policy wants that.

    Raises:
        InputError: if the model's conversion did not measure it.
    """
    if isinstance(policy, InfiniGen) and policy.layer_budgets == "calibrated":
        return model.curves(policy.lead > 0)
    return None


def prepare(decoder: Decoder, model: Model) -> tuple[Params, ...]:
    """What the policy needs to select for each host layer, with the layer's own budget if any."""

    def of_one(parts: Params) -> Params:
        return decoder.policy.prepare(dataclasses.replace(model, **parts), 0)

    # One program for all layers: what policies compute here would otherwise compile op by op.
    run = Program(of_one, (decoder, model.skew, model.speculate_from))
    prepared = []
    for number, layer in enumerate(decoder.on_host):
        weights = run(one_layer(model, layer))
        if number in decoder.budgets:
            share = budget_fraction(decoder.budgets[number]).as_integer_ratio()
            weights = weights | {"share": jnp.array(share, jnp.int32)}
        prepared.append(weights)
    return tuple(prepared)


def one_layer(model: Model, layer: int) -> Params:
    """The arrays of a model that a policy prepares a layer from, as those of a one-layer model."""

    def pick(values: Any) -> Any:
        return None if values is None else values[layer : layer + 1]

    moments = model.tail_moments
    return {
        "params": {"layers": model.params["layers"][layer : layer + 1]},
        "bases": pick(model.bases),
        "svd_bases": pick(model.svd_bases),
        "ahead": pick(model.ahead),
        "key_mean": pick(model.key_mean),
        "tail_moments": None if moments is None else tuple(map(pick, moments)),
    }


class Engine:
    """Generates text with a model, a policy and a schedule.

    Args:
        model: from `load`.
        policy: which cached rows are fetched; `InfiniGen()` by default.
        dense_layers: leading layers whose cache stays on the device in full; by default what the
            policy says: 2, but for InfiniGen those that need it, see `Model.dense_layers`.
        schedule: "fused", "layerwise" or "auto"; equal results. "auto" is layerwise for models of
            many layers on a CPU, whose start would grow with them, and fused elsewhere.
        transfer: "auto", "xla" or "cuda".
        rows: how the host stores a token's row: "auto" in the model's dtype, "int8" or "int4".
        hot_set: rows kept on the device after they were fetched, in multiples of the budget's: 0
            for none, else at least 1. By default 2 with the `cuda` transfer, and none with `xla`,
            where looking rows up costs more than moving them.
        pool: a limit of the host's cache; None for the whole context.
        weights: "device", or "host": the layers' weights are kept in host memory and brought for
            each step, see `weights`; equal results. `load` takes it as well.
        check: whether every stage's output is looked at for a NaN or an infinity, which ends a run
            with `checking.NotFiniteError`. Takes the fused schedule.
        prefill_chunk: most tokens of a prompt that are read at a time; by default
            `prefill.longest_chunk`. With a pool a prompt is read at once.
        mesh: devices, by the axes "data", which share the sequences, and "model", which share the
            KV heads; each keeps its part of the cache in its own host memory, and all weights. One
            device by default. Equal results.

    Raises:
        InputError: for settings out of range.
    """

    def __init__(
        self,
        model: Model,
        *,
        policy: Policy | None = None,
        dense_layers: int | None = None,
        schedule: str = "auto",
        transfer: str = "auto",
        rows: str = "auto",
        hot_set: float | None = None,
        pool: Pool | None = None,
        weights: str = "device",
        check: bool = False,
        prefill_chunk: int | None = None,
        mesh: Mesh | None = None,
    ):
        chosen: Policy = InfiniGen() if policy is None else policy
        if dense_layers is not None:
            check_range("--dense-layers", dense_layers, 0)
        if schedule not in ("auto", *SCHEDULES):
            raise InputError(f"--schedule {schedule}: use auto or {' or '.join(SCHEDULES)}")
        if hot_set is not None and not (hot_set == 0 or 1 <= hot_set <= LARGEST_FACTOR):
            raise InputError(
                f"--hot-set {hot_set}: it must be 0, or at least 1 and at most {LARGEST_FACTOR:g}"
            )
        check_pool(pool, chosen)
        check_weights(weights)
        if prefill_chunk is not None:
            check_range("--prefill-chunk", prefill_chunk, 1)
        row_format(rows, model.dtype, model.config.head_dim)
        self.model = model
        self.check = check
        self.prefill_chunk = prefill_chunk if pool is None else None
        self.mesh = checked_mesh(mesh, model.config.num_kv_heads)
        mover = make_transfer(transfer)
        if schedule == "auto":
            many = mover.in_place and model.config.num_layers > FUSED_LAYERS
            schedule = "layerwise" if many else "fused"
        self.schedule = schedule
        if hot_set is None:
            crosses = mover.masks and not mover.in_place
            hot_set = HOT_SET if crosses and chosen.reuses else 0.0
        chosen = chosen.fitted(model, mover.in_place, pool is not None)
        if dense_layers is None:
            dense_layers = chosen.dense_layers
        if dense_layers is None:
            dense_layers = DENSE_UNKNOWN
            if model.measured(chosen.lead, chosen.source):
                dense_layers = model.dense_layers(chosen.lead > 0)
        dense_layers = min(dense_layers, model.config.num_layers)
        self.decoder = Decoder(
            model.config,
            model.dtype,
            chosen,
            mover,
            dense_layers,
            self.mesh,
            rows,
            float(hot_set),
            pool,
            weights == "host",
            curves_for(model, chosen),
        )
        prepared = prepare(self.decoder, model)
        whole = Placement(self.mesh).whole
        joined = mover.in_place and weights == "device"
        width, given = model.config.query_width, model.params["layers"]
        layers = [join(x) if joined else split(x, width) for x in given]
        there = {"embedding": whole, "layers": placement(layers, weights, self.mesh)}
        params = jax.device_put(model.params | {"layers": layers}, there)
        self.weights = Weights(params, jax.device_put(prepared, whole))
        if joined:
            # Whoever lets go of the given model has each matrix once.
            self.model = dataclasses.replace(model, params=params)
            if "tokenizer" in vars(model):
                vars(self.model)["tokenizer"] = model.tokenizer

    def encode(self, prompt: Prompt, *, first: bool = True) -> list[int]:
        """Token numbers of a prompt.

        Args:
            first: it begins a text; what goes on with one gets no special tokens.

        Raises:
            InputError: for an empty prompt or a token that the model does not have.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise InputError("--prompt: the prompt is empty; give at least one character")
            checked_text("--prompt", prompt)
            if self.model.tokenizer is None:
                raise InputError("this model has no tokenizer; give prompts as token numbers")
            prompt = self.model.tokenizer.encode(prompt, add_special_tokens=first)
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
        batch: int | None = None,
        notify: Notify | None = None,
        prefix: int = 0,
        fit: bool = False,
    ) -> Run:
        """Process prompts, given as token numbers, and draw their first tokens.

        Args:
            batch: most prompts at once; the others are begun when one of them ends. By default
                all.
            notify: called with the tokens read of the longest prompt, and all of them, when a chunk
                of it is done; not for a prompt that is read in one piece.
            prefix: so many tokens, which all prompts begin with, are read once and stored once,
                see `prefix`. The result is that of prompts read in chunks, the first as long. What
                else prompts have in common is nothing to go by: it would change with the batch.
            fit: where `batch` is not given and memory is too small for all prompts at once, begin
                with as many as it has room for, and say so in a warning.

        Raises:
            InputError: if the model has too few positions, or memory is too small.
        """
        if not prompts:
            raise InputError("--prompt: give at least one prompt")
        check_range("--max-new-tokens", max_new_tokens, 1)
        if batch is not None:
            check_range("--batch", batch, 1)
        if batch is not None and self.mesh.shape["data"] > 1:
            raise InputError("--batch: not for sequences on several devices; give all prompts")
        if len(prompts) % self.mesh.shape["data"]:
            raise InputError(
                f"--prompt: {len(prompts)} prompts are not shared equally by "
                f"{self.mesh.shape['data']} devices; give a multiple"
            )
        longest = max(len(prompt) for prompt in prompts)
        limit = self.model.config.max_positions
        if longest + max_new_tokens > limit:
            raise InputError(
                f"--max-new-tokens {max_new_tokens}: a prompt of {longest} tokens leaves room for "
                f"{max(limit - longest, 0)}, for the model has {limit} positions; give fewer "
                "new tokens or a shorter prompt"
            )
        sampling = sampling or Sampling()
        given = [list(prompt) for prompt in prompts]
        fit = fit and batch is None and self.mesh.shape["data"] == 1
        return Run(self, given, max_new_tokens, sampling, batch, notify, prefix=prefix, fit=fit)

    def conversation(
        self, sampling: Sampling | None = None, context: int | None = None
    ) -> "Conversation":
        """A conversation, which keeps its cache from turn to turn.

        Args:
            context: tokens that it has room for; by default 4096, or the model's positions if
                they are fewer.

        Raises:
            InputError: for a context that the model does not have, or an engine with a pool.
        """
        from infinigen_jax.engine.conversation import Conversation

        return Conversation(self, sampling, context)

    def resume(self, path: str | Path) -> "Conversation":
        """Go on with a conversation that was saved, with the same model and settings.

        Raises:
            InputError: if the file is damaged, or of another model or other settings.
        """
        from infinigen_jax.engine.conversation import Conversation

        return Conversation.resume(self, path)

    def encode_behind(self, prefix: Prompt, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token numbers of prompts that all come behind the same; text is tokenised as a whole.

        Raises:
            InputError: as for `encode`, or if some are text and others are not.
        """
        whole = []
        if isinstance(prefix, str):
            checked_text("--prefix", prefix)
        for prompt in prompts:
            if not len(prefix):
                whole.append(self.encode(prompt))
            elif isinstance(prompt, str) and isinstance(prefix, str):
                whole.append(self.encode(prefix + prompt))
            elif isinstance(prompt, str) or isinstance(prefix, str):
                raise InputError("prefix: give it as the prompts, as text or as token numbers")
            else:
                whole.append(self.encode([*prefix, *prompt]))
        return whole

    def prefix_tokens(self, prefix: Prompt) -> int:
        """How many tokens a prefix gives all prompts behind it, whatever they are.

        The last ones of text are left out: where a word goes on, it may be cut into others.
        """
        if not isinstance(prefix, str):
            return len(prefix)
        return max(0, len(self.encode(prefix)) - UNSETTLED) if prefix else 0

    def _begin(
        self,
        prompts: Sequence[Prompt],
        prefix: Prompt,
        max_new_tokens: int,
        sampling: Sampling | None,
        batch: int | None,
    ) -> Run:
        """As `start`, for text as well."""
        encoded = self.encode_behind(prefix, prompts)
        shared = self.prefix_tokens(prefix)
        return self.start(encoded, max_new_tokens, sampling, batch, prefix=shared, fit=True)

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        max_new_tokens: int = 64,
        *,
        ignore_eos: bool = False,
        batch: int | None = None,
        prefix: Prompt = "",
    ) -> Iterator[Step]:
        """Yield a Step per token until every sequence has ended or has `max_new_tokens`.

        Args:
            batch: most sequences at once, see `start`; by default as many as fit the memory.
            prefix: what comes before every prompt, text if they are text; read and stored once.
        """
        run = self._begin(prompts, prefix, max_new_tokens, sampling, batch)
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
        batch: int | None = None,
        prefix: Prompt = "",
    ) -> Generation:
        """The whole result, in the prompts' order; arguments as for `stream`."""
        run = self._begin(prompts, prefix, max_new_tokens, sampling, batch)
        for tokens in run.tokens(ignore_eos=ignore_eos):
            run.push_text(tokens)
        run.finish_text()
        return Generation(run.new_tokens, run.texts, run.stats())
