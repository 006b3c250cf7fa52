"""Study of a layer's attention in a decode step, compared with full attention and an oracle.

`Run.watch` runs the study as a program after each layer of a step. It reads the layer's whole cache
from the host and computes attention over all rows, over the rows the policy attended, and over the
oracle's. The rows are those of past tokens; the current token is always attended.

    attended     resident (sinks, window) + fetched by the policy
    oracle's     resident                 + as many rows of the highest true scores
    everything   resident                 + all rows that only the host has

"Everything" is the cache as stored on the host, so these numbers exclude the error of quantised
rows (perplexity includes it).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax.cache.host_array import read_block
from infinigen_jax.cache.layers import Resident
from infinigen_jax.decode.compiler_options import step_options
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.layer_rows import HostRows
from infinigen_jax.decode.state import Carry, Fetched
from infinigen_jax.decode.steps import Watched
from infinigen_jax.ops.attention import Part, attend_weighted, packed, part_scores
from infinigen_jax.ops.top_k import top_mask
from infinigen_jax.policies.base import Budgeted
from infinigen_jax.programs.program import in_full_precision
from infinigen_jax.selection.select import Request, group_rank


class Seen(NamedTuple):
    """Numbers of one layer in one step.

    Attributes:
        mass, oracle_mass: share of each query head's softmax over the past tokens that the policy
            attended, and that the oracle would attend at the same budget.
        wanted: rows that the budget allows.
        hits: number of the oracle's rows that the policy selected.
        error, oracle_error: relative L2 error of the layer's attention output, after the output
            projection, of the policy and of the oracle.
    """

    mass: Float[Array, "b k g"]
    oracle_mass: Float[Array, "b k g"]
    wanted: Int[Array, "b k"]
    hits: Int[Array, "b k"]
    error: Float[Array, " b"]
    oracle_error: Float[Array, " b"]


def watch(decoder: Decoder, watched: Watched) -> tuple[Carry, Seen | None]:
    """Compare, and continue with the policy's output of the layer."""
    selects = watched.place is not None and watched.selection is not None
    return watched.after, _program(decoder)(watched) if selects else None


@functools.lru_cache(maxsize=16)
def _program(decoder: Decoder) -> Any:
    study = in_full_precision(functools.partial(compare, decoder), decoder)
    return jax.jit(study, compiler_options=step_options(decoder))


def compare(decoder: Decoder, watched: Watched) -> Seen:
    """Return the numbers of a layer that selects rows."""
    assert watched.host is not None and watched.place is not None
    config, slots, positions = decoder.config, decoder.slots, watched.positions
    layer = decoder.blueprint.layer(watched.params)
    a = layer.attention_input(watched.before.x)
    q = config.grouped(layer.query(a, positions))
    capacity = watched.host.shape[3]
    eligible = slots.eligible(positions, capacity)
    whole = watched.host, watched.place.number, jnp.int32(0), capacity
    rows = read_block(*whole, decoder.mesh, q.shape[0])
    # Slots that were never written may hold NaN, and 0 * NaN is NaN.
    rows = decoder.row_format.decode(watched.place.scales, rows)
    rows = jnp.where(eligible[:, None, :, None], rows, 0)

    assert isinstance(watched.local, Resident)
    resident = watched.local.part(positions, slots)
    cap = config.attention_softcap

    def attended(mask: Bool[Array, "b kv t"]) -> tuple[Array, list[Array]]:
        return attend_weighted(q, resident, packed(rows, mask), cap=cap)

    everything, (near, far) = attended(eligible[:, None])
    request = watched.request(decoder, capacity)
    fetched = request.mask(capacity) & eligible[:, None]
    wanted = _wanted(decoder, watched, request, eligible)
    # Rank like the policy `oracle`: the group's softmax over the eligible rows, summed.
    scores = part_scores(q, packed(rows, eligible[:, None]), cap)
    scores = jnp.where(eligible[:, None, None], scores, -jnp.inf)
    best = top_mask(group_rank(scores), wanted) & eligible[:, None]
    if decoder.policy.has_tail:
        had = _with_tail(decoder, watched, request, q, resident)
    else:
        had = attended(fetched)[0]

    is_past = slots.positions(positions) != positions[:, None]
    near = jnp.sum(jnp.where(is_past[:, None, None], near, 0.0), axis=-1)
    total = near + jnp.sum(far, axis=-1)

    def mass(mask: Bool[Array, "b k t"]) -> Float[Array, "b k g"]:
        covered = near + jnp.sum(jnp.where(mask[:, :, None], far, 0.0), axis=-1)
        return jnp.where(total == 0, 1.0, covered / jnp.where(total == 0, 1.0, total))

    whole = decoder.output(layer, everything)
    return Seen(
        mass(fetched),
        mass(best),
        wanted,
        _entries(fetched & best),
        _relative(decoder.output(layer, had), whole),
        _relative(decoder.output(layer, attended(best)[0]), whole),
    )


def _with_tail(
    decoder: Decoder, watched: Watched, request: Request, q: Float[Array, "b k g d"], resident: Part
) -> Float[Array, "b k g d"]:
    """Return the step's attention: fetched rows, and the tail term for the others."""
    place, local = watched.place, watched.local
    assert watched.host is not None and place is not None and isinstance(local, Resident)
    fetched = watched.before.fetched or Fetched(request, None)
    rows = HostRows(decoder, local, watched.positions, None, watched.host, place)
    part, cap = rows.fetched_part(fetched), decoder.config.attention_softcap
    tail = rows.tail_term(q, request, part.taken(q.shape[-1]))
    return attend_weighted(q, resident, part, tail=tail, cap=cap)[0]


def _wanted(
    decoder: Decoder, watched: Watched, request: Request, eligible: Bool[Array, "b t"]
) -> Int[Array, "b k"]:
    """Return the rows that the budget allows; without a budget, the rows requested."""
    if not isinstance(decoder.policy, Budgeted):
        return request.count
    assert watched.selection is not None
    share = watched.selection.weights.get("share")
    rows = decoder.policy.most_rows(watched.positions, eligible.shape[1], share=share)
    rows = jnp.minimum(rows, _entries(eligible))
    return jnp.broadcast_to(rows[:, None], request.count.shape)


def _entries(mask: Bool[Array, "*b t"]) -> Int[Array, "*b"]:
    return jnp.sum(mask, axis=-1, dtype=jnp.int32)


def _relative(y: Float[Array, "b e"], true: Float[Array, "b e"]) -> Float[Array, " b"]:
    """Return the relative L2 distance, float32; 0 for equal vectors."""
    y, true = (lax.convert_element_type(z, jnp.float32) for z in (y, true))
    distance = jnp.linalg.norm(y - true, axis=-1)
    size = jnp.linalg.norm(true, axis=-1)
    return jnp.where(distance == 0, 0.0, distance / jnp.maximum(size, 1e-30))
