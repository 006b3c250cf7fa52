"""What is compared: every combination of the policies, budgets, formats that were asked for."""

import argparse
import copy
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from infinigen_jax.cli.options import make_engine, make_policy, make_pool

if TYPE_CHECKING:
    from infinigen_jax.cache.pool import Pool
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.loading.load import Model
    from infinigen_jax.policies import Policy

LISTS = (
    "policy",
    "budget",
    "alpha",
    "partial_ratio",
    "index_dtype",
    "basis",
    "query",
    "speculate_from",
    "count",
    "layer_budgets",
    "tail",
    "rows",
    "pool_tokens",
    "pool_eviction",
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One line of the result.

    Attributes:
        rows: format of the host's rows, see `rows.row_format`.
        pool: limit of the host's cache, if it has one.
        options: the command line's, those that may be lists as the single values of this line.
    """

    policy: "Policy"
    rows: str
    pool: "Pool | None"
    options: argparse.Namespace = dataclasses.field(compare=False)

    @property
    def label(self) -> str:
        """A few words, for progress and errors."""
        parts = [self.options.policy]
        for name in ("budget", "index_dtype"):
            value = getattr(self.policy, name, None)
            parts += [] if value is None else [str(value)]
        for name in ("alpha", "partial_ratio", "basis", "query", "count", "layer_budgets", "tail"):
            if hasattr(self.policy, name) and vars(self.options)[name] is not None:
                parts.append(f"{name} {vars(self.options)[name]}")
        parts += [] if self.pool is None else [self.pool.label]
        return " ".join([*parts, self.rows])

    def engine(self, model: "Model") -> "Engine":
        return make_engine(model, self.policy, self.options)


def configurations(arguments: argparse.Namespace, *, reference: bool) -> list[Configuration]:
    """The product of the lists, each different combination once; the policy varies slowest.

    Args:
        arguments: with the options of `add_engine_options(parser, several=True)`.
        reference: the full cache with exact rows comes first, asked for or not.

    Raises:
        InputError: for a policy or a value that does not exist.
    """
    values = [getattr(arguments, name) or [None] for name in LISTS]
    combinations: list[Any] = list(itertools.product(*values))
    if reference:
        full = {"policy": "full", "rows": "auto", "pool_tokens": "all"}
        combinations.insert(0, tuple(full.get(name) for name in LISTS))
    found: dict[Configuration, None] = {}
    for combination in combinations:
        options = copy.copy(arguments)
        vars(options).update(zip(LISTS, combination, strict=True))
        policy, pool = make_policy(options), make_pool(options)
        if pool is not None and policy.name == "full":
            options.pool_eviction = "fifo"  # every step uses every row, so that all orders are
            pool = make_pool(options)
        found.setdefault(Configuration(policy, options.rows, pool, options))
    return list(found)


def check(chosen: list[Configuration], model: "Model") -> None:
    """Refuse now what the last engine would refuse after the work of the others.

    Raises:
        InputError: for a row format that this model cannot have, or a limit that a policy cannot.
    """
    from infinigen_jax.cache.row_format import row_format
    from infinigen_jax.engine.runtime import curves_for
    from infinigen_jax.engine.settings import check_pool

    for configuration in chosen:
        check_pool(configuration.pool, configuration.policy)
        curves_for(model, configuration.policy)
        row_format(configuration.rows, model.dtype, model.config.head_dim)


def settings_of(engine: "Engine") -> dict[str, Any]:
    """All settings of an engine that its scores depend on, ready for JSON."""
    decoder = engine.decoder
    policy = dataclasses.asdict(decoder.policy)  # pyright: ignore[reportArgumentType]
    # JSON has no infinity.
    policy = {k: "inf" if v == float("inf") else v for k, v in policy.items()}
    return policy | {
        "rows": decoder.row_format.name,
        "pool": "all" if decoder.pool is None else decoder.pool.label,
        "dense_layers": decoder.dense_layers,
        "hot_set": decoder.hot_set,
        "transfer": decoder.transfer.name,
        # Small rows depend on where a prompt is cut.
        "prefill_chunk": engine.prefill_chunk or "auto",
    }
