"""Settings of an engine: a frozen object, checked on construction."""

import dataclasses

from infinigen_jax.cache.pool import Pool
from infinigen_jax.decode.steps import SCHEDULES
from infinigen_jax.errors import InputError
from infinigen_jax.numeric import LARGEST_FACTOR, check_range
from infinigen_jax.policies import POLICIES, InfiniGen, Policy
from infinigen_jax.transfer.host_weights import check_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of an engine.

    Attributes:
        policy: policy that selects the rows to fetch.
        dense_layers: number of leading layers whose whole cache stays on the device. The default
            depends on the policy: 2, or with InfiniGen those that need it, see
            `Model.dense_layers`.
        schedule: "fused", "layerwise" or "auto"; it does not change the results. "auto" chooses
            layerwise for models of many layers on a CPU, where compiling a fused step takes longer
            with every layer, and fused otherwise.
        transfer: "auto", "xla" or "cuda".
        rows: format of a row on the host: "auto" for the model's dtype, "int8" or "int4".
        hot_set: number of fetched rows kept on the device, in multiples of the budget: 0 for none,
            otherwise at least 1. By default 2 with the `cuda` transfer, and 0 with `xla`, where
            looking rows up costs more than moving them.
        pool: limit of the host's cache; None for the whole context.
        weights: "device" or "host". With "host" the layers' weights are kept in host memory and
            moved for each step; results are equal. `load` takes it as well.
        check: whether to check the output of every stage for NaN and infinity, which end a run
            with `finite_check.NotFiniteError`. Uses the fused schedule.
        prefill_chunk: maximum number of prompt tokens read at a time; by default
            `prefill.longest_chunk`. With a pool, prompts are read in one piece.

    Raises:
        InputError: for settings out of range.
    """

    policy: Policy = dataclasses.field(default_factory=InfiniGen)
    dense_layers: int | None = None
    schedule: str = "auto"
    transfer: str = "auto"
    rows: str = "auto"
    hot_set: float | None = None
    pool: Pool | None = None
    weights: str = "device"
    check: bool = False
    prefill_chunk: int | None = None

    def __post_init__(self):
        if not isinstance(self.policy, Policy):
            raise InputError(
                f"policy: {self.policy!r} is not a policy; give InfiniGen(budget=0.1), or a name: "
                f"{', '.join(POLICIES)}"
            )
        if self.dense_layers is not None:
            check_range("--dense-layers", self.dense_layers, 0)
        if self.schedule not in ("auto", *SCHEDULES):
            raise InputError(f"--schedule {self.schedule}: use auto or {' or '.join(SCHEDULES)}")
        size = self.hot_set
        if size is not None and not (size == 0 or 1 <= size <= LARGEST_FACTOR):
            raise InputError(
                f"--hot-set {size}: it must be 0, or at least 1 and at most {LARGEST_FACTOR:g}"
            )
        check_pool(self.pool, self.policy)
        check_weights(self.weights)
        if self.prefill_chunk is not None:
            check_range("--prefill-chunk", self.prefill_chunk, 1)

    @classmethod
    def of(cls, policy: Policy | str | None = None, **settings: object) -> "EngineSettings":
        """Return settings with a policy, or with the defaults of a named policy."""
        if policy is None:
            return cls(**settings)  # pyright: ignore[reportArgumentType]
        if isinstance(policy, str) and policy in POLICIES:
            policy = POLICIES[policy]()
        return cls(policy=policy, **settings)  # pyright: ignore[reportArgumentType]


def check_pool(pool: Pool | None, policy: Policy) -> None:
    """Check that a policy supports a limit of the host's cache, if one is set.

    Raises:
        InputError: if it does not; the message names the policies that do.
    """
    if pool is not None and not policy.pools:
        names = " or ".join(name for name, kind in POLICIES.items() if kind.pools)
        raise InputError(f"--pool-tokens: policy {policy.name} cannot have a limit; use {names}")
