"""Options that command lines share, made from the declarations of settings (`settings.setting`).

Nothing here imports JAX before it is needed, so that a bad option is reported immediately.
"""

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from infinigen_jax.errors import InputError, ParameterError, Parser
from infinigen_jax.messages import Messages
from infinigen_jax.numeric import LARGEST, OneOf
from infinigen_jax.settings.engine import WEIGHT_DTYPES, EngineOptions
from infinigen_jax.settings.policy import InfiniGenSettings
from infinigen_jax.settings.pool import ALL, Limit, Pool
from infinigen_jax.settings.sampling import Sampling
from infinigen_jax.settings.setting import defaults_of, options_of

if TYPE_CHECKING:
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.loading.load import Model
    from infinigen_jax.policies import Policy

DEFAULT_MODEL = "books-llama"
# `checkpoint.hf_folder.EMBEDDED` would import JAX.
MODEL_HELP = (
    "converted or Hugging Face folder, .gguf file, model on the hub (org/name), or an embedded "
    f"model: {DEFAULT_MODEL} (default), tiny-llama or tiny-opt"
)
# Settings of InfiniGen that are options; the others follow the policy's name.
COMMON_POLICY_OPTIONS = ("budget", "alpha")
POLICY_OPTIONS = (*COMMON_POLICY_OPTIONS, "partial_ratio")
MEMORY_OPTIONS = ("rows", "dense_layers", "weights")
SAMPLING_EXPERTS = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
ENGINE_EXPERTS = ("transfer", "prefill_chunk", "hot_set")
POOL_OPTIONS = ("tokens", "eviction", "sinks")
TYPES = {"tokens": Limit(1, LARGEST, whole=True)}  # or a share, the setting next to it
SEVERAL = (*POLICY_OPTIONS, "rows", "tokens", "eviction")  # lists in `evaluate`
TEXT_TYPES: dict[str, Any] = {t.__name__: t for t in (bool, int, float, str)}  # text can give them


def add_model_options(add: Callable[..., Any]) -> None:
    """Add --model and --revision by a parser's or group's `add_argument`."""
    add("--model", metavar="M", help=MODEL_HELP)
    add("--revision", metavar="R", help="branch, tag or commit on the hub (default: the main one)")


def load_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `load` that options determine."""
    return {
        "dtype": arguments.dtype,
        "weights": arguments.weights or "device",
        "weight_dtype": arguments.weight_dtype,
        "revision": arguments.revision,
    }


def add_settings(group: Any, kind: Any, names: Iterable[str], *, several: bool = False) -> None:
    """Add options for settings, None if not given; with `several`, those in SEVERAL are lists."""
    for name in names:
        option, default = options_of(kind)[name], defaults_of(kind)[name]
        many = several and name in SEVERAL
        text = option.help.replace("%", "%%")
        more: dict[str, Any] = {"nargs": "+"} if many else {}
        if isinstance(default, bool):
            more = {"action": "store_true"}
        else:
            check = TYPES.get(name, option.check)
            if kind is EngineOptions and default is None:
                check, text = _or_auto(check), text.replace("(default:", "(default auto:")
            more |= {"metavar": option.metavar, "type": check}
            shown = f"{default:g}" if isinstance(default, float) else default
            text += "" if default is None else f" (default {shown})"
        flag = _flag(f"{kind.room}{name}")
        group.add_argument(f"--{flag}", default=None, help=text, **more)


def _or_auto(check: Any) -> Callable[[str], Any]:
    """Return the type of an option that takes `auto` as well, which is None, its default."""
    return lambda text: None if text == "auto" else check(text)


def given(arguments: argparse.Namespace, names: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Return the settings of these names whose options were given."""
    values = {name: getattr(arguments, prefix + name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def sampling_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return given(arguments, options_of(Sampling))


def add_engine_options(
    parser: argparse.ArgumentParser, *, several: bool = False, pool: bool = True
) -> None:
    """Add the options that `make_policy` and `make_engine` read.

    With `several`, the policy and the settings in SEVERAL are lists; `pool` adds the limit of the
    host's cache.
    """
    group = parser.add_argument_group("policy: which cached rows are fetched")
    group.add_argument(
        "--policy",
        default=["infinigen"] if several else "infinigen",
        metavar="P",
        help="infinigen (default), full, infinigen-paper, window, h2o, quest, ... or a class, "
        "package.module:MyPolicy; other settings follow its name: quest:page=8,window=64",
        nargs="+" if several else None,
    )
    add_settings(group, InfiniGenSettings, COMMON_POLICY_OPTIONS, several=several)
    group = parser.add_argument_group("memory and precision")
    text = "float32, bfloat16 or float16 (default: float32 on the CPU, else bfloat16)"
    group.add_argument("--dtype", help=text)
    text = "bfloat16, int8 or int4 for the model's matrices alone (default: --dtype)"
    group.add_argument("--weight-dtype", metavar="T", type=OneOf(WEIGHT_DTYPES), help=text)
    add_settings(group, EngineOptions, MEMORY_OPTIONS, several=several)
    experts = parser.experts if isinstance(parser, Parser) else parser
    add_settings(experts, InfiniGenSettings, ("partial_ratio",), several=several)
    add_settings(experts, EngineOptions, ENGINE_EXPERTS, several=several)
    if pool:
        add_settings(experts, Pool, POOL_OPTIONS, several=several)


def make_policy(arguments: argparse.Namespace) -> "Policy":
    """Return the policy with the options that were given, all of them single values."""
    kind, named = read_policy(arguments.policy)
    policy = None
    try:
        policy = kind(**named)
        return dataclasses.replace(policy, **_chosen(kind, named, arguments))
    except (ArithmeticError, TypeError, ValueError) as error:  # also of a user's class
        if policy is not None and isinstance(error, InputError):
            raise  # it names the option
        raise ParameterError("policy", str(error), arguments.policy) from None


def _chosen(kind: Any, named: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given options that the policy has and its name does not set."""
    names = {field.name for field in dataclasses.fields(kind)} - named.keys()
    return {name: v for name, v in given(arguments, POLICY_OPTIONS).items() if name in names}


def policy_settings(policy: "Policy") -> dict[str, Any]:
    """Return the settings of a policy, ready for JSON, which has no infinity."""
    settings = dataclasses.asdict(policy)  # pyright: ignore[reportArgumentType]
    return {name: "inf" if x == float("inf") else x for name, x in settings.items()}


def unused_options(arguments: argparse.Namespace) -> list[str]:
    """Return a line for each given option that changes nothing: of other policies, or of draws."""
    names = arguments.policy if isinstance(arguments.policy, list) else [arguments.policy]
    chosen = (_chosen(*read_policy(name), arguments) for name in names)
    taken = set[str]().union(*chosen)
    lines = [
        f"--{_flag(name)}: no effect with --policy {' '.join(names)}"
        for name in given(arguments, POLICY_OPTIONS)
        if name not in taken
    ]
    if hasattr(arguments, "temperature") and not arguments.temperature:
        draws = given(arguments, ("top_k", "top_p", "min_p", "seed"))
        lines += [f"--{_flag(name)}: no effect without --temperature" for name in draws]
    return lines


def options_without_effect(arguments: argparse.Namespace, engine: "Engine") -> list[str]:
    """Return a line for each option that the engine replaces or leaves unused."""
    kind, named = read_policy(arguments.policy)
    policy = engine.decoder.policy
    lines = [
        f"{option}: taken as {getattr(policy, name)}, by the model, the device or other settings"
        for name, value, option in (
            *((n, v, f"--{_flag(n)} {v}") for n, v in _chosen(kind, named, arguments).items()),
            *((n, v, f"--policy {arguments.policy}: {n}") for n, v in named.items()),
        )
        if value not in ("auto", getattr(policy, name))
    ]
    if arguments.hot_set and not engine.decoder.selecting:
        lines.append(f"--hot-set {arguments.hot_set:g}: no effect, as no layer selects rows")
    chunk = arguments.prefill_chunk
    if chunk not in (None, engine.runtime.prefill_chunk):
        lines.append(
            f"--prefill-chunk {chunk}: no effect, as --pool-tokens reads a prompt in one piece"
        )
    return lines


def read_policy(text: str) -> tuple[Any, dict[str, Any]]:
    """Return the class and the settings of "quest:page=8" or "package.module:MyPolicy:page=8"."""
    from infinigen_jax.policies import POLICIES, find_policy

    name, _, rest = text.partition(":")
    of_class, _, settings_of_class = rest.partition(":")
    if name not in POLICIES and rest and "=" not in of_class:
        name, rest = f"{name}:{of_class}", settings_of_class
    policy = find_policy(name)
    # A type is a class, or its name if the module postpones annotations.
    fields = {f.name: getattr(f.type, "__name__", f.type) for f in dataclasses.fields(policy)}
    kinds = {
        name: TEXT_TYPES[str(kind)] for name, kind in fields.items() if str(kind) in TEXT_TYPES
    }
    settings = {}
    for part in rest.split(",") if rest else []:
        setting, _, value = part.partition("=")
        if setting not in kinds:
            kind = "a setting for Python alone" if setting in fields else "no setting"
            problem = f"{setting!r} is {kind}; use {', '.join(kinds)}"
            raise ParameterError("policy", problem, text)
        settings[setting] = _value(text, value, kinds[setting])
    return policy, settings


def _value(text: str, value: str, kind: Any) -> Any:
    try:
        return {"true": True, "false": False}[value] if kind is bool else kind(value)
    except (KeyError, ValueError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise ParameterError("policy", f"{value!r} is not {wanted}", text) from None


def make_pool(arguments: argparse.Namespace) -> Pool | None:
    """Return the limit of the host cache, None without one; its options are single values."""
    others = given(arguments, POOL_OPTIONS, "pool_")
    limit = others.pop("tokens", None)
    if limit is None and others:
        name = next(iter(others))
        raise ParameterError(f"pool.{name}", "nothing is evicted without `pool.tokens`")
    kind = "tokens" if isinstance(limit, int) else "share"
    return None if limit in (None, ALL) else Pool(**{kind: limit}, **others)


def make_engine(
    model: "Model", policy: "Policy", arguments: argparse.Namespace, **settings: Any
) -> "Engine":
    """Return an engine with the options of `add_engine_options` and further `settings`."""
    from infinigen_jax.engine.engine import Engine

    chosen = given(arguments, options_of(EngineOptions))
    return Engine(model, policy=policy, pool=make_pool(arguments), **(chosen | settings))


def load_engine(arguments: argparse.Namespace, say: Messages) -> "Engine":
    """Return the engine of the options; `say` reports the options without effect."""
    if arguments.quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    with say.working(f"loading {arguments.model or DEFAULT_MODEL}"):
        from infinigen_jax.files.user_cache import keep_programs, program_folder
        from infinigen_jax.loading.load import load
        from infinigen_jax.machine.backend import claim_memory, start_backend
        from infinigen_jax.programs.program import is_foreign, stores_programs

        policy = make_policy(arguments)  # before the model is loaded, to report errors early
        make_pool(arguments)
        for line in unused_options(arguments):
            say(line)
        claim_memory()
        start_backend()
        if not stores_programs():
            keep_programs()  # also those of a foreign policy
        foreign = stores_programs() and is_foreign(policy)
        say.kept = program_folder() is not None and not foreign
        model = load(arguments.model, notify=say, **load_settings(arguments))
        engine = make_engine(model, policy, arguments)
        for line in options_without_effect(arguments, engine):
            say(line)
    return engine


def _flag(name: str) -> str:
    return name.replace("_", "-").replace(".", "-")
