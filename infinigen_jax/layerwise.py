"""All layers of a decode step, one compiled call a layer; `steps` has them in one call."""

from typing import Any

from jaxtyping import Array, Float, Int

from infinigen_jax.cache import Cache
from infinigen_jax.carry import Counts, Weights
from infinigen_jax.decode import Decoder
from infinigen_jax.steps import steps
from infinigen_jax.weights import bring, merged


def by_layer(
    decoder: Decoder,
    weights: Weights,
    cache: Cache,
    tokens: Int[Array, " b"],
    numbers: list[Array],
) -> tuple[Float[Array, "b e"], Cache, Counts]:
    """Dispatch the layers of a step.

    Args:
        cache: the arrays that a step replaces are donated.
        tokens: at the next position.
        numbers: of the host's layers, on the device.

    Returns:
        The last layer's output; the cache with the tokens' rows, its lengths as they were; and the
        rows that were selected and moved.
    """
    run, positions = steps(decoder), cache.lengths
    carry = run.embed(weights.params["embedding"], tokens, positions)

    def following(number: int) -> Any:
        there = 0 <= number < decoder.host_layers
        return decoder.following(weights, cache, number, numbers[number]) if there else None

    hot, states, updated = list(cache.hot), list(cache.states), []
    if decoder.requests_first and (first := following(0)) is not None:
        carry, hot[0] = run.first(carry, first, hot[0], cache.host, positions)
    stored, params = weights.params["layers"], weights.params["layers"][0]
    if decoder.weights_on_host:
        params, x = bring(decoder.mesh, params, carry.x)
        carry = carry._replace(x=x)
    for i in range(len(stored)):
        own = decoder.host_number(i)
        target = decoder.fetches_for(i)
        ahead = following(target)
        observes = own >= 0 and decoder.policy.observes
        hands_over = ahead is not None and decoder.policy.lead > 0
        run_layer = run.fetching_layer if hands_over else run.layer
        upcoming = stored[i + 1 : i + 2]
        carry, local, new_hot, state, coming = run_layer(
            params,
            carry,
            cache.local[i],
            None if ahead is None else hot[target],
            states[own] if observes else None,
            cache.host,
            decoder.own_layer(weights, cache, own, numbers[own] if own >= 0 else None),
            ahead,
            positions,
            stored=upcoming if decoder.weights_on_host else [],
        )
        if upcoming:
            params = upcoming[0] if coming is None else merged(upcoming[0], coming)
        updated.append(local)
        if ahead is not None:
            hot[target] = new_hot
        if observes:
            states[own] = state
    cache = cache._replace(local=tuple(updated), hot=tuple(hot), states=tuple(states))
    return carry.x, cache, carry.counts
