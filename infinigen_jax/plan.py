"""Command line: predict memory and time of a generation. `python -m infinigen_jax.plan --help`

It reads no weights. One table goes to stdout.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from infinigen_jax.cli.options import (
    add_engine_options,
    add_model_options,
    add_settings,
    make_policy,
    make_pool,
    policy_settings,
    unused_options,
)
from infinigen_jax.errors import InputError, Parser, run_command
from infinigen_jax.files.output import checked_output, write_json
from infinigen_jax.files.regular import absolute
from infinigen_jax.messages import Messages, format_bytes
from infinigen_jax.numeric import Range, whole_number
from infinigen_jax.settings.engine import EngineOptions

if TYPE_CHECKING:
    from infinigen_jax.planner.advice import Advice
    from infinigen_jax.planner.forecast import Forecast, Machine
    from infinigen_jax.policies import Policy

LEAST = 1e-6  # GiB, or GB/s
RECORDED = ("model", "context", "batch", "policy", "dtype", "weight_dtype")  # options


def build_parser() -> Parser:
    """Return the parser; options of the engine are those of `generate`."""
    parser = Parser(
        prog="python -m infinigen_jax.plan",
        usage="%(prog)s --context N [--model M] [options]",
        description="Predict memory and time of a generation, and recommend settings.",
    )
    add = parser.add_argument_group("model and machine").add_argument
    add_model_options(add)
    text = "tokens, prompt and new ones; 128k is 131072"
    add("--context", type=whole_number(1), required=True, metavar="N", help=text)
    add("--batch", type=whole_number(1), default=1, metavar="B", help="sequences (default 1)")
    memory = {"type": Range(LEAST), "metavar": "G"}
    share = "GiB of the GPU, of which JAX takes nine tenths (default: those of this device)"
    add("--device-memory", help=share, **memory)
    add("--host-memory", help="GiB of the host (default: those that are free here)", **memory)
    rate = {"type": Range(LEAST), "metavar": "R"}
    add("--device-bandwidth", help="GB/s of device memory (default: measured here)", **rate)
    add("--copy-bandwidth", help="GB/s from host to device (default: measured here)", **rate)
    add_engine_options(parser)
    add_settings(parser.experts, EngineOptions, ("lossless", "draft_weights"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="F", help="write everything to a file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    return run_command(lambda: plan(parser.parse_args(argv)), parser, program=argv is None)


def plan(arguments: argparse.Namespace) -> None:
    output = checked_output("json", arguments.json)
    policy = make_policy(arguments)
    for line in unused_options(arguments):
        Messages()(line)
    from infinigen_jax.checkpoint.source import checked_source, read_config
    from infinigen_jax.loading.load import checked_dtype, model_folder
    from infinigen_jax.machine.backend import claim_memory, start_backend
    from infinigen_jax.planner.advice import advise
    from infinigen_jax.planner.forecast import Planner, conversion_of

    folder = checked_source(model_folder(arguments.model, arguments.revision, weights=False))
    _, config = read_config(folder)
    if arguments.context > config.max_positions:
        raise InputError(
            f"--context {arguments.context}: the model has {config.max_positions} positions; "
            "give fewer tokens"
        )
    if arguments.dtype is not None:
        checked_dtype(arguments.dtype)  # before anything is measured
    claim_memory()
    start_backend()
    with Messages().working("measuring the bandwidths of this machine"):
        machine = this_machine(arguments)
    # A device with its own memory runs in bfloat16 by default.
    dtype = checked_dtype(arguments.dtype or ("bfloat16" if machine.separate else None))
    conversion = conversion_of(folder, config)
    planner = Planner(config, dtype, conversion, policy, arguments, machine)
    advice = advise(planner, arguments.batch, arguments.context)
    asked, small = advice.asked, arguments.weight_dtype
    name, dense = absolute(arguments.model or folder).name, asked.settings.dense_layers
    form = f"{dtype.name}, {small} weights" if small else dtype.name
    sizes = f"{arguments.batch} x {arguments.context} tokens"
    print(f"{name}, {form}: {sizes}, --policy {arguments.policy}, --dense-layers {dense}")
    chosen = dense if arguments.dense_layers is None else None
    print(*table(asked), *verdict(advice, chosen), *exact_tokens(asked), sep="\n")
    if conversion.assumed and arguments.dense_layers is None and policy.dense_layers is None:
        measured = "the conversion on first use measures them"
        print(f"{dense} dense layers and equal budgets are assumed; {measured}")
    if output is not None:
        write_json("json", output, record(advice, policy, arguments))


def this_machine(arguments: argparse.Namespace) -> "Machine":
    """Return the machine of the options; measure here what they leave open."""
    import jax

    from infinigen_jax.machine.backend import GPU_SHARE, POOL_SHARE
    from infinigen_jax.machine.memory_limits import available_device_bytes, available_host_bytes
    from infinigen_jax.planner import bandwidths
    from infinigen_jax.planner.forecast import Machine

    device = jax.devices()[0]
    memory = None if device.platform == "cpu" else available_device_bytes(device)
    if arguments.device_memory is not None:
        memory = int(GPU_SHARE * arguments.device_memory * 2**30)
    host, share = arguments.host_memory, 1.0 if memory is None else POOL_SHARE
    reads, copies = (
        None if given is None else 1e9 * given
        for given in (arguments.device_bandwidth, arguments.copy_bandwidth)
    )
    # A GPU that only the options describe cannot be measured.
    if memory is None or device.platform != "cpu":
        if copies is None:
            copies = bandwidths.host_to_device_bandwidth() or bandwidths.gather_bandwidth()
        if reads is None:
            reads = bandwidths.memory_read_bandwidth()
    return Machine(
        device_memory=memory,
        host_memory=int(share * (available_host_bytes() if host is None else host * 2**30)),
        memory_bandwidth=reads,
        copy_bandwidth=copies,
    )


def table(forecast: "Forecast") -> list[str]:
    """Return a line for each size and time."""
    plan, machine = forecast.plan, forecast.machine

    def room(available: int | None, needed: int) -> str:
        if available is None:
            return ""
        return f"of {format_bytes(available)}: {'fits' if needed <= available else 'too much'}"

    host = forecast.host + (0 if machine.separate else forecast.device)
    return [
        "on the device",
        size("weights", forecast.weights),
        *([size("weights of drafts", forecast.drafts)] if forecast.drafts else []),
        size("bases", forecast.bases),
        size("speculation", forecast.speculation),
        size("dense layers", plan.dense_cache),
        size("index", plan.index),
        size("sinks and window", plan.resident),
        size("hot set", plan.hot),
        size("directories of a pool", plan.pool),
        size("workspace of a prompt", forecast.prefill, f"read by {forecast.chunk} tokens"),
        size("workspace of a step", forecast.decode, "not at the same time"),
        size("at the peak", forecast.device, room(machine.device_memory, forecast.device)),
        "on the host",
        size("KV cache", plan.host_cache),
        size("weights", forecast.weights_on_host),
        size("at the peak", host, room(machine.host_memory, host)),
        *step(forecast),
    ]


def size(name: str, count: int, remark: str = "") -> str:
    return f"  {name:<26}{format_bytes(count):>12}{remark and '  ' + remark}"


def step(forecast: "Forecast") -> list[str]:
    """Return the bytes that a decode step moves and, with known bandwidths, the time it takes."""
    traffic, machine = forecast.traffic, forecast.machine
    reads, copies = machine.memory_bandwidth, machine.copy_bandwidth

    def at(bandwidth: float | None) -> str:
        return "" if bandwidth is None else f"at {bandwidth / 1e9:.1f} GB/s"

    lines = [
        "a step, at best",
        size("read on the device", traffic.memory, at(reads)),
        size("rows from the host", traffic.link, at(copies)),
    ]
    if machine.separate and traffic.brought:
        lines.append(size("weights from the host", traffic.brought, at(copies)))
    if forecast.seconds is None:
        rates = {"--device-bandwidth": reads, "--copy-bandwidth": copies}
        missing = " and ".join(option for option, rate in rates.items() if rate is None)
        left_out = "times are left out: there is no such device here to measure"
        return [*lines, f"{left_out}; give {missing}"]
    time = f"{1e3 * forecast.seconds:>9.2f} ms"
    return [*lines, f"  {'at least':<26}{time}  without the time of computing"]


def verdict(advice: "Advice", chosen: int | None = None) -> list[str]:
    """Return the advice as sentences, one per line; for `chosen` see `command_options`."""
    best, lines = advice.best, [full_cache(advice)]
    if best is None:
        most = {"tokens of context": advice.most_context, "of the sequences": advice.most_batch}
        fitting = " or ".join(f"{number} {what}" for what, number in most.items() if number)
        lines.append(
            f"nothing fits: at most {fitting}"
            if fitting
            else "nothing fits, whatever the context: try --weight-dtype int8 or int4, --weights "
            "host, or a smaller model"
        )
    elif best.settings == advice.asked.settings:
        label = "fits" if best.seconds is None else "recommended"
        lines.append(f"{label}: as it is, {command_options(best, chosen)}")
    else:
        label = "would fit" if best.seconds is None else "recommended"
        time = "" if best.seconds is None else f"{1e3 * best.seconds:.2f} ms a step, "
        peak = f"{format_bytes(best.device)} on the device"
        lines.append(f"{label}: {command_options(best, chosen)}: {time}{peak}")
    return lines


def exact_tokens(forecast: "Forecast") -> list[str]:
    """Return the fastest way to the full cache's tokens, if the settings select rows."""
    from infinigen_jax.planner.traffic import ACCEPTED

    rounds = forecast.lossless
    if rounds is None:
        return []
    full = f"--policy full takes {1e3 * rounds.full:.2f} ms a token"
    if not rounds.drafted:
        return [f"for the full cache's tokens: {full}, and drafts do not pay"]
    return [
        f"for the full cache's tokens: --lossless takes {1e3 * rounds.seconds:.2f} ms a token if "
        f"{ACCEPTED:.0%} of the drafts are accepted, {full}"
    ]


def full_cache(advice: "Advice") -> str:
    """Return whether the device can hold the whole cache, and whether that is faster."""
    full, asked = advice.full, advice.asked
    if not full.fits:
        return f"the full cache on the device does not fit: {format_bytes(full.device)} are needed"
    option = f"--dense-layers {full.settings.dense_layers}"
    if full.seconds is None or asked.seconds is None:
        return f"the full cache on the device fits: {option}"
    step = f"{1e3 * full.seconds:.2f} ms a step"
    if full.seconds < asked.seconds or not asked.fits:
        return f"the full cache on the device fits and is faster, {step}: {option}"
    return f"the full cache on the device fits, but is not faster: {step}"


def command_options(forecast: "Forecast", chosen: int | None = None) -> str:
    """Return the recommended settings as options of `generate`.

    The number of dense layers is left out if it is `chosen`, by `generate` without the option.
    """
    settings = forecast.settings
    dense = "" if settings.dense_layers == chosen else f"--dense-layers {settings.dense_layers} "
    options = f"{dense}--hot-set {settings.hot_set:g} --rows {settings.rows}"
    if settings.prefill_chunk is not None:
        options += f" --prefill-chunk {settings.prefill_chunk}"
    return options + (" --weights host" if settings.weights == "host" else "")


def record(advice: "Advice", policy: "Policy", arguments: argparse.Namespace) -> dict[str, Any]:
    """Return everything for JSON, in bytes, bytes per second and seconds."""

    def of(forecast: "Forecast | None") -> dict[str, Any] | None:
        if forecast is None:
            return None
        more = {"device": forecast.device, "fits": forecast.fits}
        return dataclasses.asdict(forecast) | more

    given, pool = {name: getattr(arguments, name) for name in RECORDED}, make_pool(arguments)
    return given | {
        "policy_settings": policy_settings(policy),
        "pool": None if pool is None else dataclasses.asdict(pool),
        "asked": of(advice.asked),
        "full_on_device": of(advice.full),
        "recommended": of(advice.best),
        "most_context": advice.most_context,
        "most_batch": advice.most_batch,
    }


if __name__ == "__main__":
    sys.exit(main())
