"""Physical bounds of a decode step: bytes moved, least time, and memory needed."""

import dataclasses

from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.generation import Run
from infinigen_jax.engine.memory_plan import plan_cache
from infinigen_jax.engine.prompts import round_up_capacity
from infinigen_jax.engine.workspace import step_bytes
from infinigen_jax.loading.load import Model
from infinigen_jax.machine.memory_limits import tree_bytes
from infinigen_jax.planner.traffic import Traffic


def resident_traffic(model: Model, batch: int, context: int) -> Traffic:
    """Return the traffic of a system that keeps the whole cache next to the weights."""
    return Traffic(weight_bytes(model), cache_bytes(model, batch, context), 0, 0, 0)


def offloaded_traffic(model: Model, batch: int, context: int) -> Traffic:
    """Return the traffic of a system that moves the whole cache from the host for every token."""
    rows = cache_bytes(model, batch, context)
    return Traffic(weight_bytes(model), 0, 0, rows, rows)


def traffic_of(run: Run, context: int) -> Traffic:
    """Return the traffic of a run of this package, at `context` tokens per sequence."""
    model, decoder, plan, stats = run.runtime.model, run.decoder, run.plan, run.stats()
    rows = plan.host_cache / run.capacity * context  # in their stored format
    return Traffic(
        weights=weight_bytes(model) + tree_bytes(run.runtime.weights.policy),
        device_cache=plan.dense_cache * context // run.capacity,
        index=plan.index * context // run.capacity,
        attended=int(rows * stats.selected_fraction),
        link=int(rows * stats.fetched_fraction) if decoder.host_layers else 0,
    )


def weight_bytes(model: Model) -> int:
    """Return the bytes read per token: all weights, with one row of the embedding table."""
    head = model.params["embedding"]["tokens" if model.config.tie_embeddings else "head"]
    return tree_bytes((model.params["layers"], head))


def cache_bytes(model: Model, batch: int, context: int) -> int:
    """Return the bytes of keys and values of all layers, in the model's dtype."""
    config = model.config
    row = batch * config.num_kv_heads * 2 * config.head_dim * model.dtype.itemsize
    return row * context * config.num_layers


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a system occupies while it decodes, excluding the model's weights."""

    device: int
    host: int


def memory_of(engine: Engine, batch: int, tokens: int) -> Memory:
    """Return the memory of an engine of this package for `tokens` tokens of every sequence."""
    capacity = round_up_capacity(tokens)
    plan = plan_cache(engine.decoder, batch, capacity)
    work = step_bytes(
        engine.decoder, engine.runtime.weights.params, batch, capacity, 0, plan.resident
    )
    return Memory(plan.at_work(work).device, plan.host_cache)


def memory_of_theirs(name: str, model: Model, batch: int, tokens: int) -> Memory:
    """Return the memory of transformers, by the name of the system."""
    rows = cache_bytes(model, batch, tokens)
    layer = rows // model.config.num_layers
    if name == "transformers-offloaded":
        return Memory(2 * layer, rows)
    if name == "transformers-static":
        return Memory(rows, 0)
    return Memory(rows + 2 * layer, 0)  # a layer is copied to append a token
