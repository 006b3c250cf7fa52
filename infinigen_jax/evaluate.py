"""Command line: measure quality. `python -m infinigen_jax.evaluate perplexity --help`

One Markdown table goes to stdout, and nothing else does; progress and messages go to stderr.
"""

import argparse
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from infinigen_jax.errors import Parser, run_command
from infinigen_jax.evaluation import perplexity, recall, retrieval

COMMANDS = {
    "perplexity": perplexity,
    "recall": recall,
    "retrieval": retrieval,
}


PROGRAM = "python -m infinigen_jax.evaluate"
SUMMARY = "Measure quality through the engine that generates, for several policies."


def build_parser(
    modules: Mapping[str, Any] = COMMANDS, program: str = PROGRAM, summary: str = SUMMARY
) -> argparse.ArgumentParser:
    """A parser with a sub-parser for each module; see `infinigen_jax.evaluation`."""
    parser = Parser(prog=program, description=summary)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in modules.items():
        module.add_options(
            commands.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        )
    return parser


def main(
    argv: Sequence[str] | None = None,
    modules: Mapping[str, Any] = COMMANDS,
    program: str = PROGRAM,
    summary: str = SUMMARY,
) -> int:
    """Run a sub-command, of these modules; returns the exit status."""
    arguments = build_parser(modules, program, summary).parse_args(argv)
    # The tokenizer's library otherwise remarks on stderr that there is no torch to run models.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # signs that the terminal's encoding lacks

    def say(message: str) -> None:
        if not arguments.quiet:
            print(message, file=sys.stderr, flush=True)

    return run_command(lambda: modules[arguments.command].run(arguments, say))


if __name__ == "__main__":
    sys.exit(main())
