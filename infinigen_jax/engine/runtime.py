"""A model with its settings, decoder and placed weights, shared by all parts of the engine."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from infinigen_jax.cache.host_array import Placement, checked_mesh
from infinigen_jax.cache.row_format import row_format
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Weights
from infinigen_jax.engine.draft_length import MOST, size_of
from infinigen_jax.engine.settings import EngineSettings, check_fitted
from infinigen_jax.errors import InputError, ParameterError
from infinigen_jax.loading.load import DENSE_UNKNOWN, Model
from infinigen_jax.models import Params
from infinigen_jax.models.base import split_layers
from infinigen_jax.models.linear import join
from infinigen_jax.models.small_weights import has_few_bits, shrink, small_dtype
from infinigen_jax.policies import Full, InfiniGen, Policy
from infinigen_jax.programs.program import Program
from infinigen_jax.selection.select import budget_fraction
from infinigen_jax.settings.engine import EngineOptions
from infinigen_jax.speculation.layer_budgets import Curves
from infinigen_jax.transfer import Transfer, make_transfer
from infinigen_jax.transfer.host_weights import placement

HOT_SET = 2.0  # default size, in multiples of a request
DRAFT_WEIGHTS = "int8"  # form of the drafts' weights on a CPU, or if the model's are in host memory
FUSED_LAYERS = 4  # maximum number of layers compiled as one program on a CPU


@dataclasses.dataclass(frozen=True, eq=False)
class Runtime:
    """A model ready to run, with all open settings decided and weights in the decoder's form.

    `drafter` is the decoder and the weights of drafted steps; see `make_drafter`.
    """

    model: Model
    settings: EngineSettings
    decoder: Decoder
    weights: Weights
    drafter: tuple[Decoder, Weights]

    @property
    def mesh(self) -> Mesh:
        return self.decoder.mesh

    @property
    def device(self) -> Any:
        """Device whose memory is planned."""
        return self.mesh.devices.flat[0]

    @property
    def most_drafted(self) -> int:
        """Maximum number of tokens drafted before a verification; 0 without verification."""
        if not self.settings.lossless:
            return 0
        return most_drafted(self.decoder, self.settings.draft_tokens)

    @property
    def draft_room(self) -> int:
        """Capacity beyond the text that drafts and verifications need."""
        return size_of(self.most_drafted) if self.settings.lossless else 0

    @property
    def prefill_chunk(self) -> int | None:
        """Maximum number of prompt tokens read at a time; None if not set."""
        return self.settings.prefill_chunk if self.settings.pool is None else None


def make_runtime(model: Model, settings: EngineSettings, mesh: Mesh | None = None) -> Runtime:
    """Decide open settings, and place the weights; for `mesh` see `Engine`."""
    if not isinstance(model, Model):
        raise InputError(f"model: {type(model).__name__} is not a model; give the result of `load`")
    row_format(settings.rows, model.dtype, model.config.head_dim)
    config = model.config
    mesh = checked_mesh(mesh, math.gcd(config.num_kv_heads, config.windowed.num_kv_heads))
    transfer = make_transfer(settings.transfer)
    if settings.schedule == "auto":
        layerwise = transfer.in_place and model.config.num_layers > FUSED_LAYERS
        settings = dataclasses.replace(settings, schedule="layerwise" if layerwise else "fused")
    decoder = make_decoder(model, settings, transfer, mesh)
    if settings.lossless:
        check_lossless(decoder)
    prepared, whole = prepare(decoder, model), Placement(mesh).whole
    packed = transfer.in_place and settings.weights == "device"
    layers = model.params["layers"]
    layers = list(map(join, layers)) if packed else split_layers(model.config, layers)
    places = {"embedding": whole, "layers": placement(layers, settings.weights, mesh)}
    params = jax.device_put(model.params | {"layers": layers}, places)
    weights = Weights(params, jax.device_put(prepared, whole))
    if packed:
        # Each matrix is stored only once if the caller drops its model.
        tokenizer = {n: x for n, x in vars(model).items() if n == "tokenizer"}
        model = dataclasses.replace(model, params=params)
        vars(model).update(tokenizer)
    return Runtime(model, settings, decoder, weights, make_drafter(settings, decoder, weights))


def draft_form(settings: EngineOptions, decoder: Decoder, params: Params) -> str | None:
    """Return the form of the drafts' weights; None for the model's weights.

    A copy pays where its weights are read faster: over no link, or from a CPU's memory. On a GPU it
    takes memory that is scarce.
    """
    layer, form = params["layers"][0], settings.draft_weights
    if form is None:
        pays = settings.weights == "host" or decoder.transfer.in_place
        copies = settings.lossless and pays and not has_few_bits(layer)
        form = DRAFT_WEIGHTS if copies else "none"
    if form == small_dtype(layer) == "bfloat16" and settings.weights == "device":
        form = "none"  # the model's weights have this form
    return None if form == "none" else form


def make_drafter(
    settings: EngineSettings, decoder: Decoder, weights: Weights
) -> tuple[Decoder, Weights]:
    """Return decoder and weights of drafted steps: the engine's, or a small copy of the weights.

    A verification corrects errors of the copy, so the copy may be coarse. It stays on the device:
    with weights in host memory, a draft moves none of them. It shares the embedding and the
    policy's arrays.
    """
    dtype, whole = draft_form(settings, decoder, weights.params), Placement(decoder.mesh).whole
    if dtype is None:
        return decoder, weights
    if has_few_bits(weights.params["layers"][0]):
        raise ParameterError("draft_weights", "the model's are int8 or int4 already; leave it out")

    def copied(layer: Params) -> Params:
        layer = jax.device_put(layer, whole)
        small = shrink(join(layer) if decoder.transfer.in_place else layer, dtype)
        return jax.device_put(small, whole)

    params = weights.params | {"layers": list(map(copied, weights.params["layers"]))}
    return dataclasses.replace(decoder, weights_on_host=False), weights._replace(params=params)


def check_lossless(decoder: Decoder) -> None:
    """Raise ParameterError, which names the setting, if drafts of a decoder cannot be verified."""
    if decoder.pool is not None:
        raise ParameterError("pool", "`lossless` verifies with every row; leave one of them out")
    if isinstance(decoder.policy, Full):
        raise ParameterError(
            "lossless", "policy full is exact; choose the policy that drafts, such as infinigen"
        )
    if not decoder.row_format.exact and decoder.policy.window == 1:
        raise ParameterError(
            "lossless", f"`rows` {decoder.rows} needs a recent window; give `window` 2 or more"
        )


def most_drafted(decoder: Decoder, wanted: int | None) -> int:
    """Return the maximum number of tokens to draft before a verification, at most `wanted`.

    A draft ends before rows reach the host, and with quantised rows before they leave the window of
    a verified token.
    """
    return min(wanted or MOST, decoder.policy.window - (not decoder.row_format.exact))


def make_decoder(model: Model, settings: EngineSettings, transfer: Transfer, mesh: Mesh) -> Decoder:
    policy, hot_set = settings.policy, settings.hot_set
    if hot_set is None:
        hot_set = HOT_SET if transfer.concurrent and policy.reuses else 0.0
    policy = policy.fitted(model, transfer.in_place, settings.pool is not None)
    check_fitted(policy, settings.pool)
    dense = settings.dense_layers
    if dense is None:
        dense = policy.dense_layers
    if dense is None:
        measured = model.measured(policy.lead, policy.source)
        dense = model.dense_layers(policy.lead > 0) if measured else DENSE_UNKNOWN
    return Decoder(
        model.config,
        model.dtype,
        policy,
        transfer,
        min(dense, model.config.num_layers),
        mesh,
        rows=settings.rows,
        hot_set=float(hot_set),
        pool=settings.pool,
        weights_on_host=settings.weights == "host",
        curves=curves_for(model, policy),
    )


def curves_for(model: Model, policy: Policy) -> Curves | None:
    """Return the curves that split a budget, if needed; raise InputError if not measured."""
    if isinstance(policy, InfiniGen) and policy.layer_budgets == "calibrated":
        return model.curves(policy.lead > 0)
    return None


def prepare(decoder: Decoder, model: Model) -> tuple[Params, ...]:
    """Prepare the policy's arrays of each host layer, with the layer's budget if it has one."""

    def of_one(parts: Params) -> Params:
        return decoder.policy.prepare(dataclasses.replace(model, **parts), 0)

    # One program for all layers; otherwise each operation is compiled separately.
    prepare = Program(of_one, (decoder, model.skew, model.speculate_from))
    prepared = []
    for number, layer in enumerate(decoder.on_host):
        weights = prepare(one_layer(model, layer))
        if number in decoder.budgets:
            share = budget_fraction(decoder.budgets[number]).as_integer_ratio()
            weights = weights | {"share": jnp.array(share, jnp.int32)}
        prepared.append(weights)
    return tuple(prepared)


def one_layer(model: Model, layer: int) -> Params:
    """Return the arrays of one layer, in the form of a one-layer model."""

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
