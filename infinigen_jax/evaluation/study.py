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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax.cache.host_array import capacity_of, read_block
from infinigen_jax.cache.layers import Resident
from infinigen_jax.decode.compiler_options import step_options
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.layer_rows import HostRows
from infinigen_jax.decode.state import Carry, Fetched
from infinigen_jax.decode.steps import Watched
from infinigen_jax.ops.attention import attend_weighted, packed, part_scores
from infinigen_jax.ops.top_k import top_mask
from infinigen_jax.policies.base import Budgeted
from infinigen_jax.programs.program import in_full_precision
from infinigen_jax.selection.select import group_rank


def watch(decoder: Decoder, watched: Watched) -> tuple[Carry, dict[str, Array] | None]:
    """Compare, and continue with the policy's output of the layer."""
    return watched.after, None if watched.selection is None else _program(decoder)(watched)


@functools.lru_cache(maxsize=16)
def _program(decoder: Decoder) -> Any:
    study = in_full_precision(functools.partial(compare, decoder), decoder)
    return jax.jit(study, compiler_options=step_options(decoder))


def compare(decoder: Decoder, watched: Watched) -> dict[str, Array]:
    """Return the numbers of a layer that selects rows, in one step.

    mass, oracle_mass [b, k, g]: share of each query head's softmax over the past tokens that the
    policy attended, and that the oracle would attend at the same budget. wanted [b, k]: rows that
    the budget allows. hits [b, k]: number of the oracle's rows that the policy selected. error,
    oracle_error [b]: relative L2 error of the attention output, after the output projection.
    """
    host, place, local, positions = watched.host, watched.place, watched.local, watched.positions
    assert host is not None and place is not None and isinstance(local, Resident)
    config, slots, cap = decoder.config, decoder.slots, decoder.config.attention_softcap
    layer = decoder.blueprint.layer(watched.params)
    a = layer.attention_input(watched.before.x)
    q = config.grouped(layer.query(a, positions))
    capacity = capacity_of(host, len(positions))
    eligible = slots.eligible(positions, capacity)
    rows = read_block(host, place.number, jnp.int32(0), capacity, decoder.mesh, q.shape[0])
    # Slots that were never written may hold NaN, and 0 * NaN is NaN.
    rows = decoder.row_format.decode(place.scales, rows)
    rows = jnp.where(eligible[..., None], rows, 0)
    resident = local.part(positions, slots)

    def attended(mask: Bool[Array, "b kv t"]) -> tuple[Array, list[Array]]:
        return attend_weighted(q, resident, packed(rows, mask), cap=cap)

    everything, (near, far) = attended(eligible)
    request = watched.request(decoder, capacity)
    fetched = request.mask(capacity) & eligible
    wanted = request.count
    if isinstance(decoder.policy, Budgeted):  # all that the budget allows
        assert watched.selection is not None
        share = watched.selection.weights.get("share")
        most = decoder.policy.most_rows(positions, capacity, share=share)
        most = jnp.minimum(most[:, None], _entries(eligible))
        wanted = jnp.broadcast_to(most, wanted.shape)
    # Rank like the policy `oracle`: the group's softmax over the eligible rows, summed.
    scores = part_scores(q, packed(rows, eligible), cap)
    scores = jnp.where(eligible[:, :, None], scores, -jnp.inf)
    best = top_mask(group_rank(scores), wanted) & eligible
    if decoder.policy.has_tail:  # fetched rows, and the tail term for the others
        step_rows = HostRows(decoder, local, positions, None, host, place)
        part = step_rows.fetched_part(watched.before.fetched or Fetched(request, None))
        tail = step_rows.tail_term(q, request, part.taken(q.shape[-1]))
        had = attend_weighted(q, resident, part, tail=tail, cap=cap)[0]
    else:
        had = attended(fetched)[0]

    is_past = slots.positions(positions) != positions[:, None]
    near = jnp.sum(jnp.where(is_past[:, None, None], near, 0.0), axis=-1)
    total = near + jnp.sum(far, axis=-1)

    def mass(mask: Bool[Array, "b k t"]) -> Float[Array, "b k g"]:
        covered = near + jnp.sum(jnp.where(mask[:, :, None], far, 0.0), axis=-1)
        return jnp.where(total == 0, 1.0, covered / jnp.where(total == 0, 1.0, total))

    whole = decoder.output(layer, everything, a)
    return {
        "mass": mass(fetched),
        "oracle_mass": mass(best),
        "wanted": wanted,
        "hits": _entries(fetched & best),
        "error": _relative(decoder.output(layer, had, a), whole),
        "oracle_error": _relative(decoder.output(layer, attended(best)[0], a), whole),
    }


def _entries(mask: Bool[Array, "*b t"]) -> Int[Array, "*b"]:
    return jnp.sum(mask, axis=-1, dtype=jnp.int32)


def _relative(y: Float[Array, "b e"], true: Float[Array, "b e"]) -> Float[Array, " b"]:
    """Return the relative L2 distance, float32; 0 for equal vectors."""
    y, true = (lax.convert_element_type(z, jnp.float32) for z in (y, true))
    distance = jnp.linalg.norm(y - true, axis=-1)
    size = jnp.linalg.norm(true, axis=-1)
    return jnp.where(distance == 0, 0.0, distance / jnp.maximum(size, 1e-30))
