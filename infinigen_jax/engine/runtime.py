"""A model with the settings that it runs with: what everything in this room is handed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from infinigen_jax.cache.host_array import Placement, checked_mesh
from infinigen_jax.cache.row_format import row_format
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Weights
from infinigen_jax.engine.settings import EngineSettings
from infinigen_jax.errors import InputError
from infinigen_jax.loading.load import DENSE_UNKNOWN, Model
from infinigen_jax.models import Params
from infinigen_jax.models.joined import join, split
from infinigen_jax.policies import InfiniGen, Policy
from infinigen_jax.programs.program import Program
from infinigen_jax.selection.select import budget_fraction
from infinigen_jax.speculation.layer_budgets import Curves
from infinigen_jax.transfer import Transfer, make_transfer
from infinigen_jax.transfer.host_weights import placement

HOT_SET = 2.0  # by default, in multiples of a request
FUSED_LAYERS = 8  # most layers that are compiled as one program on a CPU


@dataclasses.dataclass(frozen=True, eq=False)
class Runtime:
    """A model ready to run, with everything decided that its settings leave open.

    Attributes:
        model: its weights in the form that the decoder wants.
        settings: as they were given, the schedule decided.
        decoder: the pure functions of a step.
        weights: the model's parameters and what the policy prepared, where they are to live.
    """

    model: Model
    settings: EngineSettings
    decoder: Decoder
    weights: Weights

    @property
    def mesh(self) -> Mesh:
        return self.decoder.mesh

    @property
    def device(self) -> Any:
        """The device whose memory is planned."""
        return self.mesh.devices.flat[0]

    @property
    def prefill_chunk(self) -> int | None:
        """Most tokens of a prompt that are read at a time, if that was asked for."""
        return self.settings.prefill_chunk if self.settings.pool is None else None


def make_runtime(model: Model, settings: EngineSettings, mesh: Mesh | None = None) -> Runtime:
    """Decide what the settings leave open, and place the weights.

    Args:
        mesh: devices, by the axes "data", which share the sequences, and "model", which share the
            KV heads; each keeps its part of the cache in its own host memory, and all weights. One
            device by default.

    Raises:
        InputError: for settings that the model, its conversion or the mesh cannot have.
    """
    if not isinstance(model, Model):
        raise InputError(f"model: {type(model).__name__} is none; give what `load` returns")
    row_format(settings.rows, model.dtype, model.config.head_dim)
    mesh = checked_mesh(mesh, model.config.num_kv_heads)
    transfer = make_transfer(settings.transfer)
    if settings.schedule == "auto":
        many = transfer.in_place and model.config.num_layers > FUSED_LAYERS
        settings = dataclasses.replace(settings, schedule="layerwise" if many else "fused")
    decoder = make_decoder(model, settings, transfer, mesh)
    prepared, whole = prepare(decoder, model), Placement(mesh).whole
    joined = transfer.in_place and settings.weights == "device"
    width, given = model.config.query_width, model.params["layers"]
    layers = [join(x) if joined else split(x, width) for x in given]
    places = {"embedding": whole, "layers": placement(layers, settings.weights, mesh)}
    params = jax.device_put(model.params | {"layers": layers}, places)
    weights = Weights(params, jax.device_put(prepared, whole))
    if joined:
        # Each matrix is held once, if the caller drops the model that was given.
        tokenizer = {n: x for n, x in vars(model).items() if n == "tokenizer"}
        model = dataclasses.replace(model, params=params)
        vars(model).update(tokenizer)
    return Runtime(model, settings, decoder, weights)


def make_decoder(model: Model, settings: EngineSettings, transfer: Transfer, mesh: Mesh) -> Decoder:
    """The decoder of a model with these settings."""
    policy, hot_set = settings.policy, settings.hot_set
    if hot_set is None:
        crosses = transfer.masks and not transfer.in_place
        hot_set = HOT_SET if crosses and policy.reuses else 0.0
    policy = policy.fitted(model, transfer.in_place, settings.pool is not None)
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
    """Curves that a budget is shared out among the layers by, if the policy wants that.

    Raises:
        InputError: if the model's conversion did not measure them.
    """
    if isinstance(policy, InfiniGen) and policy.layer_budgets == "calibrated":
        return model.curves(policy.lead > 0)
    return None


def prepare(decoder: Decoder, model: Model) -> tuple[Params, ...]:
    """Arrays that the policy selects by, for each host layer, with the layer's budget if any."""

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
