"""Settings of sampling."""

import dataclasses

from infinigen_jax.numeric import number, share, whole_number
from infinigen_jax.settings.setting import Settings, setting

# Below this temperature the division could overflow, and the draw would be greedy anyway.
GREEDY_BELOW = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(Settings):
    """Sampling settings; hashable, so they can be a static argument of a jitted function.

    They apply in the order temperature, top-k, top-p: top-p accumulates the probabilities of the
    tokens that top-k keeps. Temperatures below 1e-5 are greedy.

    Raises:
        ParameterError: a value is out of range.
    """

    temperature: float = setting(0.0, "divisor of the logits; 0 is greedy", "T", number(0))
    top_k: int = setting(0, "sample from the K likeliest tokens; 0: from all", "K", whole_number(0))
    top_p: float = setting(
        1.0, "sample from the fewest likeliest tokens whose probabilities sum to P", "P", share()
    )
    seed: int = setting(0, "seed of the samples", "S", whole_number(0, 2**32 - 1))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, so that no keys are needed."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def unseeded(self) -> "Sampling":
        """These settings with seed 0, so that a program is compiled once for all seeds."""
        return dataclasses.replace(self, seed=0)
