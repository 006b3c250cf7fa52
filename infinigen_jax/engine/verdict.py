"""Acceptance of drafted tokens by the tokens that the full model draws.

A draw is a function of logits, settings and a random number, which depends on the seed and on the
number of tokens drawn before (`sampling.uniforms`). The draft uses the same random numbers. Its
token is accepted if it equals the one that the full model's logits give with that number:

    drafted     a b c d           the full model's draws after the last token, a, ab, abc, abcd
    verified    a b x . .         x replaces c: it is the full model's own draw after a b

The tokens are thus those of the full model with this seed, whatever was drafted.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.compiler_options import layer_options
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.engine.sampler import Draws
from infinigen_jax.models import Params
from infinigen_jax.sampling import History, sample, uniforms


class Verdict(NamedTuple):
    """Outcome of a verification.

    Attributes:
        drawn: the full model's draws, of which the first `count` are new tokens.
        count: new tokens of each sequence, and its leading input tokens to commit.
        last: last new token; the token before if there is none.
        room: tokens that a sequence may still get; 0 after its end.
        draws: state of the sampler after these tokens; None if greedy.
        logits: logits after every token of every sequence, in one axis.
    """

    drawn: Int[Array, "b c"]
    count: Int[Array, " b"]
    last: Int[Array, " b"]
    room: Int[Array, " b"]
    draws: Draws | None
    logits: Float[Array, "n v"]


@compiled(lambda at: at.batch, static_argnames="size")
def begin(decoder: Decoder, last: Int[Array, " b"], *, size: int) -> Int[Array, "b n"]:
    """Return the tokens to verify before any is drafted."""
    return jnp.full((len(last), size), -1, jnp.int32).at[:, 0].set(last)


@compiled(lambda at: at.batch, donate_argnums=0)
def draft(
    decoder: Decoder,
    tokens: Int[Array, "b c"],
    place: Int[Array, ""],
    logits: Float[Array, "b v"],
    best: Int[Array, " b"],
    draws: Draws | None,
) -> tuple[Int[Array, " b"], Int[Array, "b c"]]:
    """Draw a token and add it to those to verify, which are donated."""
    new = best
    if draws is not None:
        history, before = draws.history, lax.iota(jnp.int32, tokens.shape[1])
        if history is not None:
            known = (before >= 1) & (before < place)
            history = _with_tokens(history, tokens, jnp.broadcast_to(known, tokens.shape))
        uniform = uniforms(draws.settings.seed, draws.stream, draws.count + place - 1)
        new = sample(logits, draws.settings, uniform, history)
    return new, lax.dynamic_update_slice(tokens, new[:, None], (jnp.int32(0), place))


@compiled(lambda at: at.batch, layer_options)
def judge(
    decoder: Decoder,
    params: Params,
    x: Float[Array, "b c e"],
    tokens: Int[Array, "b n"],
    room: Int[Array, " b"],
    active: Bool[Array, " b"],
    ends: Int[Array, " m"],
    draws: Draws | None,
) -> Verdict:
    """Compare the tokens to verify with the full model's draws."""
    tokens = tokens[:, : x.shape[1]]
    logits = decoder.logits(params, x).astype(jnp.float32)
    drawn = lax.argmax(logits, 2, jnp.int32) if draws is None else draw_all(logits, draws)
    c = tokens.shape[1]
    place = lax.iota(jnp.int32, c)[None]
    agrees = (drawn[:, :-1] == tokens[:, 1:]).astype(jnp.int32)
    accepted = jnp.sum(jnp.cumprod(agrees, axis=1), axis=1, dtype=jnp.int32)
    end = jnp.any(drawn[:, :, None] == ends[None, None], axis=2)
    first_end = jnp.min(jnp.where(end, place, c), axis=1)
    room = jnp.where(active, room, 0)
    count = jnp.minimum(jnp.minimum(accepted, first_end) + 1, room)
    newest = jnp.take_along_axis(drawn, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    last = jnp.where(count > 0, newest, tokens[:, 0])
    left = jnp.where(first_end < count, 0, room - count)
    if draws is not None:
        history = draws.history
        if history is not None:
            history = _with_tokens(history, drawn, place < count[:, None])
        draws = draws._replace(count=draws.count + count, history=history)
    return Verdict(drawn, count, last, left, draws, logits.reshape(-1, logits.shape[2]))


def draw_all(logits: Float[Array, "b c v"], draws: Draws) -> Int[Array, "b c"]:
    """Draw after every token, each time as if the draws before were the sequence's tokens."""

    def one(
        carry: tuple[Array, History | None], logits: Float[Array, "b v"]
    ) -> tuple[tuple[Array, History | None], Array]:
        count, history = carry
        uniform = uniforms(draws.settings.seed, draws.stream, count)
        new = sample(logits, draws.settings, uniform, history)
        if history is not None:
            history = _with_tokens(history, new[:, None], jnp.ones((len(new), 1), bool))
        return (count + 1, history), new

    _, drawn = lax.scan(one, (draws.count, draws.history), logits.swapaxes(0, 1))
    return drawn.swapaxes(0, 1)


def _with_tokens(history: History, tokens: Int[Array, "b n"], counted: Array) -> History:
    sequence = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
    drawn = history.drawn.at[sequence, jnp.maximum(tokens, 0)].add(counted.astype(jnp.int32))
    return history._replace(drawn=drawn)
