"""All measurements that need a GPU, in one command with a time limit, the most important first.

    python -m benchmarks.on_gpu --out DIR --minutes 9

Each piece is a process with a share of the time. One that runs out of time keeps its measurements.
DIR/summary.md holds all tables, DIR/log.txt the notes.
"""

import argparse
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from benchmarks.machine import note
from infinigen_jax.cuda import first_use

GRACE = 20.0  # seconds that a piece may exceed its cap to finish a measurement
LEAST = 15.0  # with fewer seconds left, no piece starts


@dataclasses.dataclass(frozen=True)
class Piece:
    """Process of the session."""

    name: str
    share: float  # of the time left when it starts; later pieces get unused time
    command: Sequence[str]  # of the module; --json and --cap-seconds are added
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


# JAX and PyTorch both keep memory once allocated, so each has its own process.
OURS = "--systems infinigen full-device full-streamed"
PAPER = f"{OURS} infinigen-paper infinigen-int4"
THEIRS = "--systems transformers transformers-static transformers-offloaded"
LLAMA = "benchmarks.decode --preset llama8b --contexts"
QUICK = "--tokens 8 --rounds 4 --steps 8 --trace-steps 3"
ONCE = "--tokens 4 --rounds 2 --steps 4 --trace-steps 0"
PROMPTS = "benchmarks.prefill --shape llama-8b --dtype bfloat16 --alone --prompts 16384 --memory"
LOSSLESS = (
    "benchmarks.lossless --shape llama-8b --dtype bfloat16 --weights host --systems full "
    "lossless:infinigen --contexts 4096 --tokens 16 --rounds 2"
)
PIECES = (
    Piece("llama8b-16k", 0.5, f"{LLAMA} 16384 {QUICK} {OURS}".split()),
    Piece("llama8b-16k-theirs", 0.3, f"{LLAMA} 16384 {ONCE} {THEIRS}".split()),
    Piece("llama8b-16k-single", 0.4, f"{LLAMA} 16384 --batch 1 {QUICK} {OURS}".split()),
    Piece("lossless-host", 0.5, LOSSLESS.split()),
    Piece("transfer", 0.4, ["benchmarks.transfer"]),
    Piece("prompts", 0.4, PROMPTS.split()),
    Piece("llama8b-16k-single-theirs", 0.3, f"{LLAMA} 16384 --batch 1 {ONCE} {THEIRS}".split()),
    Piece("prompts-xla", 0.3, PROMPTS.split(), {first_use.SWITCH: first_use.OFF}),
    Piece("paper", 0.4, f"benchmarks.decode --preset paper {PAPER}".split()),
    Piece("paper-theirs", 0.4, f"benchmarks.decode --preset paper {THEIRS}".split()),
    Piece("llama8b-32k", 1.0, f"{LLAMA} 32768 {QUICK} {OURS}".split()),
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_gpu", description="Run the measurements that need a GPU."
    )
    names = [piece.name for piece in PIECES]
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="total time limit (default 9)")
    parser.add_argument("--pieces", nargs="+", choices=names, default=names, metavar="NAME")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    chosen = [piece for piece in PIECES if piece.name in options.pieces]
    done = run(chosen, options.out, 60 * options.minutes)
    print((options.out / "summary.md").read_text())
    return 0 if all(status == "done" for status in done.values()) else 1


def run_within(
    command: Iterable[str], limit: float, log: IO[str], environment: Mapping[str, str]
) -> tuple[str, str]:
    """Run `python -m command` with further variables; its stderr goes to `log`.

    After `limit` seconds the process and its children are ended. Return "done", "out of time" or
    the exit status, and its stdout.
    """
    whole = [sys.executable, "-m", *command]
    log.write(f"\n$ {' '.join(whole)}\n")
    log.flush()
    process = subprocess.Popen(
        whole,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,  # so that its children can be ended with it
    )
    try:
        text, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "out of time", process.communicate()[0]
    return f"status {process.returncode}" if process.returncode else "done", text


def run(pieces: list[Piece], out: Path, seconds: float) -> dict[str, str]:
    """Run the pieces in turn; return "done", "out of time", "not started" or the status of each."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    statuses: dict[str, str] = {}
    with open(out / "log.txt", "w") as log, open(out / "summary.md", "w", 1) as summary:
        # Once for all pieces.
        status, text = run_within(["infinigen_jax.check_kernels"], first_use.LIMIT, log, {})
        note(f"kernels: {status}")
        summary.write(f"## kernels ({status})\n\n{text}\n")
        # Otherwise each piece would check them again, and fail like this check.
        off = {} if status == "done" else {first_use.SWITCH: first_use.OFF}
        for piece in pieces:
            started = time.monotonic()
            left = end - started - GRACE
            status, text = "not started", ""
            if left >= LEAST:
                cap = left * piece.share
                command = [*piece.command, "--json", str(out / f"{piece.name}.json")]
                command += ["--cap-seconds", f"{cap:.0f}"]
                environment = {**piece.environment, **off}
                status, text = run_within(command, cap + GRACE, log, environment)
            statuses[piece.name] = status
            took = f"{status}, {time.monotonic() - started:.0f} s"
            note(f"{piece.name}: {took}")
            summary.write(f"## {piece.name} ({took})\n\n{text}\n")
    return statuses


if __name__ == "__main__":
    sys.exit(main())
