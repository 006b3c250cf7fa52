"""Options that command lines share: which policy, and how the engine runs it.

Nothing here imports JAX before it is needed, so that a bad option is reported immediately.
"""

import argparse
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from infinigen_jax.errors import InputError, Parser
from infinigen_jax.numeric import number, parse_whole, share, whole_number

if TYPE_CHECKING:
    from infinigen_jax.cache.pool import Pool
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.loading.load import Model
    from infinigen_jax.policies import Policy

DEFAULT_MODEL = "books-llama"
# For the help of --model; `loading.EMBEDDED` comes with JAX.
OR_EMBEDDED = f"or an embedded model: {DEFAULT_MODEL} (default), tiny-llama or tiny-opt"
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "seed")  # fields of `sampling.Sampling`
# Settings of InfiniGen that are options of `evaluate` alone, which takes lists of them; elsewhere
# they follow the policy's name.
EXPERT_SETTINGS = {
    "index_dtype": ("T", "format of the index: int4 (default), auto, bfloat16 or float32"),
    "basis": ("B", "basis of the index: auto (the model's, default), svd or balanced"),
    "query": ("Q", "query that selects rows: auto (default), plain, corrected or own"),
    "speculate_from": (
        "S",
        "state that the query is predicted from: input of the layer before; or resident, the "
        "state after attention to the resident rows (default: as converted, else input)",
    ),
    "count": ("C", "rows in the budget: by KV head (head, default), or the mean of all (mean)"),
    "layer_budgets": (
        "L",
        "budgets of the layers: calibrated by the loss of each, with that mean (default), or equal",
    ),
}
POLICY_OPTIONS = ("alpha", "partial_ratio", "budget", *EXPERT_SETTINGS, "tail")


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

    add = parser.add_argument_group("policy: which cached rows are fetched").add_argument
    add(
        "--policy",
        default=default("infinigen"),
        metavar="P",
        help="infinigen (default), full, infinigen-paper, window, h2o, quest, ... or the path of a "
        "class, package.module.MyPolicy; other settings follow its name: quest:page=8,window=64",
        **many,
    )
    add(
        "--budget",
        type=share(),
        metavar="F",
        help="most rows fetched, as a share of those cached (default 0.1)",
        **many,
    )
    add(
        "--alpha",
        type=number(0, math.inf),
        metavar="A",
        help="fetch rows that score within A of the best (default 4)",
        **many,
    )
    add(
        "--partial-ratio",
        type=share(),
        metavar="R",
        help="share of a key's columns in the index (default 0.75)",
        **many,
    )
    add = parser.add_argument_group("memory and precision").add_argument
    add("--dtype", help="float32, bfloat16 or float16 (default: float32 on the CPU, else bfloat16)")
    add(
        "--rows",
        default=default("auto"),
        metavar="T",
        help="format of rows on the host: auto (exact, default), int8 or int4",
        **many,
    )
    add(
        "--dense-layers",
        type=whole_number(0),
        metavar="N",
        help="first layers whose cache stays on the device (default: those that need it)",
    )
    add(
        "--weights",
        default="device",
        metavar="W",
        help="memory of the layers' weights: device (default) or host",
    )
    _add_experts(parser, several, many)


def _add_experts(parser: argparse.ArgumentParser, several: bool, many: dict[str, Any]) -> None:
    """Add the options of `add_engine_options` that few need."""
    add = (parser.experts if isinstance(parser, Parser) else parser).add_argument
    add("--transfer", default="auto", metavar="T", help="auto (default), xla or cuda")
    add(
        "--prefill-chunk",
        default="auto",
        metavar="N",
        help="tokens of a prompt read at a time (default auto: 1024 on the CPU, else to 4096)",
    )
    add(
        "--hot-set",
        type=number(0),
        metavar="M",
        help="rows kept on the device after use, in multiples of the budget; 0: none",
    )
    add(
        "--pool-tokens",
        metavar="N",
        help="most rows on the host, per layer, sequence and KV head: a number, or a share of the "
        "context such as 80%%; all (default): no limit",
        **many,
    )
    add(
        "--pool-eviction",
        metavar="E",
        help="order in which a full pool evicts rows: counter (default), lru or fifo",
        **many,
    )
    add(
        "--pool-sinks",
        type=whole_number(0),
        metavar="N",
        help="first tokens that a pool never evicts (default 4)",
    )
    if not several:
        return
    for name, (metavar, text) in EXPERT_SETTINGS.items():
        add(f"--{name.replace('_', '-')}", metavar=metavar, help=text, **many)
    add("--tail", action=_Both, default=None, help="attend to the mean of unfetched rows (default)")


def make_policy(arguments: argparse.Namespace) -> "Policy":
    """The policy of that name, with the options that were given; all of them single values.

    Raises:
        InputError: for an unknown name or a value out of range.
    """
    kind, own = read_policy(arguments.policy)
    try:
        policy = kind(**own)
    except InputError as error:
        raise InputError(f"--policy {arguments.policy}: {_unprefixed(error)}") from None
    names = {field.name for field in dataclasses.fields(kind)} - own.keys()
    given = {name: value for name, value in given_settings(arguments).items() if name in names}
    return dataclasses.replace(policy, **given)


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of a policy that were given."""
    values = {name: getattr(arguments, name, None) for name in POLICY_OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def _unprefixed(error: InputError) -> str:
    """A message of a policy about a setting, without the option that it would be."""
    return str(error).removeprefix("--policy: ").removeprefix("--")


def unused_options(arguments: argparse.Namespace) -> list[str]:
    """A line for each given option that no chosen policy takes: the policy has no such setting, or
    its value follows the policy's name; see `make_policy`.

    Raises:
        InputError: for a policy that does not exist.
    """
    several = isinstance(arguments.policy, list)
    names = arguments.policy if several else [arguments.policy]
    taken: set[str] = set()
    for kind, own in map(read_policy, names):
        taken |= {field.name for field in dataclasses.fields(kind)} - own.keys()
    given = given_settings(arguments)
    return [
        f"--{'no-' if value in (False, [False]) else ''}{name.replace('_', '-')}: no effect with "
        f"--policy {' '.join(names)}"
        for name, value in given.items()
        if name not in taken
    ]


def options_without_effect(arguments: argparse.Namespace, engine: "Engine") -> list[str]:
    """A line for each setting of the policy that an engine replaces by another value, because the
    model, the device or another setting leaves the given one no meaning.

    Args:
        arguments: that `engine` was made with, single values.
    """
    kind, own = read_policy(arguments.policy)
    names = {field.name for field in dataclasses.fields(kind)} - own.keys()
    given = {name: value for name, value in given_settings(arguments).items() if name in names}
    policy = engine.decoder.policy
    lines = [
        f"{option}: taken as {getattr(policy, name)}, by the model, the device or other settings"
        for name, value, option in (
            *((n, value, f"--{n.replace('_', '-')} {value}") for n, value in given.items()),
            *((n, value, f"--policy {arguments.policy}: {n}") for n, value in own.items()),
        )
        if value not in ("auto", getattr(policy, name))
    ]
    chunk = chunk_option(arguments.prefill_chunk)
    if chunk not in (None, engine.prefill_chunk):
        lines.append(
            f"--prefill-chunk {chunk}: no effect, as --pool-tokens reads a prompt in one piece"
        )
    return lines


def read_policy(text: str) -> tuple[Any, dict[str, Any]]:
    """A policy's class, and the settings that follow its name: "quest:page=8,window=64".

    Raises:
        InputError: for a name, a setting or a value that does not exist.
    """
    from infinigen_jax.policies import find_policy

    name, _, rest = text.partition(":")
    policy = find_policy(name)
    kinds = {field.name: _kind(field) for field in dataclasses.fields(policy)}
    kinds = {field: kind for field, kind in kinds.items() if kind is not None}
    settings = {}
    for part in rest.split(",") if rest else []:
        setting, _, value = part.partition("=")
        if setting not in kinds:
            raise InputError(f"--policy {text}: {setting!r} is no setting; use {', '.join(kinds)}")
        settings[setting] = _value(text, value, kinds[setting])
    return policy, settings


def _kind(field: dataclasses.Field[Any]) -> Any:
    """The type of a setting that text can give; None for others."""
    name = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
    return {"bool": bool, "int": int, "float": float, "str": str}.get(name)


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
            raise InputError(
                f"--pool-{next(iter(given))}: nothing is evicted without --pool-tokens"
            )
        Pool(share=1.0, **given)  # a typo should not pass
        return None
    tokens, part = parse_limit(_without_suffix(arguments.pool_tokens))
    return Pool(tokens=tokens, share=part, **given)


def _without_suffix(text: str) -> str:
    """A number of tokens without the suffix that it may have; other text as it is."""
    try:
        return str(parse_whole(text))
    except ValueError:
        return text


def chunk_option(text: str) -> int | None:
    """The number of --prefill-chunk; None if the engine is to choose.

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
