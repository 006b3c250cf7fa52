"""Command line: generate text. `python -m infinigen_jax.generate --help`

Text goes to stdout as it is made, and nothing else does; messages go to stderr. With several
prompts, one prompt's text follows the other's, in order.
"""

import argparse
import contextlib
import dataclasses
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from infinigen_jax.cli.chat import add_chat_options, chat, check_chat_options, interrupts
from infinigen_jax.cli.options import (
    OR_EMBEDDED,
    SAMPLING_OPTIONS,
    add_engine_options,
    make_engine,
    make_policy,
    options_without_effect,
    unused_options,
)
from infinigen_jax.errors import InputError, Parser, run_command
from infinigen_jax.files.output import checked_output, write_json
from infinigen_jax.numeric import number, whole_number

if TYPE_CHECKING:
    from infinigen_jax.engine.generation import Run
    from infinigen_jax.prefill.prefill import Notify

Step = TypeVar("Step")

DEFAULT_PROMPT = "It was a dark and stormy night, and the old man"


def build_parser() -> argparse.ArgumentParser:
    """The options; part of them is a contract with other programs (README, "Command line")."""
    parser = Parser(
        prog="python -m infinigen_jax.generate",
        description="Generate text with the KV cache in host memory.",
    )
    add = parser.add_argument
    add("--model", metavar="DIR", help=f"converted or Hugging Face folder, {OR_EMBEDDED}")
    add("--prompt", action="append", metavar="TEXT", help="may be given several times")
    add("--prompt-file", metavar="F", help="a file whose whole text is one more prompt")
    add("--prefix", metavar="TEXT", help="before every prompt; read and stored once")
    add("--prefix-file", metavar="F", help="the same, a file's whole text")
    add("--max-new-tokens", type=whole_number(1), default=64, metavar="N")
    add(
        "--batch",
        type=whole_number(1),
        metavar="N",
        help="most prompts at once (default: as many as fit)",
    )
    add_engine_options(parser)
    add("--schedule", default="auto", help="auto (default), fused or layerwise; equal results")
    add("--temperature", type=number(0), metavar="T", help="0 (default) is greedy")
    add("--top-k", type=whole_number(0), metavar="K")
    add("--top-p", type=number(0, 1), metavar="P")
    add("--seed", type=whole_number(0, 2**32 - 1), metavar="S")
    add_chat_options(parser)
    add("--check", action="store_true", help="stop at a NaN or an infinity, and say where it is")
    add("--ignore-eos", action="store_true", help="go on behind the end-of-text token")
    add("--stats-json", metavar="F", help="write tokens, texts and measurements to a file")
    add("--quiet", action="store_true", help="no messages on stderr but errors")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_command(lambda: generate(build_parser().parse_args(argv)))


def generate(arguments: argparse.Namespace) -> None:
    """Load, generate, print, and write the stats."""
    check_chat_options(arguments)
    prompts, prefix = read_prompts(arguments), read_prefix(arguments)
    stats_file = checked_output("--stats-json", arguments.stats_json)
    # Before the heavy imports, so that a bad option is reported at once.
    from infinigen_jax.loading.load import load
    from infinigen_jax.machine.backend import widen_pinned_pool
    from infinigen_jax.sampling import Sampling

    def say(message: str) -> None:
        if not arguments.quiet:
            print(message, file=sys.stderr, flush=True)

    asked = {name: getattr(arguments, name) for name in SAMPLING_OPTIONS}
    sampling = Sampling(**{name: value for name, value in asked.items() if value is not None})
    policy = make_policy(arguments)
    for line in unused_options(arguments):
        say(line)
    widen_pinned_pool()
    chosen = {"schedule": arguments.schedule, "check": arguments.check}
    model = load(arguments.model, arguments.dtype, notify=say, weights=arguments.weights)
    engine = make_engine(model, policy, arguments, **chosen)
    for line in options_without_effect(arguments, engine):
        say(line)
    del model  # the engine may have its own form of the weights
    if arguments.chat:
        chat(engine, arguments, sampling, prompts, say)
        return
    encoded = engine.encode_with_prefix(prefix, prompts or [DEFAULT_PROMPT])
    progress = None if arguments.quiet else prompt_progress()
    given = (arguments.max_new_tokens, sampling, arguments.batch, progress)
    with only_errors() if arguments.quiet else contextlib.nullcontext():
        run = engine.start(encoded, *given, prefix=engine.prefix_tokens(prefix), fit=True)
    print_texts(run, ignore_eos=arguments.ignore_eos)
    say(summary(run))
    if stats_file is not None:
        record = {"tokens": run.new_tokens, "texts": run.texts} | dataclasses.asdict(run.stats())
        write_json("--stats-json", stats_file, record)


@contextlib.contextmanager
def only_errors() -> Iterator[None]:
    """Without the package's warnings."""
    logger = logging.getLogger("infinigen_jax")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def prompt_progress() -> "Notify":
    """Shows on stderr how far a prompt of several chunks is read."""
    from tqdm import tqdm

    bars: list[tqdm] = []

    def notify(done: int, total: int) -> None:
        if not bars:
            bars.append(tqdm(total=total, desc="prompt", unit=" tokens"))
        bars[0].update(done - bars[0].n)
        if done == total:
            bars.pop().close()

    return notify


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """The prompts of --prompt and --prompt-file."""
    prompts = list(arguments.prompt or [])
    if arguments.prompt_file is not None:
        prompts.append(read_text("--prompt-file", arguments.prompt_file))
    return prompts


def read_prefix(arguments: argparse.Namespace) -> str:
    """The text of --prefix or --prefix-file, empty without them."""
    if arguments.prefix is not None and arguments.prefix_file is not None:
        raise InputError("--prefix: not with --prefix-file; leave one of them out")
    if arguments.prefix == "":
        raise InputError("--prefix: it is empty; give at least one character")
    if arguments.prefix_file is not None:
        return read_text("--prefix-file", arguments.prefix_file)
    return arguments.prefix or ""


def read_text(option: str, name: str) -> str:
    """A file's text, not empty.

    Raises:
        InputError: naming the option.
    """
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{option} {path}: not UTF-8 text; convert it first") from None
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror}; give a text file") from None
    if not text:
        raise InputError(f"{option} {path}: the file is empty; give some text")
    return text


def print_texts(run: "Run", *, ignore_eos: bool) -> None:
    """Print the first unfinished prompt's text as it is made, the others' behind it in order."""
    printed = [0] * len(run.texts)
    current = 0

    def show(until: int) -> None:
        piece = run.texts[until][printed[until] :]
        printed[until] = len(run.texts[until])
        sys.stdout.write(piece)
        sys.stdout.flush()

    for tokens in until_interrupted(run.tokens(ignore_eos=ignore_eos)):
        run.push_text(tokens)
        show(current)
        # A prompt without a token is one that has ended, unless it has none at all yet.
        ended = tokens[current] is None and run.new_tokens[current]
        while current + 1 < len(run.texts) and ended:
            current = end_line(current)
            show(current)
            ended = tokens[current] is None and run.new_tokens[current]
    run.finish_text()
    while current < len(run.texts):
        show(current)
        current = end_line(current)


def until_interrupted(steps: Iterable[Step]) -> Iterator[Step]:
    """The steps, with Ctrl-C looked for between them.

    An exception out of a signal's handler can be lost, as in JAX's callback of the collector.
    """
    with interrupts() as interrupted:
        for step in steps:
            if interrupted.is_set():
                raise KeyboardInterrupt
            yield step


def end_line(current: int) -> int:
    """Close a prompt's text; the number of the next one."""
    sys.stdout.write("\n")
    sys.stdout.flush()
    return current + 1


def summary(run: "Run") -> str:
    """Two lines for a person."""
    from infinigen_jax.machine.memory_limits import format_bytes

    stats = run.stats()
    return (
        f"{stats.policy}, {stats.schedule}: first token after {stats.prefill_seconds:.2f} s, "
        f"{stats.new_tokens} tokens, {stats.decode_tokens_per_second:.1f} tokens/s\n"
        f"KV cache on the host {format_bytes(stats.host_cache_bytes)}, fetched "
        f"{100 * stats.fetched_fraction:.1f} % of the cached rows "
        f"({format_bytes(int(stats.host_to_device_bytes_per_token))} per token)"
    )


if __name__ == "__main__":
    sys.exit(main())
