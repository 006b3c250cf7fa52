"""The number of tokens to draft: the closed form, and its measurements."""

import numpy as np
import pytest

from infinigen_jax.engine.draft_length import MOST, SIZES, TRIED, DraftLength, size_of


def measured(
    acceptance: float, step: float, verification: dict[int, float], most: int = MOST, **ages: bool
) -> DraftLength:
    length = DraftLength(most, **ages)
    for size, seconds in verification.items():
        length.time_verification(size, seconds)
    for _ in range(TRIED):
        length.time_draft(1, step)
    for _ in range(100):
        length.record(10 * acceptance, 10)
    return length


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9, 0.98])
def test_it_maximises_the_simulated_rate(acceptance):
    """Simulated with independent tokens; the choice is within 2 % of the best."""
    step, verification = 1.0, {1: 3.0, 4: 4.0, 16: 8.0}
    accepts = np.random.default_rng(0).random((20000, MOST)) < acceptance
    accepted = np.cumprod(accepts, axis=1)

    def rate(k: int) -> float:
        tokens = 1 + accepted[:, :k].sum() / len(accepted)
        return tokens / (k * step + verification[size_of(k)])

    best = max(map(rate, range(MOST + 1)))
    chosen = measured(acceptance, step, verification).choose(MOST)
    assert rate(chosen) > 0.98 * best


def test_rejections_shorten_the_draft_and_time_without_one_lengthens_it_again():
    length = measured(0.95, 0.2, {1: 1.0, 4: 1.1, 16: 1.4})
    long = length.choose(MOST)
    for _ in range(30):
        length.record(0, 3)
    assert length.choose(MOST) < long
    for _ in range(60):
        length.record(0, 0)
    assert length.acceptance > 0.7


@pytest.mark.parametrize("stalled", [0, 1, 50])
def test_one_slow_draft_does_not_end_drafting(stalled):
    """The machine may be busy for a moment, also during the first draft."""
    length, verification = DraftLength(MOST), {1: 1.0, 4: 1.1, 16: 1.4}
    for size, seconds in verification.items():
        length.time_verification(size, seconds)
    chosen = []
    for number in range(100):
        drafted = length.choose(MOST)
        chosen.append(drafted)
        length.time_draft(drafted, drafted * (1000.0 if number == stalled else 0.2))
        length.time_verification(size_of(drafted), verification[size_of(drafted)])
        length.record(0.9 * drafted, drafted)
    assert min(chosen) >= 3


@pytest.mark.parametrize(("most", "sizes"), [(2, [1, 4]), (3, [1, 4]), (5, [1, 4, 16])])
def test_a_limit_bounds_the_choice(most, sizes):
    length = measured(0.99, 0.01, dict.fromkeys(SIZES, 1.0), most)
    assert (length.choose(MOST), length.choose(1), length.sizes) == (most, 1, sizes)
    for _ in range(30):
        length.record(0, most)
        length.time_draft(most, 100.0 * most)
    assert length.choose(MOST) == 0


def test_in_a_changing_batch_slow_sizes_are_tried_again():
    """A verification that was slow once, next to a long text, is measured again."""
    length, tried = measured(1.0, 0.01, {1: 1.0, 4: 1.0, 16: 10.0}, ages=True), []
    for _ in range(100):
        length.record(10, 10)
        tried.append(length.choose(MOST))
        length.time_verification(size_of(tried[-1]), 1.0)
    assert tried[0] <= 3 and max(tried) > 3
    for _ in range(100_000):  # times that are not measured for long
        length.time_verification(1, 1.0)
    assert length.choose(MOST) > 3


@pytest.mark.parametrize("acceptance", [0.5, 0.9])
def test_a_changing_batch_rarely_tries_what_does_not_pay(acceptance):
    """A step costs as much as the verification of one token, as with short texts."""
    step, verification = 1.0, {1: 1.1, 4: 2.0, 16: 6.0}
    length = measured(acceptance, step, verification, ages=True)
    tokens = seconds = 0.0
    for _ in range(1000):
        drafted = length.choose(MOST)
        expected = (1 - acceptance ** (drafted + 1)) / (1 - acceptance)
        tokens, seconds = tokens + expected, seconds + drafted * step
        length.time_draft(drafted, drafted * step)
        length.time_verification(size_of(drafted), verification[size_of(drafted)])
        seconds += verification[size_of(drafted)]
        length.record(expected - 1, min(expected, drafted) if drafted else 0)
    assert tokens / seconds > 0.9 / verification[1]  # the best rate is that without drafts
