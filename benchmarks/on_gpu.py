"""All measurements that need a GPU, in one command with a time limit, the most important first.

    python -m benchmarks.on_gpu --out DIR --minutes 9

Each piece is a process with a share of the time. It writes its JSON file incrementally, so a piece
that runs out of time keeps its measurements. DIR/summary.md holds all tables, DIR/log.txt the
notes.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.files import note
from benchmarks.presets import THEIRS
from benchmarks.processes import run_within
from infinigen_jax.cuda import first_use

GRACE = 20.0  # seconds that a piece may exceed its cap to finish a measurement
LEAST = 15.0  # with fewer seconds left, no piece starts


@dataclasses.dataclass(frozen=True)
class Piece:
    """A process of the session.

    Attributes:
        share: share of the time left when the piece starts; later pieces get unused time.
        command: arguments of the module; --json and --cap-seconds are added.
        environment: additional variables.
    """

    name: str
    share: float
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


# JAX and PyTorch both keep memory once allocated, so each has its own process.
OURS = ("infinigen", "full-device", "full-streamed")
PAPER = (*OURS, "infinigen-paper", "infinigen-int4")
QUICK = ("--tokens", "8", "--rounds", "4", "--steps", "8", "--trace-steps", "3")
ONCE = ("--tokens", "4", "--rounds", "2", "--steps", "4", "--trace-steps", "0")
PROMPTS = (
    *("benchmarks.prefill", "--shape", "llama-8b", "--dtype", "bfloat16", "--systems", "infinigen"),
    *("--prompts", "16384", "--memory"),
)
LOSSLESS = (
    *("benchmarks.lossless", "--shape", "llama-8b", "--dtype", "bfloat16", "--weights", "host"),
    *("--systems", "full", "lossless:infinigen", "--contexts", "4096", "--tokens", "16"),
    *("--rounds", "2"),
)


def _decode(preset: str, context: int, *arguments: str) -> tuple[str, ...]:
    return ("benchmarks.decode", "--preset", preset, "--contexts", str(context), *arguments)


ONE = ("--batch", "1")
PIECES = (
    Piece("llama8b-16k", 0.5, _decode("llama8b", 16384, *QUICK, "--systems", *OURS)),
    Piece("llama8b-16k-theirs", 0.3, _decode("llama8b", 16384, *ONCE, "--systems", *THEIRS)),
    Piece("llama8b-16k-single", 0.4, _decode("llama8b", 16384, *ONE, *QUICK, "--systems", *OURS)),
    Piece("lossless-host", 0.5, LOSSLESS),
    Piece("transfer", 0.4, ("benchmarks.transfer",)),
    Piece("prompts", 0.4, PROMPTS),
    Piece(
        "llama8b-16k-single-theirs",
        0.3,
        _decode("llama8b", 16384, *ONE, *ONCE, "--systems", *THEIRS),
    ),
    Piece("prompts-xla", 0.3, PROMPTS, ((first_use.SWITCH, first_use.OFF),)),
    Piece("paper", 0.4, _decode("paper", 1920, "--systems", *PAPER)),
    Piece("paper-theirs", 0.4, _decode("paper", 1920, "--systems", *THEIRS)),
    Piece("paper-capped", 0.5, _decode("paper-capped", 1920, "--systems", *PAPER)),
    Piece("llama8b-32k", 1.0, _decode("llama8b", 32768, *QUICK, "--systems", *OURS)),
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


def run(pieces: list[Piece], out: Path, seconds: float) -> dict[str, str]:
    """Run the pieces one after another.

    Returns:
        Status by name: "done", "out of time", "not started", or the exit status.
    """
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    statuses: dict[str, str] = {}
    summary = out / "summary.md"
    with open(out / "log.txt", "w") as log:
        note(f"kernels: {_check(summary, log)}")
        for piece in pieces:
            left = end - time.monotonic() - GRACE
            started = time.monotonic()
            text = ""
            if left < LEAST:
                statuses[piece.name] = "not started"
            else:
                cap = left * piece.share
                statuses[piece.name], text = _run_piece(piece, out, cap, cap + GRACE, log)
            took = f"{statuses[piece.name]}, {time.monotonic() - started:.0f} s"
            note(f"{piece.name}: {took}")
            with open(summary, "a") as file:
                file.write(f"## {piece.name} ({took})\n\n{text}\n")
    return statuses


def _check(summary: Path, log: Any) -> str:
    """Check the kernels once for all pieces; return the status."""
    status, text = _status(["infinigen_jax.check_kernels"], first_use.LIMIT, log)
    summary.write_text(f"## kernels ({status})\n\n{text}\n")
    return status


def _run_piece(piece: Piece, out: Path, cap: float, limit: float, log: Any) -> tuple[str, str]:
    """Run a piece; return its status and its stdout."""
    command = [*piece.command, "--json", str(out / f"{piece.name}.json")]
    command += ["--cap-seconds", f"{cap:.0f}"]
    return _status(command, limit, log, dict(piece.environment))


def _status(command: list[str], limit: float, *given: Any) -> tuple[str, str]:
    """Run a command with `run_within`; return its status in words and its stdout."""
    status, text = run_within(command, limit, *given)
    if status is None:
        return "out of time", text
    return "done" if status == 0 else f"status {status}", text


if __name__ == "__main__":
    sys.exit(main())
