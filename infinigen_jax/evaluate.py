"""Command line: measure quality. `python -m infinigen_jax.evaluate perplexity --help`

One Markdown table goes to stdout, and nothing else does; progress and messages go to stderr.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from infinigen_jax.errors import Parser, run_command
from infinigen_jax.evaluation import perplexity, recall, retrieval
from infinigen_jax.messages import Messages

COMMANDS = {"perplexity": perplexity, "recall": recall, "retrieval": retrieval}
PROGRAM = "python -m infinigen_jax.evaluate"
SUMMARY = "Measure quality through the engine that generates, for several policies."


def build_parser(
    modules: Mapping[str, Any] = COMMANDS, program: str = PROGRAM, summary: str = SUMMARY
) -> Parser:
    """Return a parser with a sub-parser for each module, see `infinigen_jax.evaluation`."""
    parser = Parser(prog=program, description=summary)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in modules.items():
        command = commands.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        module.add_options(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None, *family: Any) -> int:
    """Run a sub-command; `family` are arguments of `build_parser`."""
    parser = build_parser(*family)

    def run() -> None:
        arguments = parser.parse_args(argv)
        arguments.run(arguments, Messages(arguments.quiet))

    return run_command(run, parser, program=argv is None)


if __name__ == "__main__":
    sys.exit(main())
