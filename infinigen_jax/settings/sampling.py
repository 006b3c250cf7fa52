"""Settings of sampling."""

import dataclasses

from infinigen_jax.numeric import SHARE, Range, whole_number
from infinigen_jax.settings.setting import Settings, setting

# Below this temperature the division could overflow, and the draw would be greedy anyway.
GREEDY_BELOW = 1e-5
MOST_LOG_PROBS = 20  # most alternatives; one program computes this number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(Settings):
    """Sampling settings of a sequence.

    They apply in the order penalties, temperature, top-k, top-p, min-p, as in transformers: top-p
    accumulates the probabilities of the tokens that top-k keeps. Temperatures below 1e-5 are
    greedy.

    Raises:
        ParameterError: a value is out of range.
    """

    temperature: float = setting(0.0, "divisor of the logits; 0 is greedy", "T", Range(0))
    top_k: int = setting(0, "sample from the K likeliest tokens; 0: from all", "K", whole_number(0))
    top_p: float = setting(
        1.0, "sample from the fewest likeliest tokens whose probabilities sum to P", "P", SHARE
    )
    min_p: float = setting(
        0.0, "sample from tokens at least P times as probable as the likeliest", "P", Range(0, 1)
    )
    repetition_penalty: float = setting(
        1.0,
        "divides positive logits of tokens in the prompt or the answer, and multiplies "
        "negative ones",
        "R",
        Range(0.01, 100),
    )
    presence_penalty: float = setting(
        0.0, "subtracted from the logits of tokens in the answer", "A", Range(-2, 2)
    )
    frequency_penalty: float = setting(
        0.0, "subtracted from a logit for each time its token is in the answer", "A", Range(-2, 2)
    )
    seed: int = setting(0, "seed of the samples", "S", whole_number(0, 2**32 - 1))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def penalises(self) -> bool:
        """Whether a draw depends on earlier tokens."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1, 0, 0)
