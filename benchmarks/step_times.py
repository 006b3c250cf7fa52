"""A plan's step time against the one that is measured: `python -m benchmarks.step_times`

What `plan` gives is a floor: bytes over bandwidths, both measured on this machine, without the
time of computing. Writes benchmarks/results/step-times-<device>.json.
"""

import argparse
import dataclasses
import sys
from typing import Any

from benchmarks.files import RESULTS, note, write_json

NEW_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """One sequence of a shape of benchmarks.shapes, and the options of `generate`."""

    name: str
    shape: str
    prompt: int
    options: tuple[str, ...] = ()


CASES = (
    Case("LLaMA, 4K", "llama", 4032),
    Case("LLaMA, 16K", "llama", 16320),
    Case("LLaMA, 16K, streamed", "llama", 16320, ("--policy=full",)),
    Case("LLaMA, 16K, on the device", "llama", 16320, ("--dense-layers=8",)),
    Case("OPT, 4K", "opt", 4032),
)


def main() -> int:
    """Measure all cases, in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="only this one, without a record")
    arguments = parser.parse_args()
    from benchmarks.machine import describe, device_name
    from infinigen_jax.plan import build_parser, this_machine

    machine = this_machine(build_parser().parse_args(["--context=1"]))
    chosen = [case for case in CASES if arguments.case in (None, case.name)]
    records = []
    for case in chosen:
        note(case.name)
        records.append(measure(case, machine))
        print(line(records[-1]), flush=True)
    if arguments.case is None:
        result = {"machine": describe(), "forecast": dataclasses.asdict(machine), "cases": records}
        write_json(RESULTS / f"step-times-{device_name()}.json", result)
    return 0


def measure(case: Case, machine: Any) -> dict[str, Any]:
    """Plan a generation, and run it."""
    from benchmarks.shapes import SHAPES, peaked_model, prompt
    from infinigen_jax.forecast import Conversion, Planner
    from infinigen_jax.options import make_engine, make_policy
    from infinigen_jax.plan import build_parser

    context = case.prompt + NEW_TOKENS
    options = build_parser().parse_args([f"--context={context}", *case.options])
    model = peaked_model(SHAPES[case.shape], context, options.dtype or "float32")
    losses = {} if model.sparse_loss is None else {"sparse_loss": model.sparse_loss}
    conversion = Conversion(model.skew, model.ahead is not None, losses)
    policy = make_policy(options)
    planner = Planner(model.config, model.dtype, conversion, policy, options, machine)
    expected = planner.forecast(planner.asked, 1, context).seconds
    assert expected is not None, "a machine of unknown bandwidths"
    engine = make_engine(model, policy, options)
    prompts = [prompt(model.config, case.prompt)]
    engine.generate(prompts, max_new_tokens=4, ignore_eos=True)  # compiles
    stats = engine.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True).stats
    measured = 1 / stats.decode_tokens_per_second
    return {
        "name": case.name,
        "case": dataclasses.asdict(case),
        "expected_seconds": expected,
        "measured_seconds": measured,
        "expected_over_measured": expected / measured,
    }


def line(record: dict[str, Any]) -> str:
    expected, measured = record["expected_seconds"], record["measured_seconds"]
    return (
        f"{record['name']:28} expected {1e3 * expected:7.2f} ms  measured {1e3 * measured:7.2f} ms"
        f"  expected/measured {record['expected_over_measured']:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
