"""Sizes of a server, checked against the model and the memory."""

import dataclasses

from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.memory_plan import check_memory, plan_cache
from infinigen_jax.engine.prompts import checked_context, round_up_capacity
from infinigen_jax.engine.remedies import Remedies
from infinigen_jax.engine.workspace import prefill_bytes, step_bytes
from infinigen_jax.errors import InputError, ParameterError

CHUNK_ON_CPU, CHUNK = 512, 2048  # default chunk lengths
READERS = 2  # prompts that are read in turns


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes of a server.

    Attributes:
        context: maximum number of tokens of a prompt and its answer.
        capacity: room of a sequence in tokens: `context` and the room for drafts, rounded up.
        chunk: maximum number of prompt tokens read between two decode steps.
        prefix_bytes: maximum size of the prefix cache; 0 for none.
        heat_maps: whether requests may ask for heat maps, which need further programs.
    """

    batch: int
    context: int
    capacity: int
    chunk: int
    waiting: int
    prefix_bytes: int
    heat_maps: bool

    @classmethod
    def of(
        cls,
        engine: Engine,
        batch: int = 8,
        context: int | None = None,
        waiting: int = 64,
        prefix_bytes: int = 1 << 30,
        heat_maps: bool = True,
    ) -> "Limits":
        """Return checked sizes."""
        decoder = engine.decoder
        if decoder.pool is not None:
            raise ParameterError("pool.tokens", "a server keeps every row; leave it out")
        if engine.mesh.shape["data"] > 1:
            raise InputError("a server's sequences come and go; give a `mesh` without a data axis")
        if engine.model.tokenizer is None:
            raise InputError("this model has no tokenizer; serve one that has")
        context = checked_context(engine.model.config, context)
        room = engine.runtime.draft_room
        capacity = round_up_capacity(max(context + room, decoder.policy.window))
        default = CHUNK_ON_CPU if decoder.transfer.in_place else CHUNK
        chunk = min(engine.prefill_chunk or default, capacity)
        plan, params = plan_cache(decoder, batch, capacity), engine.runtime.weights.params
        step = step_bytes(decoder, params, batch, capacity, room, plan.resident)
        for _ in range(READERS + 1):  # and the answer that is alone
            plan += plan_cache(decoder, 1, capacity)
        reading = prefill_bytes(decoder, params, 1, chunk, capacity)
        remedies = Remedies(decoder, ("`context`",), batch, may_pool=False)
        plan = dataclasses.replace(plan, prefixes=prefix_bytes, workspace=max(reading, step))
        check_memory(plan, engine.runtime.device, remedies)
        return cls(batch, context, capacity, chunk, waiting, prefix_bytes, heat_maps)
