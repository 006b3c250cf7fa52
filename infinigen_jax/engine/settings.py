"""Settings of an engine: a frozen object, checked on construction."""

import dataclasses
import functools
from typing import Any

from infinigen_jax.errors import ParameterError
from infinigen_jax.numeric import listed
from infinigen_jax.policies import POLICIES, InfiniGen, Policy, check_policy
from infinigen_jax.settings.engine import EngineOptions
from infinigen_jax.settings.pool import Pool

DRAFTING = ("draft_tokens", "draft_weights")  # settings of `lossless`


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings(EngineOptions):
    """Settings of an engine.

    Attributes:
        policy: policy that selects the rows to fetch.

    Raises:
        InputError: for settings out of range.
    """

    policy: Policy = dataclasses.field(default_factory=InfiniGen)

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.policy, Policy):
            raise ParameterError(
                "policy",
                f"{self.policy!r} is not a policy; give InfiniGen(budget=0.1) or another instance "
                f"(docs/api.md), also of a class of your own, or a name: {', '.join(POLICIES)}",
            )
        check_policy(type(self.policy), type(self.policy).__name__)
        _check_fields(self.policy)
        if self.pool is not None and not isinstance(self.pool, Pool):
            raise ParameterError("pool", "give Pool(tokens=4096) or Pool(share=0.8)", self.pool)
        check_pool(self.pool, self.policy)
        given = (name for name in DRAFTING if getattr(self, name) is not None)
        if not self.lossless and (name := next(given, None)) is not None:
            raise ParameterError(name, "nothing is drafted; use `lossless` as well")

    @classmethod
    def of(cls, policy: Policy | str | None = None, **settings: object) -> "EngineSettings":
        """Return settings with a policy, or with the defaults of a named policy."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := next((name for name in settings if name not in known), None):
            remedy = "no setting of an engine; those of a policy are given as InfiniGen(budget=0.1)"
            raise ParameterError(unknown, remedy)
        if isinstance(policy, str) and policy in POLICIES:
            policy = POLICIES[policy]()
        given: Any = settings if policy is None else settings | {"policy": policy}
        return cls(**given)


def _check_fields(policy: Policy) -> None:
    """Refuse a policy whose fields do not tell it from others: they name its programs."""
    kind, fields = type(policy), {field.name for field in dataclasses.fields(policy)}  # pyright: ignore
    for name in vars(policy).keys() - fields:
        if not isinstance(getattr(kind, name, None), functools.cached_property):
            problem = f"its `{name}` is no field; make {kind.__name__} a frozen dataclass with it"
            raise ParameterError("policy", problem, policy.name)
    try:
        hash(policy)
    except TypeError as error:
        problem = f"{error}; its fields are constants, and arrays come from `prepare`"
        raise ParameterError("policy", problem, policy.name) from None


def check_pool(pool: Pool | None, policy: Policy) -> None:
    """Raise ParameterError, which names other policies, if a policy supports no limited cache."""
    if pool is not None and not policy.pools:
        names = listed([name for name, kind in POLICIES.items() if kind.pools])
        others = f"policy {policy.name} cannot have a limit; use {names}"
        raise ParameterError("pool", f"{others}, or set `pools` in a class of your own")


def check_fitted(policy: Policy, pool: Pool | None) -> None:
    """Raise ParameterError if flags of a fitted policy exclude each other or the pool."""
    policy.check()
    if pool is not None and policy.tail_block:
        problem = f"policy {policy.name} cannot have a limit and a `tail_block` of positions"
        raise ParameterError("pool", f"{problem}; use one mean, or leave the pool out")
