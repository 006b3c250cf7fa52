"""What an engine is asked to do: one frozen object, checked when it is made."""

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
        policy: which cached rows are fetched; the name of a policy stands for its defaults.
        dense_layers: leading layers whose cache stays on the device in full; by default what the
            policy says: 2, but for InfiniGen those that need it, see `Model.dense_layers`.
        schedule: "fused", "layerwise" or "auto"; equal results. "auto" is layerwise for models of
            many layers on a CPU, whose start would grow with them, and fused elsewhere.
        transfer: "auto", "xla" or "cuda".
        rows: format of a row on the host: "auto" in the model's dtype, "int8" or "int4".
        hot_set: rows kept on the device after they were fetched, in multiples of the budget's: 0
            for none, else at least 1. By default 2 with the `cuda` transfer, and none with `xla`,
            where looking rows up costs more than moving them.
        pool: a limit of the host's cache; None for the whole context.
        weights: "device", or "host": the layers' weights are kept in host memory and brought for
            each step; equal results. `load` takes it as well.
        check: whether the output of every stage is checked for a NaN or an infinity, which ends a
            run with `finite_check.NotFiniteError`. Takes the fused schedule.
        prefill_chunk: most tokens of a prompt that are read at a time; by default
            `prefill.longest_chunk`. With a pool a prompt is read in one piece.

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
                f"policy: {self.policy!r} is none; give one such as InfiniGen(budget=0.1), or a "
                f"name: {', '.join(POLICIES)}"
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
        """Settings with a policy, or the name of one."""
        if policy is None:
            return cls(**settings)  # pyright: ignore[reportArgumentType]
        if isinstance(policy, str) and policy in POLICIES:
            policy = POLICIES[policy]()
        return cls(policy=policy, **settings)  # pyright: ignore[reportArgumentType]


def check_pool(pool: Pool | None, policy: Policy) -> None:
    """Refuse a limit for a policy that cannot have one.

    Raises:
        InputError: naming the policies that can.
    """
    if pool is not None and not policy.pools:
        names = " or ".join(name for name, kind in POLICIES.items() if kind.pools)
        raise InputError(f"--pool-tokens: policy {policy.name} cannot have a limit; use {names}")
