"""Command line: generate text. `python -m infinigen_jax.generate --help`

Only text goes to stdout, as it is made; messages go to stderr. The texts of several prompts follow
in order, each after a line on stderr that names it.
"""

import argparse
import contextlib
import dataclasses
import itertools
import logging
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infinigen_jax.cli.chat import add_chat_options, chat, check_chat_options
from infinigen_jax.cli.dialogue import find_template, rate
from infinigen_jax.cli.options import (
    SAMPLING_EXPERTS,
    add_engine_options,
    add_model_options,
    add_settings,
    load_engine,
    sampling_settings,
)
from infinigen_jax.errors import (
    InputError,
    ParameterError,
    Parser,
    one_line,
    run_command,
    shortened,
)
from infinigen_jax.files.output import checked_output, write_json
from infinigen_jax.files.regular import read_text
from infinigen_jax.messages import READING, Messages, format_bytes
from infinigen_jax.numeric import whole_number
from infinigen_jax.settings.engine import EngineOptions
from infinigen_jax.settings.sampling import MOST_LOG_PROBS, Sampling
from infinigen_jax.settings.setting import options_of
from infinigen_jax.text.detokenize import checked_text
from infinigen_jax.text.tokenizer import render_chat

if TYPE_CHECKING:
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.engine.generation import Run
    from infinigen_jax.engine.results import Step
    from infinigen_jax.prefill.prefill import Notify

DEFAULT_PROMPT = "It was a dark and stormy night, and the old man"
NEW_TOKENS = 64
ANSWER_TOKENS = 512  # in place of NEW_TOKENS with a chat template, which lets a model end by itself


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
    text = "prompt; repeatable (default: stdin, or a sample prompt if stdin is empty)"
    add("--prompt", action="append", metavar="TEXT", help=text)
    text = "file whose whole text is a prompt; repeatable"
    add("--prompt-file", action="append", metavar="F", help=text)
    add("--prefix", metavar="TEXT", help="text before every prompt; read and stored once")
    add("--prefix-file", metavar="F", help="file whose whole text is the prefix")
    text = "maximum number of prompts decoded together; others wait (default: as many as fit)"
    add("--batch", type=whole_number(1), metavar="N", help=text)
    group = parser.add_argument_group("generation")
    add = group.add_argument
    text = (
        f"maximum number of new tokens per prompt (default {NEW_TOKENS}; {ANSWER_TOKENS} with "
        "a chat template; in a chat, the context's); 1k is 1024"
    )
    add("--max-new-tokens", type=whole_number(1), metavar="N", help=text)
    common = [name for name in options_of(Sampling) if name not in SAMPLING_EXPERTS]
    add_settings(group, Sampling, common)
    add_settings(parser.experts, Sampling, SAMPLING_EXPERTS)
    add_settings(group, EngineOptions, ("lossless",))
    add("--stop", action="append", metavar="TEXT", help="end before this text; repeatable")
    add_engine_options(parser)
    add_chat_options(parser)
    add = parser.add_argument_group("output").add_argument
    add("--stats-json", metavar="F", help="write tokens, texts and measurements to a file")
    add("--quiet", action="store_true", help="print only errors to stderr")
    add = parser.experts.add_argument
    add("--raw", action="store_true", help="pass prompts unchanged, without the chat template")
    add("--ignore-eos", action="store_true", help="continue after the end-of-text token")
    number = whole_number(0, MOST_LOG_PROBS)
    text = "write log-probabilities of new tokens and of the N likeliest to --stats-json"
    add("--logprobs", dest="log_probs", type=number, metavar="N", help=text)
    drafts = ("draft_tokens", "draft_weights", "schedule", "check")
    add_settings(parser.experts, EngineOptions, drafts)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    return run_command(
        lambda: generate(parser.parse_args(argv), parser.options), parser, program=argv is None
    )


def generate(arguments: argparse.Namespace, options: Mapping[str, str]) -> None:
    """Generate or chat; `options` are those of the parser."""
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
        chat(engine, arguments, sampling, prompts, say, options)
        return
    given = prepare_prompts(engine, arguments, prompts, prefix)
    given |= {"sampling": sampling, "batch": arguments.batch, "fit": True}
    given |= {"log_probs": arguments.log_probs, "stop": arguments.stop or ()}
    progress = None if arguments.quiet else prompt_progress()
    with say.working(READING):
        run = engine.start(**given, notify=progress)
    label = say if len(prompts) > 1 else lambda message: None
    print_texts(run, prompts, label, say.decoding(run.stream(ignore_eos=arguments.ignore_eos)))
    say(summary(run))
    if stats_file is not None:
        record = {"tokens": run.new_tokens, "texts": run.texts} | dataclasses.asdict(run.stats())
        if arguments.log_probs is not None:
            record["logprobs"] = [[choice._asdict() for choice in line] for line in run.log_probs]
        write_json("stats_json", stats_file, record)


def prepare_prompts(
    engine: "Engine", arguments: argparse.Namespace, prompts: list[str], prefix: str
) -> dict[str, Any]:
    """Return the prompts, as user messages if there is a chat template, for `Engine.start`."""
    template = None
    if not arguments.raw and engine.model.tokenizer is not None:
        template = find_template(engine.model.tokenizer, arguments.chat_template)
    if template is None:
        if arguments.system is not None:
            problem = "no chat template takes it; give one as `chat_template`"
            raise ParameterError("system", problem)
        tokens = engine.encode_with_prefix(prefix, prompts)
        most = arguments.max_new_tokens or engine.model.config.fitting(NEW_TOKENS, tokens)
        shared = engine.prefix_tokens(prefix)
        return {"prompts": tokens, "max_new_tokens": most, "prefix": shared, "continues": True}

    def rendered(content: str) -> str:
        system = [] if arguments.system is None else [("system", arguments.system)]
        turn = [{"role": r, "content": c} for r, c in (*system, ("user", content))]
        return render_chat(template, turn, engine.model.tokenizer.special_tokens)

    texts = [rendered(prefix + checked_text("prompts", prompt)) for prompt in prompts]
    tokens = [engine.encode(text, add_special_tokens=False) for text in texts]
    most = arguments.max_new_tokens or engine.model.config.fitting(ANSWER_TOKENS, tokens)
    mark = secrets.token_hex(16)
    common = rendered(prefix + mark).partition(mark)[0] if prefix else ""
    shared = engine.prefix_tokens(common, add_special_tokens=False)
    return {"prompts": tokens, "max_new_tokens": most, "prefix": shared}


def read_prompts(arguments: argparse.Namespace, say: Messages) -> list[str]:
    """Return --prompt and --prompt-file, else stdin or the default; a chat reads stdin itself."""
    prompts = list(arguments.prompt or [])
    prompts += [read_text("prompt_file", file) for file in arguments.prompt_file or []]
    if prompts or arguments.chat:
        return prompts
    if not (prompt := read_stdin(say)):
        prompt = DEFAULT_PROMPT
        say(f"no prompt was given; this one is used: {prompt}")
    return [prompt]


def read_stdin(say: Messages) -> str:
    """Return piped text without its last line break; empty at a terminal or if stdin fails."""
    with contextlib.suppress(OSError), say.working("reading the prompt from stdin"):
        if not sys.stdin.isatty():
            try:
                text = sys.stdin.read().removeprefix("\ufeff").removesuffix("\n")
                text.encode()  # fails on lone surrogates, which stand for other bytes
                return text
            except UnicodeError:
                raise InputError("stdin: not UTF-8 text; convert it first") from None
    return ""


def read_prefix(arguments: argparse.Namespace) -> str:
    """Return the text of --prefix or --prefix-file; empty without them."""
    if arguments.prefix is not None and arguments.prefix_file is not None:
        raise ParameterError("prefix", "not with `prefix_file`; leave one of them out")
    if arguments.prefix == "":
        raise ParameterError("prefix", "it is empty; give at least one character")
    if arguments.prefix_file is not None:
        return read_text("prefix_file", arguments.prefix_file)
    return checked_text("prefix", arguments.prefix or "")


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
    run: "Run", prompts: list[str], label: Callable[[str], None], steps: Iterable["Step"]
) -> None:
    """Print the first unfinished prompt's text as it is made, then the others' in order."""
    number, printed = 0, 0  # the prompt whose text is printed, and how many characters of it
    label(f"[1] {shortened(one_line(prompts[0]))}")
    for step in itertools.chain(steps, [None]):
        while number < len(prompts):
            text = run.texts[number]
            print(text[printed:], end="", flush=True)
            printed = len(text)
            # Text held back at the end appears with the step after the last token.
            if step is not None and (step.tokens[number] is not None or not run.ended(number)):
                break
            print(flush=True)
            number, printed = number + 1, 0
            if number < len(prompts):
                label(f"[{number + 1}] {shortened(one_line(prompts[number]))}")


def summary(run: "Run") -> str:
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
