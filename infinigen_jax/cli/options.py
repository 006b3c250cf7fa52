"""Options that command lines share: which policy, and how the engine runs it.

Nothing here imports JAX before it is needed, so that a bad option is reported at once.
"""

import argparse
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from infinigen_jax.errors import InputError
from infinigen_jax.numeric import number, whole_number

if TYPE_CHECKING:
    from infinigen_jax.cache.pool import Pool
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.loading.load import Model
    from infinigen_jax.policies import Policy

# For the help of --model; `checkpoint.EMBEDDED` comes with JAX.
OR_EMBEDDED = "or an embedded model: books-llama (default), tiny-llama or tiny-opt"
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "seed")  # fields of `sampling.Sampling`
POLICY_OPTIONS = (
    "alpha",
    "partial_ratio",
    "budget",
    "index_dtype",
    "basis",
    "query",
    "speculate_from",
    "count",
    "layer_budgets",
    "tail",
)


class _Both(argparse.BooleanOptionalAction):
    """A switch that may be given both ways, for both."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest) or []
        on = not str(option_string).startswith("--no-")
        setattr(namespace, self.dest, [*before, on])


def add_engine_options(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the options that `make_policy` and `make_engine` read.

    Args:
        several: the policy and its settings, --rows, --pool-tokens and --pool-eviction take one or
            several values, and are lists then; see `evaluation.configurations`.
    """
    many: dict[str, Any] = {"nargs": "+"} if several else {}

    def default(value: str) -> Any:
        return [value] if several else value

    add = parser.add_argument
    add(
        "--policy",
        default=default("infinigen"),
        metavar="P",
        help="infinigen (default), full, infinigen-paper, ...; a wrong name lists them all; "
        "settings that have no option go behind it: quest:page=8,window=64",
        **many,
    )
    add(
        "--alpha",
        type=number(0, math.inf),
        metavar="A",
        help="fetch what is within A of the best score (default 4)",
        **many,
    )
    add(
        "--partial-ratio",
        type=number(0, 1),
        metavar="R",
        help="columns in the index (default 0.75)",
        **many,
    )
    add(
        "--budget",
        type=number(0, 1),
        metavar="F",
        help="most rows fetched, of those cached (0.1)",
        **many,
    )
    add(
        "--index-dtype",
        metavar="T",
        help="of the index: int4 (default), auto, bfloat16 or float32",
        **many,
    )
    add(
        "--basis",
        metavar="B",
        help="of the index: auto (the model's, default), svd or balanced",
        **many,
    )
    add(
        "--query",
        metavar="Q",
        help="that rows are chosen by: auto (default), plain, corrected or own",
        **many,
    )
    add(
        "--speculate-from",
        metavar="S",
        help="what of the layer before: input, or resident, the state after attention to the "
        "resident rows (default: as converted, else input)",
        **many,
    )
    add(
        "--count",
        metavar="C",
        help="rows in the budget: by KV head (head, default) or the mean of all, as in the paper",
        **many,
    )
    add(
        "--layer-budgets",
        metavar="L",
        help="of the layers: calibrated by what each loses, with that mean (default), or equal",
        **many,
    )
    add(
        "--tail",
        action=_Both if several else argparse.BooleanOptionalAction,
        default=None,
        help="attend to the mean of what is not fetched (default: yes)",
    )
    add(
        "--dense-layers",
        type=whole_number(0),
        metavar="N",
        help="first layers on the device (default: those that need it)",
    )
    add("--transfer", default="auto", help="auto (default), xla or cuda")
    add(
        "--rows",
        default=default("auto"),
        metavar="T",
        help="rows on the host: auto (exact, default), int8 or int4",
        **many,
    )
    add(
        "--pool-tokens",
        metavar="N",
        help="most rows on the host, of a layer, sequence and KV head: a number, or a share of the "
        "context such as 80%%; all (default): no limit",
        **many,
    )
    add(
        "--pool-eviction",
        metavar="E",
        help="which of them give way: counter (default), lru or fifo",
        **many,
    )
    add(
        "--pool-sinks",
        type=whole_number(0),
        metavar="N",
        help="first tokens that never do (default 4)",
    )
    add(
        "--hot-set",
        type=number(0),
        metavar="M",
        help="rows kept after use, times the budget; 0: none",
    )
    add("--weights", default="device", help="where the layers' weights are: device or host")
    add(
        "--prefill-chunk",
        default="auto",
        metavar="N",
        help="tokens of a prompt read at a time (default auto: 1024 on the CPU, else to 4096)",
    )
    add("--dtype", help="float32, bfloat16 or float16 (default: float32 on the CPU, else bfloat16)")


def make_policy(arguments: argparse.Namespace) -> "Policy":
    """The policy of that name, with the options that were given; all of them single values.

    Raises:
        InputError: for an unknown name or a value out of range.
    """
    from infinigen_jax.policies import POLICIES
    from infinigen_jax.speculation.index import INDEX_DTYPES

    kind, own = read_policy(arguments.policy)
    if arguments.index_dtype not in (None, *INDEX_DTYPES):
        raise InputError(f"--index-dtype {arguments.index_dtype}: use {' or '.join(INDEX_DTYPES)}")
    given = {name: getattr(arguments, name) for name in POLICY_OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    known = {field.name for field in dataclasses.fields(kind)}
    # `full` has no budget to set; the options are still checked, as a typo should not pass.
    POLICIES["infinigen"](**given)
    return kind(**({name: value for name, value in given.items() if name in known} | own))


def unused_options(arguments: argparse.Namespace) -> list[str]:
    """A line for each given option that no chosen policy takes: it has no such setting, or has it
    given behind its name; see `make_policy`.

    Raises:
        InputError: for a policy that does not exist.
    """
    several = isinstance(arguments.policy, list)
    names = arguments.policy if several else [arguments.policy]
    taken: set[str] = set()
    for kind, own in map(read_policy, names):
        taken |= {field.name for field in dataclasses.fields(kind)} - own.keys()
    unused = {name: getattr(arguments, name) for name in POLICY_OPTIONS if name not in taken}
    return [
        f"--{'no-' if value in (False, [False]) else ''}{name.replace('_', '-')}: no effect with "
        f"--policy {' '.join(names)}"
        for name, value in unused.items()
        if value is not None
    ]


def options_without_effect(arguments: argparse.Namespace, engine: "Engine") -> list[str]:
    """A line for each option of the policy, or setting behind its name, that an engine takes for
    another value: the model, the device or another setting leaves the given one no meaning.

    Args:
        arguments: that `engine` was made with, single values.
    """
    kind, own = read_policy(arguments.policy)
    names = {field.name for field in dataclasses.fields(kind)} - own.keys()
    given = {name: getattr(arguments, name) for name in POLICY_OPTIONS if name in names}
    policy = engine.decoder.policy
    lines = [
        f"{option}: taken as {getattr(policy, name)}, by the model, the device or other settings"
        for name, value, option in (
            *((n, value, f"--{n.replace('_', '-')} {value}") for n, value in given.items()),
            *((n, value, f"--policy {arguments.policy}: {n}") for n, value in own.items()),
        )
        if value not in (None, "auto", getattr(policy, name))
    ]
    chunk = chunk_option(arguments.prefill_chunk)
    if chunk not in (None, engine.prefill_chunk):
        lines.append(f"--prefill-chunk {chunk}: no effect, as --pool-tokens reads a prompt at once")
    return lines


def read_policy(text: str) -> tuple[Any, dict[str, Any]]:
    """A policy's class, and the settings given behind its name: "quest:page=8,window=64".

    Raises:
        InputError: for a name, a setting or a value that does not exist.
    """
    from infinigen_jax.policies import POLICIES

    name, _, rest = text.partition(":")
    if name not in POLICIES:
        raise InputError(f"--policy {name}: use {' or '.join(POLICIES)}")
    kinds = {field.name: field.type for field in dataclasses.fields(POLICIES[name])}
    settings = {}
    for part in rest.split(",") if rest else []:
        setting, _, value = part.partition("=")
        if setting not in kinds:
            raise InputError(f"--policy {text}: {setting!r} is no setting; use {', '.join(kinds)}")
        settings[setting] = _value(text, value, kinds[setting])
    return POLICIES[name], settings


def _value(text: str, value: str, kind: Any) -> Any:
    """A setting's value, of the kind that the policy declares."""
    try:
        return {"true": True, "false": False}[value] if kind is bool else kind(value)
    except (KeyError, ValueError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise InputError(f"--policy {text}: {value!r} is not {wanted}") from None


def make_pool(arguments: argparse.Namespace) -> "Pool | None":
    """The limit of the host's cache, if there is to be one; its options are single values.

    Raises:
        InputError: for a value out of range, or an option of a limit without a limit.
    """
    from infinigen_jax.cache.pool import Pool, parse_limit

    given = {"eviction": arguments.pool_eviction, "sinks": arguments.pool_sinks}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.pool_tokens in (None, "all"):
        if arguments.pool_tokens is None and given:
            raise InputError(f"--pool-{next(iter(given))}: nothing gives way without --pool-tokens")
        Pool(share=1.0, **given)  # a typo should not pass
        return None
    tokens, share = parse_limit(arguments.pool_tokens)
    return Pool(tokens=tokens, share=share, **given)


def chunk_option(text: str) -> int | None:
    """What --prefill-chunk asks for; None is for the engine to choose.

    Raises:
        InputError: for anything but `auto` and a whole number.
    """
    if text == "auto":
        return None
    try:
        return whole_number(1)(text)
    except argparse.ArgumentTypeError as error:
        raise InputError(f"--prefill-chunk {error}, or auto") from None


def make_engine(
    model: "Model", policy: "Policy", arguments: argparse.Namespace, **settings: Any
) -> "Engine":
    """An engine with the options of `add_engine_options`; `settings` go to it as they are.

    Raises:
        InputError: for a value out of range.
    """
    from infinigen_jax.engine.engine import Engine

    chosen = {
        "dense_layers": arguments.dense_layers,
        "transfer": arguments.transfer,
        "rows": arguments.rows,
        "hot_set": arguments.hot_set,
        "pool": make_pool(arguments),
        "weights": "device" if arguments.weights is None else arguments.weights,
        "prefill_chunk": chunk_option(arguments.prefill_chunk),
    }
    return Engine(model, policy=policy, **(chosen | settings))
