"""Sizes of a server, checked against the model and the memory."""

import dataclasses

from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.memory_plan import (
    Remedies,
    check_memory,
    plan_cache,
    prefill_bytes,
    step_bytes,
)
from infinigen_jax.engine.prompts import capacity_for, checked_context
from infinigen_jax.errors import InputError, ParameterError

CHUNK_ON_CPU, CHUNK = 512, 2048  # default chunk lengths
READERS = 2  # prompts that are read in turns


class Limits:
    """Checked sizes of a server; one that makes no heat maps needs fewer programs."""

    def __init__(
        self,
        engine: Engine,
        batch: int = 8,
        context: int | None = None,
        waiting: int = 64,
        prefix_bytes: int = 1 << 30,
        heat_maps: bool = True,
    ):
        decoder, runtime = engine.decoder, engine.runtime
        if decoder.pool is not None:
            raise ParameterError("pool.tokens", "a server keeps every row; leave it out")
        if runtime.mesh.shape["data"] > 1:
            raise InputError("a server's sequences come and go; give a `mesh` without a data axis")
        if engine.model.tokenizer is None:
            raise InputError("this model has no tokenizer; serve one that has")
        self.batch, self.waiting = batch, waiting
        self.prefix_bytes, self.heat_maps = prefix_bytes, heat_maps
        self.context = checked_context(engine.model.config, context)  # a prompt and its answer
        room = runtime.draft_room
        capacity = capacity_for(decoder, self.context + room)
        default = CHUNK_ON_CPU if decoder.transfer.in_place else CHUNK
        self.capacity = capacity  # of a sequence, in tokens
        self.chunk = min(runtime.prefill_chunk or default, capacity)  # between two decode steps
        plan, params = plan_cache(decoder, batch, capacity), runtime.weights.params
        step = step_bytes(decoder, params, batch, capacity, room)
        for _ in range(READERS + 1):  # and the answer that is alone
            plan += plan_cache(decoder, 1, capacity)
        reading = prefill_bytes(decoder, params, 1, self.chunk, capacity)
        remedies = Remedies(decoder, ("`context`",), batch, may_pool=False)
        plan = dataclasses.replace(plan, prefixes=prefix_bytes, workspace=max(reading, step))
        check_memory(plan, runtime.device, remedies)
