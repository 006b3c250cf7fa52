"""Train a reference model.

    python -m benchmarks.reference_models.train --size cpu --books DIR --out DIR

It writes into the folder --out: `model` (Hugging Face layout), `loss.json`, `loss.svg`,
`checkpoint.npz`, and `data` (tokens) unless --data names another folder. Ctrl-C or SIGTERM saves
the state, and --resume continues: without --minutes to exactly the same model.
"""

import argparse
import sys
import time
from pathlib import Path

from benchmarks.reference_models.recipes import SIZES
from infinigen_jax.errors import InputError, Parser, run_command


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.reference_models.train", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--books", type=Path, help="folder of books_*.tar.xz")
    parser.add_argument("--data", type=Path, help="prepared tokens; default: OUT/data")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer.json to use")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="continue from OUT/checkpoint.npz")
    parser.add_argument(
        "--minutes",
        type=float,
        help="total time limit; default: a fixed number of tokens",
    )
    parser.add_argument("--tokens", type=int, help="training tokens; default: by size")
    parser.add_argument("--learning-rate", type=float, help="peak; default: by size")
    parser.add_argument("--synthetic", type=float, help="share of tasks; default: by size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--prepare-only", action="store_true", help="tokenise, do not train")
    return parser


def main(argv: list[str] | None = None) -> int:
    started = time.monotonic()
    options = build_parser().parse_args(argv)
    return run_command(lambda: run(options, started))


def run(options: argparse.Namespace, started: float) -> int:
    """Prepare missing data, train and export."""
    if options.minutes is not None and options.minutes <= 0:
        raise InputError(f"--minutes {options.minutes}: give a positive number")
    if options.tokens is not None and options.tokens <= 0:
        raise InputError(f"--tokens {options.tokens}: give a positive number")
    if options.synthetic is not None and not 0 <= options.synthetic <= 1:
        raise InputError(f"--synthetic {options.synthetic}: give a share, 0 to 1")
    if options.learning_rate is not None and options.learning_rate <= 0:
        raise InputError(f"--learning-rate {options.learning_rate}: give a positive number")
    if options.data and options.tokenizer:
        raise InputError("--tokenizer: the tokens in --data have a tokenizer; give one of the two")
    if options.seed < 0:
        raise InputError(f"--seed {options.seed}: it must be 0 or more")
    from benchmarks.reference_models.corpus import open_corpus, prepare
    from benchmarks.reference_models.training import Settings, train
    from infinigen_jax.files.user_cache import keep_programs

    size = SIZES[options.size]
    data = options.data or options.out / "data"
    if not options.data and not (data / "corpus.json").exists():
        if options.books is None:
            raise InputError(f"--books is missing, and {data} has no tokens")
        prepare(options.books, data, size, options.tokenizer)
    corpus = open_corpus(data)
    if options.prepare_only:
        return 0
    keep_programs()
    settings = Settings(
        size_name=options.size,
        seed=options.seed,
        deadline=None if options.minutes is None else started + 60 * options.minutes,
        tokens=options.tokens or size.tokens,
        learning_rate=options.learning_rate or size.learning_rate,
        synthetic=size.synthetic if options.synthetic is None else options.synthetic,
        save_every=options.save_every,
    )
    finished = train(settings, corpus, options.out, options.resume)
    return 0 if finished else 143


if __name__ == "__main__":
    sys.exit(main())
