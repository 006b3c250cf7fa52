"""Forecast of a generation's memory and time from the shapes of a model."""

import argparse
import dataclasses
import functools
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from infinigen_jax.checkpoint.manifest import (
    DEFAULT_SKEW,
    DEFAULT_SOURCE,
    MANIFEST_FILE,
    SKEW_FILE,
    read_manifest,
)
from infinigen_jax.checkpoint.safetensors import SafetensorsFile
from infinigen_jax.checkpoint.skew_file import Ahead, Basis, read_loss
from infinigen_jax.checkpoint.source import wide_matrices
from infinigen_jax.cli.options import given, make_engine
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Weights
from infinigen_jax.engine.draft_length import size_of
from infinigen_jax.engine.memory_plan import MemoryPlan, plan_cache, prefill_bytes, step_bytes
from infinigen_jax.engine.prompts import capacity_for
from infinigen_jax.engine.runtime import HOT_SET, draft_form, most_drafted
from infinigen_jax.errors import InputError
from infinigen_jax.loading.conversion_cache import known_conversion
from infinigen_jax.loading.load import Model, form_of
from infinigen_jax.machine.memory_limits import tree_bytes
from infinigen_jax.models import Blueprint, ModelConfig, blueprint
from infinigen_jax.models.base import split_layers
from infinigen_jax.models.small_weights import shrink
from infinigen_jax.planner.traffic import RoundsForecast, Traffic, forecast_rounds, planned_traffic
from infinigen_jax.policies import Policy
from infinigen_jax.prefill.prefill import chunk_for
from infinigen_jax.settings.engine import EngineOptions
from infinigen_jax.settings.setting import options_of
from infinigen_jax.transfer import Transfer


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine that a forecast assumes.

    Attributes:
        device_memory: bytes; None if device and host share one memory.
        memory_bandwidth, copy_bandwidth: bytes per second that the device reads from its memory,
            and at which rows reach attention from the host; None if unknown.
    """

    device_memory: int | None
    host_memory: int
    memory_bandwidth: float | None
    copy_bandwidth: float | None

    @property
    def separate(self) -> bool:
        """Whether device and host have separate memories and work concurrently."""
        return self.device_memory is not None


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Forecast of a generation with given settings; sizes are bytes.

    Attributes:
        weights_on_host: weights of the model in host memory.
        drafts: copy of the weights for drafts, on the device.
        bases: results of the conversion that a loaded model keeps.
        speculation: the policy's weights, made from weights and bases.
        prefill, decode: temporaries, including weights in transit from the host; the larger one is
            the plan's workspace.
        seconds: lower bound on the time of a decode step; None without bandwidths.
        lossless: times of the lossless mode; None without bandwidths, or where it is not possible
            or does not fit.
    """

    settings: EngineOptions
    weights: int
    weights_on_host: int
    drafts: int
    bases: int
    speculation: int
    chunk: int
    prefill: int
    decode: int
    plan: MemoryPlan
    traffic: Traffic
    seconds: float | None
    lossless: RoundsForecast | None
    machine: Machine

    @property
    def device(self) -> int:
        """Bytes of device memory at the peak."""
        kept = self.weights + self.drafts + self.bases + self.speculation
        return kept + self.plan.device

    @property
    def host(self) -> int:
        """Bytes of host memory, excluding the device's."""
        return self.plan.host_cache + self.weights_on_host

    @property
    def fits(self) -> bool:
        """Whether the machine has enough device and host memory."""
        room = self.machine.device_memory
        if room is None:
            return self.device + self.host <= self.machine.host_memory
        return self.device <= room and self.host <= self.machine.host_memory


class Conversion(NamedTuple):
    """Properties of a model's conversion that a forecast needs.

    `losses` are fields of `Model`; for `wide` see `checkpoint.source.wide_matrices`. `assumed`
    states that the model is not converted yet.
    """

    skew: str
    speculate_from: str = "input"
    losses: Mapping[str, np.ndarray] = types.MappingProxyType({})
    wide: frozenset[str] = frozenset()
    assumed: bool = False


class Planner:
    """Forecasts for one model, policy and machine, for any settings."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        conversion: Conversion,
        policy: Policy,
        arguments: argparse.Namespace,
        machine: Machine,
    ):
        self.config, self.machine, self.arguments = config, machine, arguments
        self.given = given(arguments, options_of(EngineOptions))
        form = form_of(dtype, arguments.weight_dtype, not machine.separate)
        architecture = blueprint(config, dtype, form, conversion.wide)
        self._shapes = model_shapes(architecture, conversion)
        make = functools.partial(self._engine, dtype, conversion, policy)
        asked, _ = make({})
        # With all layers on the host, the policy has weights for every layer.
        self._decoder, self._weights = make({"dense_layers": 0})
        # Their shapes alone: a copy is made on the device, wherever the weights are.
        layers = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._weights.params["layers"]
        )
        self._small_bytes = functools.cache(
            lambda form: tree_bytes(jax.eval_shape(lambda: [shrink(x, form) for x in layers]))
        )
        # Only the transfer `cuda`, the default on a GPU, has a hot set by default.
        crosses = machine.separate and self.given.get("transfer") != "xla"
        reuses = crosses and policy.reuses and "hot_set" not in self.given
        hot_set = HOT_SET if reuses else asked.hot_set
        self.asked = EngineOptions(
            **(self.given | {"dense_layers": asked.dense_layers, "hot_set": hot_set})
        )

    def _engine(
        self, dtype: jnp.dtype, conversion: Conversion, policy: Policy, settings: dict[str, Any]
    ) -> tuple[Decoder, Weights]:
        """Return an engine's decoder and the shapes of its weights, without allocating arrays."""
        decoders: list[Decoder] = []

        def build(parts: dict[str, Any]) -> Weights:
            shape = (self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)
            measured: dict[str, Any] = {}
            if conversion.skew != "none":
                moment = np.zeros((*shape, shape[-1]), np.float32)
                mean = np.zeros(shape, np.float32)
                measured = {"key_mean": mean, "tail_moments": (moment, moment)}
            model = Model(
                self.config,
                dtype=dtype,
                skew=conversion.skew,
                speculate_from=conversion.speculate_from,
                **measured,
                **conversion.losses,
                **parts,
            )
            chosen, more = policy, {}
            if self.machine.separate:  # this process's backend may have one memory
                chosen = policy.fitted(model, in_place=False, pooled=False)
                if jax.default_backend() != "gpu":  # the GPU of another machine
                    more["transfer"] = "xla"  # without a warning; it is replaced below
            engine = make_engine(model, chosen, self.arguments, **settings, **more)
            decoders.append(engine.decoder)
            # Use the form that weights have where rows or weights are transferred.
            params = engine.runtime.weights.params
            layers = split_layers(self.config, params["layers"])
            return engine.runtime.weights._replace(params=params | {"layers": layers})

        weights = jax.eval_shape(build, self._shapes)
        decoder = decoders[0]
        if self.machine.separate:
            transfer = Transfer("xla" if self.arguments.transfer == "xla" else "cuda")
            decoder = dataclasses.replace(decoder, transfer=transfer)
        return decoder, weights

    def forecast(self, settings: EngineOptions, batch: int, context: int) -> Forecast:
        """Forecast `batch` sequences that grow to `context` tokens."""
        decoder = dataclasses.replace(
            self._decoder,
            dense_layers=settings.dense_layers,
            hot_set=settings.hot_set,
            rows=settings.rows,
            weights_on_host=settings.weights == "host",
        )
        pairs = zip(self._decoder.on_host, self._weights.policy, strict=True)
        policy_weights = tuple(part for layer, part in pairs if layer in decoder.on_host)
        weights = Weights(self._weights.params, policy_weights)
        chunk = chunk_for(decoder, batch, context, settings.prefill_chunk)

        def memory(drafted: int) -> tuple[int, int, dict[str, Any]]:
            """Return capacity, slots and sizes with room for a number of drafted tokens."""
            capacity = capacity_for(decoder, context + drafted)
            slots = decoder.host_slots(context, capacity)
            length = min(chunk, capacity)
            cache = plan_cache(decoder, batch, capacity, slots)
            reading = prefill_bytes(decoder, weights.params, batch, length, capacity)
            step = step_bytes(decoder, weights.params, batch, capacity, drafted, slots)
            work = {"chunk": length, "prefill": reading, "decode": step}
            return capacity, slots, work | {"plan": cache.at_work(max(reading, step))}

        most = most_drafted(decoder, settings.draft_tokens)
        capacity, slots, sizes = memory(size_of(most) if settings.lossless else 0)
        plan = sizes["plan"]
        traffic = planned_traffic(decoder, weights, plan, batch, context, capacity, slots)
        kept = {name: part for name, part in self._shapes.items() if name != "params"}
        if kept["ahead"] is not None:  # projections stay in their file
            kept["ahead"] = [ahead and ahead.basis for ahead in kept["ahead"]]
        found = Forecast(
            settings=settings,
            weights=tree_bytes(weights.params) - traffic.brought,
            weights_on_host=traffic.brought,
            drafts=self._draft_bytes(settings, decoder),
            bases=tree_bytes(kept),
            speculation=tree_bytes(weights.policy),
            **sizes,
            traffic=traffic,
            seconds=self._seconds(traffic),
            lossless=None,
            machine=self.machine,
        )
        if found.seconds is None or decoder.pool is not None or not decoder.selecting or most < 1:
            return found
        copied = self._draft_bytes(dataclasses.replace(settings, lossless=True), decoder)
        if not dataclasses.replace(found, drafts=copied, **memory(size_of(most))[2]).fits:
            return found
        drafting = traffic
        if copied:  # a small copy on the device takes the place of the layers' weights
            read = traffic.weights - tree_bytes(weights.params["layers"]) + copied
            drafting = dataclasses.replace(traffic, weights=read, brought=0)
        # A verification reads all rows of the host.
        every = plan.host_cache * context // capacity
        verifying = dataclasses.replace(traffic, index=0, attended=every, whole=every, link=every)
        draft, verification = self._seconds(drafting), self._seconds(verifying)
        assert draft is not None and verification is not None
        rounds = forecast_rounds(draft, verification, most)
        return dataclasses.replace(found, lossless=rounds)

    def _draft_bytes(self, settings: EngineOptions, decoder: Decoder) -> int:
        """Return the bytes of the copy of the weights for drafts; 0 without one."""
        form = draft_form(settings, decoder, self._weights.params)
        return 0 if form is None else self._small_bytes(form)

    def _seconds(self, traffic: Traffic) -> float | None:
        """Return the least seconds of a step."""
        reads, copies = self.machine.memory_bandwidth, self.machine.copy_bandwidth
        if reads is None or copies is None:
            return None
        if self.machine.separate:
            return traffic.floor_ms(reads, copies) / 1e3
        # With one memory, attention reads rows in place, one by one unless it reads whole layers.
        chosen = traffic.attended - traffic.whole
        return (traffic.memory - chosen) / reads + chosen / copies


def model_shapes(architecture: Blueprint, conversion: Conversion) -> Any:
    """Return the shapes of a loaded Model's arrays on the device, keyed by field."""
    config, dtype, count = architecture.config, architecture.dtype, architecture.config.num_layers
    shape = jax.ShapeDtypeStruct
    square: Any = shape((config.num_kv_heads, config.head_dim, config.head_dim), jnp.float32)
    layers = config.full_attention_layers
    pairs = tuple(Basis(square, square) if i in layers else None for i in range(count))
    skew, corrected = conversion.skew, conversion.skew == "balanced"
    weight, bias = (config.query_width, config.hidden_size), (config.query_width,)
    projection = {"weight": shape(weight, dtype), "bias": shape(bias, dtype)}
    absorbed = skew == "none" or (skew == "svd" and config.rope is None)
    return {
        "params": {
            "embedding": architecture.embedding_shapes,
            "layers": [architecture.of(i).layer_shapes for i in range(count)],
        },
        "bases": (None,) * count if absorbed else pairs,
        "svd_bases": pairs if corrected else None,
        "ahead": tuple(pair and Ahead(projection, pair) for pair in pairs) if corrected else None,
    }


def conversion_of(folder: Path, config: ModelConfig) -> Conversion:
    """Return the properties of a source's conversion, or those assumed without one."""
    wide = wide_matrices(folder, blueprint(config, jnp.float32))
    made = folder if (folder / MANIFEST_FILE).exists() else known_conversion(folder)
    try:
        if made is not None:
            manifest, file = read_manifest(made), SafetensorsFile(made / SKEW_FILE)
            losses = {} if manifest.skew == "none" else read_loss(file, config)
            return Conversion(manifest.skew, manifest.speculate_from, losses, wide)
    except InputError:
        if made == folder:
            raise
        # `load` makes a damaged conversion in the cache again.
    return Conversion(DEFAULT_SKEW, DEFAULT_SOURCE, wide=wide, assumed=True)
