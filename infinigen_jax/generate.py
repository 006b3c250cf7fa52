"""Command line: generate text. `python -m infinigen_jax.generate --help`

Only text goes to stdout, as it is made; messages go to stderr. The texts of several prompts follow
in order, each after a line on stderr that names it.
"""

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from infinigen_jax.cli.chat import add_chat_options, chat, check_chat_options
from infinigen_jax.cli.dialogue import rate
from infinigen_jax.cli.options import (
    add_engine_options,
    add_model_options,
    add_sampling_options,
    add_settings,
    load_engine,
    sampling_settings,
)
from infinigen_jax.cli.prompts import (
    ANSWER_TOKENS,
    NEW_TOKENS,
    prepare_prompts,
    read_prefix,
    read_prompts,
)
from infinigen_jax.errors import ParameterError, Parser, one_line, run_command, shortened
from infinigen_jax.files.output import checked_output, write_json
from infinigen_jax.messages import READING, Messages, format_bytes
from infinigen_jax.numeric import whole_number
from infinigen_jax.settings.engine import EngineOptions
from infinigen_jax.settings.sampling import MOST_LOG_PROBS, Sampling

if TYPE_CHECKING:
    from infinigen_jax.engine.generation import Run
    from infinigen_jax.prefill.prefill import Notify

Say = Callable[[str], None]
PROMPT_HELP = "prompt; may be given several times (default: stdin, or a sample if it is empty)"


def build_parser() -> Parser:
    """Return the parser; some options are a contract with other programs."""
    parser = Parser(
        prog="python -m infinigen_jax.generate",
        usage="%(prog)s [--model M] [--prompt TEXT] [options]",
        description="Generate text with the KV cache in host memory. Text goes to stdout, messages "
        "go to stderr.",
    )
    add = parser.add_argument_group("model and prompts").add_argument
    add_model_options(add)
    add("--prompt", action="append", metavar="TEXT", help=PROMPT_HELP)
    file_help = "file whose whole text is one more prompt; repeat for more"
    add("--prompt-file", action="append", metavar="F", help=file_help)
    add("--prefix", metavar="TEXT", help="text before every prompt; read and stored once")
    add("--prefix-file", metavar="F", help="file whose whole text is the prefix")
    add(
        "--batch",
        type=whole_number(1),
        metavar="N",
        help="most prompts decoded together; the others wait (default: as many as fit)",
    )
    group = parser.add_argument_group("generation")
    add = group.add_argument
    add(
        "--max-new-tokens",
        type=whole_number(1),
        metavar="N",
        help=f"most tokens to generate for each prompt (default {NEW_TOKENS}; {ANSWER_TOKENS} with "
        "a chat template; in a chat, the context's); 1k is 1024",
    )
    add_sampling_options(group, parser.experts)
    add_settings(group, EngineOptions, ("lossless",))
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    add_engine_options(parser)
    add_chat_options(parser)
    add = parser.add_argument_group("output").add_argument
    add("--stats-json", metavar="F", help="write tokens, texts and measurements to a file")
    add("--quiet", action="store_true", help="no messages on stderr but errors")
    add = parser.experts.add_argument
    add("--raw", action="store_true", help="prompts as they are, without the chat template")
    add("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    add(
        "--logprobs",
        dest="log_probs",
        type=whole_number(0, MOST_LOG_PROBS),
        metavar="N",
        help="log-probabilities of new tokens and of the N likeliest, in --stats-json",
    )
    add_settings(
        parser.experts, EngineOptions, ("draft_tokens", "draft_weights", "schedule", "check")
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    return run_command(lambda: generate(parser.parse_args(argv)), parser, program=argv is None)


def generate(arguments: argparse.Namespace) -> None:
    say = Messages(arguments.quiet)
    if arguments.quiet:
        logging.getLogger("infinigen_jax").setLevel("ERROR")
    check_chat_options(arguments)
    prompts, prefix = read_prompts(arguments, say), read_prefix(arguments)
    if arguments.log_probs is not None and arguments.stats_json is None:
        raise ParameterError("log_probs", "they are written to `stats_json`; give that, too")
    stats_file = checked_output("stats_json", arguments.stats_json)
    sampling, engine = Sampling(**sampling_settings(arguments)), load_engine(arguments, say)
    if arguments.chat:
        chat(engine, arguments, sampling, prompts, say)
        return
    given = prepare_prompts(engine, arguments, prompts, prefix)
    given |= {"sampling": sampling, "batch": arguments.batch, "fit": True}
    given |= {"log_probs": arguments.log_probs, "stop": arguments.stop or ()}
    progress = None if arguments.quiet else prompt_progress()
    with say.working(READING):
        run = engine.start(**given, notify=progress)
    label = say if len(prompts) > 1 else lambda message: None
    print_texts(run, prompts, label, say.decoding(run.tokens(ignore_eos=arguments.ignore_eos)))
    say(summary(run))
    if stats_file is not None:
        record = {"tokens": run.new_tokens, "texts": run.texts} | dataclasses.asdict(run.stats())
        if arguments.log_probs is not None:
            record["logprobs"] = [[choice._asdict() for choice in line] for line in run.log_probs]
        write_json("stats_json", stats_file, record)


def prompt_progress() -> "Notify":
    """Return a callback that shows on stderr how far a prompt of several chunks is read."""
    from tqdm import tqdm

    bars: list[tqdm] = []

    def notify(done: int, total: int) -> None:
        if not bars:
            bars.append(tqdm(total=total, desc="prompt", unit=" tokens"))
        bars[0].update(done - bars[0].n)
        if done == total:
            bars.pop().close()

    return notify


def print_texts(
    run: "Run", prompts: list[str], label: Say, steps: Iterable[list[int | None]]
) -> None:
    """Print the first unfinished prompt's text as it is made, then the others' in order."""
    number, printed = -1, 0  # the prompt whose text is printed, and how many characters of it

    def begin_next() -> None:
        nonlocal number, printed
        number, printed = number + 1, 0
        if number < len(prompts):
            label(f"[{number + 1}] {shortened(one_line(prompts[number]))}")

    def show(end: str = "") -> None:
        nonlocal printed
        print(run.texts[number][printed:], end=end, flush=True)
        printed = len(run.texts[number])

    begin_next()
    for tokens in steps:
        run.push_text(tokens)
        show()
        # Text held back at the end appears with the step after the last token.
        while number + 1 < len(run.texts) and run.ended(number) and tokens[number] is None:
            show("\n")
            begin_next()
            show()
    run.finish_text()
    while number < len(run.texts):
        show("\n")
        begin_next()


def summary(run: "Run") -> str:
    """Return a summary of two lines."""
    stats = run.stats()
    return (
        f"{stats.policy}, {stats.schedule}: first token after {run.clock.first:.2f} s, "
        f"{stats.new_tokens} tokens{rate(run)}\n"
        f"KV cache on the host {format_bytes(stats.host_cache_bytes)}, fetched "
        f"{100 * stats.fetched_fraction:.1f} % of the cached rows "
        f"({format_bytes(int(stats.host_to_device_bytes_per_token))} per token)"
    )


if __name__ == "__main__":
    sys.exit(main())
