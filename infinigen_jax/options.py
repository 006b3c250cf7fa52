"""Options that command lines share: which policy, and how the engine runs it.

Nothing here imports JAX before it is needed, so that a bad option is reported at once.
"""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from infinigen_jax.errors import InputError

if TYPE_CHECKING:
    from infinigen_jax.checkpoint import Model
    from infinigen_jax.engine import Engine
    from infinigen_jax.policies import Policy

POLICY_OPTIONS = (
    "alpha",
    "partial_ratio",
    "budget",
    "index_dtype",
    "basis",
    "query",
    "count",
    "mass",
    "tail",
)


def add_engine_options(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the options that `make_policy` and `make_engine` read.

    Args:
        several: --policy, --budget, --rows and --index-dtype take one or several values, and are
            lists then; see `evaluation.configurations`.
    """
    many: dict[str, Any] = {"nargs": "+"} if several else {}

    def default(value: str) -> Any:
        return [value] if several else value

    add = parser.add_argument
    add(
        "--policy",
        default=default("infinigen"),
        metavar="P",
        help="infinigen (default), full, infinigen-paper, ...; a wrong name lists them all",
        **many,
    )
    add("--alpha", type=float, help="fetch what is within A of the best score (default 4)")
    add("--partial-ratio", type=float, metavar="R", help="columns in the index (default 1)")
    add(
        "--budget",
        type=float,
        metavar="F",
        help="most rows fetched, of those cached (0.1)",
        **many,
    )
    add(
        "--index-dtype",
        metavar="T",
        help="of the index: int4 (default), auto, bfloat16, float32 or int8",
        **many,
    )
    add("--basis", metavar="B", help="of the index: auto (the model's, default), svd or balanced")
    add("--query", metavar="Q", help="ahead of its layer: auto (default), plain or corrected")
    add(
        "--count",
        metavar="C",
        help="rows in the budget: head (default), fixed, pooled, top-p, mean",
    )
    add("--mass", type=float, metavar="M", help="of count top-p (default 0.9)")
    add(
        "--tail",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="attend to the mean of what is not fetched (default: yes)",
    )
    add("--dense-layers", type=int, metavar="N", help="layers on the device (default 2)")
    add("--transfer", default="auto", help="auto (default), xla or cuda")
    add(
        "--rows",
        default=default("auto"),
        metavar="T",
        help="rows on the host: auto (exact, default), int8 or int4",
        **many,
    )
    add("--hot-set", type=float, metavar="M", help="rows kept after use, times the budget; 0: none")
    add("--eviction", default="lru", help="which of those give way: lru (default) or score")
    add("--dtype", help="float32, bfloat16 or float16 (default: float32 on the CPU, else bfloat16)")


def make_policy(arguments: argparse.Namespace) -> "Policy":
    """The policy of that name, with the options that were given; all of them single values.

    Raises:
        InputError: for an unknown name or a value out of range.
    """
    from infinigen_jax.index import INDEX_DTYPES
    from infinigen_jax.policies import POLICIES

    if arguments.policy not in POLICIES:
        raise InputError(f"--policy {arguments.policy}: use {' or '.join(POLICIES)}")
    if arguments.index_dtype not in (None, *INDEX_DTYPES):
        raise InputError(f"--index-dtype {arguments.index_dtype}: use {' or '.join(INDEX_DTYPES)}")
    kind = POLICIES[arguments.policy]
    given = {name: getattr(arguments, name) for name in POLICY_OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    known = {field.name for field in dataclasses.fields(kind)}
    # `full` has no budget to set; the options are still checked, as a typo should not pass.
    POLICIES["infinigen"](**given)
    return kind(**{name: value for name, value in given.items() if name in known})


def make_engine(
    model: "Model", policy: "Policy", arguments: argparse.Namespace, **settings: Any
) -> "Engine":
    """An engine with the options of `add_engine_options`; `settings` go to it as they are.

    Raises:
        InputError: for a value out of range.
    """
    from infinigen_jax.engine import Engine
    from infinigen_jax.reuse import EVICTIONS

    if arguments.eviction not in EVICTIONS:
        raise InputError(f"--eviction {arguments.eviction}: use {' or '.join(EVICTIONS)}")
    chosen = {
        "dense_layers": arguments.dense_layers,
        "transfer": arguments.transfer,
        "rows": arguments.rows,
        "hot_set": arguments.hot_set,
        "eviction": arguments.eviction,
    }
    return Engine(model, policy=policy, **(chosen | settings))
