"""Work on only the leading slots gives the result of work on all slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import engine, numbers

from infinigen_jax.ops import used_slots
from infinigen_jax.ops.used_slots import over_used
from infinigen_jax.policies import InfiniGen


@pytest.mark.parametrize(
    "capacity, used, size",
    [
        (4000, 9, 4000),
        (4096, 0, 1024),
        (4096, 1024, 1024),
        (4096, 1025, 4096),
        (20_000, 5, 1024),
        (20_000, 1025, 4096),
        (20_000, 4097, 20_000),
        (65_536, 4096, 4096),
    ],
)
def test_the_smallest_size_with_all_used_slots_is_computed(capacity, used, size):
    compute = jax.jit(lambda used: over_used(jnp.int32, used, capacity))
    assert int(compute(jnp.int32(used))) == size


def test_a_conversation_in_a_larger_cache_has_equal_answers(monkeypatch):
    """One layer is on the device and one on the host; 8 to 120 of 256 slots are in use."""

    def answer(alpha: float) -> tuple[list[int | None], np.ndarray]:
        policy = InfiniGen(budget=0.3, window=4, sinks=2, alpha=alpha, tail_tokens=16)
        conversation = engine("gqa", policy, 1, schedule="fused").conversation(context=256)
        steps = conversation.turn(numbers(8), 112, ignore_eos=True)
        tokens = [step.tokens[0] for step in steps]
        assert conversation.run is not None
        counts = [np.asarray(count.selected) for count in conversation.run.counts]
        return tokens, np.stack(counts)

    whole = answer(1e4)
    monkeypatch.setattr(used_slots, "UNIT", 64)
    # Another alpha that every row passes: programs are kept by their settings.
    leading = answer(2e4)
    assert leading[0] == whole[0]
    np.testing.assert_array_equal(leading[1], whole[1])
    assert 0 < whole[1].min() and whole[1].max() > 19  # 0.3 of 64: chosen from all slots
