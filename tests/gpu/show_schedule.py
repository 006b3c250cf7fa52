"""Print the launches of one decode step on a GPU, and which of them overlap with transfers.

    JAX_PLATFORMS=cpu .venv-gpu-compile/bin/python tests/gpu/show_schedule.py [--all] [PROGRAM]...

PROGRAM is one of fused (the default), fetching_layer, flush and prompt_layer. `make compile-gpu`
makes the environment. `--all` lists every launch, not only those next to a transfer.
"""

import argparse
import importlib.metadata
from collections.abc import Callable

import step_programs as sp
from compile_for_gpu import Program
from hlo import Instruction
from reading import async_pairs, copies, large_results, schedule

PROGRAMS: dict[str, Callable[[], Program]] = {
    "fused": sp.fused,
    "fetching_layer": sp.fetching_layer,
    "flush": sp.flush,
    "prompt_layer": sp.prompt_layer,
}


def line(i: Instruction) -> str:
    where = i.op_name.partition("/")[2] or i.opcode
    return f"{i.nbytes:>12,}  {i.name:<38} {where}"


def show(name: str, program: Program, everything: bool) -> None:
    bodies = {key: body for key, body in schedule(program).items() if body}
    launches = sum(map(len, bodies.values()))
    memory = program.memory
    print(f"== {name}: {launches} launches (a loop's body counted once)")
    print(f"temporaries: {memory['temp']:,} bytes on the device, {memory['host_temp']:,} pinned")
    print(f"updated in place: {memory['alias']:,} on the device, {memory['host_alias']:,} pinned")
    print("buffers of at least a weight matrix made anew, and copies of at least 1 KiB:")
    print("\n".join(f"  {line(i)}" for i in large_results(program, sp.WEIGHT_BYTES)) or "  none")
    print("\n".join(f"  {line(i)}" for i in copies(program, 1024)) or "  none")
    if everything:
        for key, body in bodies.items():
            print(f"-- {key}", *map(line, body), sep="\n")
    for pair in async_pairs(program):
        print(f"-- {len(pair.between)} launches between {pair.start.name} and {pair.done.name}:")
        print("\n".join(f"  {line(i)}" for i in pair.between) or "  none")


def main() -> None:
    parser = argparse.ArgumentParser(description="Show the schedule of a program on an H200.")
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=", ".join(PROGRAMS))
    parser.add_argument("--all", action="store_true", help="list every launch")
    options = parser.parse_args()
    if unknown := set(options.programs) - set(PROGRAMS):
        parser.error(f"no program {', '.join(sorted(unknown))}")
    print(f"jax {importlib.metadata.version('jax')}, compiled for one H200; bytes, name, origin")
    for name in options.programs or ["fused"]:
        show(name, PROGRAMS[name](), options.all)


if __name__ == "__main__":
    main()
