"""Configurations to compare: all combinations of the requested policies, budgets and formats."""

import argparse
import copy
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from infinigen_jax.cli.options import (
    POLICY_OPTIONS,
    make_engine,
    make_policy,
    make_pool,
    policy_settings,
)

if TYPE_CHECKING:
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.loading.load import Model
    from infinigen_jax.policies import Policy
    from infinigen_jax.settings.pool import Pool

LISTS = ("policy", *POLICY_OPTIONS, "rows", "pool_tokens", "pool_eviction")


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Line of a result; `options` have single values, this line's, in place of lists."""

    policy: "Policy"
    rows: str
    pool: "Pool | None"
    options: argparse.Namespace = dataclasses.field(compare=False)

    @property
    def label(self) -> str:
        """Short label for progress and errors."""
        parts = [self.options.policy]
        budget = getattr(self.policy, "budget", None)
        parts += [] if budget is None else [str(budget)]
        for name in ("alpha", "partial_ratio"):
            if hasattr(self.policy, name) and vars(self.options)[name] is not None:
                parts.append(f"{name} {vars(self.options)[name]}")
        parts += [] if self.pool is None else [self.pool.label]
        return " ".join([*parts, self.rows])

    def engine(self, model: "Model") -> "Engine":
        return make_engine(model, self.policy, self.options)


def configurations(arguments: argparse.Namespace, *, reference: bool) -> list[Configuration]:
    """Return the distinct combinations of the list options; the policy varies slowest."""
    values = [getattr(arguments, name) or [None] for name in LISTS]
    combinations: list[Any] = list(itertools.product(*values))
    if reference:
        full = {"policy": "full", "rows": "auto", "pool_tokens": "all"}
        combinations.insert(0, tuple(full.get(name) for name in LISTS))
    distinct: dict[Configuration, None] = {}
    for combination in combinations:
        options = copy.copy(arguments)
        vars(options).update(zip(LISTS, combination, strict=True))
        policy, pool = make_policy(options), make_pool(options)
        if pool is not None and policy.name == "full":
            options.pool_eviction = "fifo"  # equal for all orders: every step uses every row
            pool = make_pool(options)
        distinct.setdefault(Configuration(policy, options.rows or "auto", pool, options))
    return list(distinct)


def check(chosen: list[Configuration], model: "Model") -> None:
    """Refuse at the start what engines would refuse later, whatever the lengths of texts."""
    from infinigen_jax.cache.row_format import row_format
    from infinigen_jax.engine.runtime import curves_for
    from infinigen_jax.engine.settings import check_pool
    from infinigen_jax.transfer import make_transfer

    in_place = make_transfer(chosen[0].options.transfer or "auto").in_place
    for configuration in chosen:
        check_pool(configuration.pool, configuration.policy)
        pooled = configuration.pool is not None
        fitted = configuration.policy.fitted(model, in_place, pooled)
        fitted.check()
        curves_for(model, fitted)
        row_format(configuration.rows, model.dtype, model.config.head_dim)


def settings_of(engine: "Engine") -> dict[str, Any]:
    """Return all settings of an engine that its scores depend on, ready for JSON."""
    decoder = engine.decoder
    return policy_settings(decoder.policy) | {
        "rows": decoder.row_format.name,
        "pool": "all" if decoder.pool is None else decoder.pool.label,
        "dense_layers": decoder.dense_layers,
        "hot_set": decoder.hot_set,
        "transfer": decoder.transfer.name,
        # Quantised rows depend on where a prompt is divided.
        "prefill_chunk": engine.prefill_chunk or "auto",
    }
