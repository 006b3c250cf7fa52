"""Command line: python -m infinigen_jax.convert SOURCE DESTINATION [options]."""

import argparse
import sys

from infinigen_jax.checkpoint.manifest import DEFAULT_SOURCE
from infinigen_jax.errors import Parser, run_command
from infinigen_jax.messages import Messages


def build_parser() -> Parser:
    """Return the parser; choices are spelled out, so that --help needs no heavy import."""
    parser = Parser(
        prog="python -m infinigen_jax.convert", description="Convert a model for InfiniGen."
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="folder, .gguf file or org/name")
    add("--revision", metavar="R", help="branch, tag or commit on the hub")
    add("destination", metavar="DESTINATION", help="folder to create")
    text = "UTF-8 text for calibration (default: a text in the package; 2048 tokens are used)"
    add("--calibration", metavar="F", help=text)
    text = "dtype of the written weights (default: as stored)"
    add("--dtype", choices=("float32", "bfloat16", "float16"), help=text)
    text = "basis of queries and keys: svd is the paper's (default: %(default)s)"
    add("--skew", choices=("svd", "balanced", "none"), default="balanced", help=text)
    text = (
        "hidden state of the previous layer that predicts the corrected query: its attention "
        "input, or the state after attention to resident rows, which predicts better "
        f"(default: {DEFAULT_SOURCE}; with other skews than balanced: input)"
    )
    add("--speculate-from", choices=("input", "resident"), help=text)
    add("--force", action="store_true", help="replace an earlier conversion at DESTINATION")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    return run_command(lambda: _convert(parser.parse_args(argv)), parser, program=argv is None)


def _convert(arguments: argparse.Namespace) -> None:
    from infinigen_jax.convert.pipeline import convert, progress_bar

    say, bar = Messages(), progress_bar()
    what = f"converting {arguments.source} into {arguments.destination}"
    with say.working(what), bar as progress:
        folder = convert(**vars(arguments), progress=progress)
    say(f"wrote {folder} (skew {arguments.skew})")


if __name__ == "__main__":
    sys.exit(main())
