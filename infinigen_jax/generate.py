"""Command line: generate text. `python -m infinigen_jax.generate --help`

Text goes to stdout as it is made, and nothing else does; messages go to stderr. With several
prompts, one prompt's text follows the other's, in order.
"""

import argparse
import dataclasses
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infinigen_jax.errors import InputError, Parser, run_command

if TYPE_CHECKING:
    from infinigen_jax.policies import Policy
    from infinigen_jax.run import Run

DEFAULT_PROMPT = "It was a dark and stormy night, and the old man"
POLICY_OPTIONS = ("alpha", "partial_ratio", "budget")


def build_parser() -> argparse.ArgumentParser:
    """The options; part of them is a contract with other programs (README, "Command line")."""
    parser = Parser(
        prog="python -m infinigen_jax.generate",
        description="Generate text with the KV cache in host memory.",
    )
    add = parser.add_argument
    add("--model", metavar="DIR", help="converted or Hugging Face folder (default: embedded)")
    add("--prompt", action="append", metavar="TEXT", help="may be given several times")
    add("--prompt-file", metavar="F", help="a file whose whole text is one more prompt")
    add("--max-new-tokens", type=int, default=64, metavar="N")
    add("--policy", default="infinigen", help="full, infinigen (default) or infinigen-paper")
    add("--alpha", type=float, help="fetch what is within A of the best score (default 4)")
    add("--partial-ratio", type=float, metavar="R", help="columns in the index (default 0.25)")
    add("--budget", type=float, metavar="F", help="most rows fetched, of those cached (0.1)")
    add("--dense-layers", type=int, metavar="N", help="layers on the device (default 2)")
    add("--schedule", default="fused", help="fused (default) or layerwise")
    add("--transfer", default="auto", help="auto (default), xla or cuda")
    add("--rows", default="auto", help="rows on the host: auto (exact, default), int8 or int4")
    add("--hot-set", type=float, metavar="M", help="rows kept after use, times the budget; 0: none")
    add("--dtype", help="float32, bfloat16 or float16 (default: float32 on the CPU, else bfloat16)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    add("--top-k", type=int, default=0, metavar="K")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--seed", type=int, default=0, metavar="S")
    add("--ignore-eos", action="store_true", help="go on behind the end-of-text token")
    add("--stats-json", metavar="F", help="write tokens, texts and measurements to a file")
    add("--quiet", action="store_true", help="no messages on stderr but errors")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    # The tokenizer's library otherwise remarks on stderr that there is no torch to run models.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # text that the terminal's encoding lacks
    return run_command(lambda: generate(arguments))


def generate(arguments: argparse.Namespace) -> None:
    """Load, generate, print, and write the stats."""
    prompts = read_prompts(arguments)
    stats_file = checked_output(arguments.stats_json)
    # Before the heavy imports, so that a bad option is reported at once.
    from infinigen_jax.checkpoint import embedded, load
    from infinigen_jax.engine import Engine
    from infinigen_jax.sampling import Sampling

    def say(message: str) -> None:
        if not arguments.quiet:
            print(message, file=sys.stderr, flush=True)

    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    policy = make_policy(arguments)
    model = load(
        embedded() if arguments.model is None else arguments.model, arguments.dtype, notify=say
    )
    engine = Engine(
        model,
        policy=policy,
        dense_layers=arguments.dense_layers,
        schedule=arguments.schedule,
        transfer=arguments.transfer,
        rows=arguments.rows,
        hot_set=arguments.hot_set,
    )
    encoded = [engine.encode(prompt) for prompt in prompts]
    run = engine.start(encoded, arguments.max_new_tokens, sampling)
    print_texts(run, ignore_eos=arguments.ignore_eos)
    say(summary(run))
    if stats_file is not None:
        write_stats(run, stats_file)


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """The prompts of --prompt and --prompt-file, or the default one."""
    prompts = list(arguments.prompt or [])
    if arguments.prompt_file is not None:
        path = Path(arguments.prompt_file)
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise InputError(f"--prompt-file {path}: not UTF-8 text; convert it first") from None
        except OSError as error:
            raise InputError(f"--prompt-file {path}: {error.strerror}; give a text file") from None
        if not text:
            raise InputError(f"--prompt-file {path}: the file is empty; give some text")
        prompts.append(text)
    return prompts or [DEFAULT_PROMPT]


def make_policy(arguments: argparse.Namespace) -> "Policy":
    """The policy of that name, with the options that were given."""
    from infinigen_jax.policies import POLICIES

    if arguments.policy not in POLICIES:
        raise InputError(f"--policy {arguments.policy}: use {' or '.join(POLICIES)}")
    kind = POLICIES[arguments.policy]
    given = {name: getattr(arguments, name) for name in POLICY_OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    known = {field.name for field in dataclasses.fields(kind)}
    # `full` has no budget to set; the options are still checked, as a typo should not pass.
    POLICIES["infinigen"](**given)
    return kind(**{name: value for name, value in given.items() if name in known})


def print_texts(run: "Run", *, ignore_eos: bool) -> None:
    """Print the first unfinished prompt's text as it is made, the others' behind it in order."""
    printed = [0] * len(run.texts)
    current = 0

    def show(until: int) -> None:
        piece = run.texts[until][printed[until] :]
        printed[until] = len(run.texts[until])
        sys.stdout.write(piece)
        sys.stdout.flush()

    for tokens in run.tokens(ignore_eos=ignore_eos):
        run.push_text(tokens)
        show(current)
        while current + 1 < len(run.texts) and tokens[current] is None:
            current = end_line(current)
            show(current)
    run.finish_text()
    while current < len(run.texts):
        show(current)
        current = end_line(current)


def end_line(current: int) -> int:
    """Close a prompt's text; the number of the next one."""
    sys.stdout.write("\n")
    sys.stdout.flush()
    return current + 1


def summary(run: "Run") -> str:
    """Two lines for a person."""
    from infinigen_jax.memory_limits import format_bytes

    stats = run.stats()
    return (
        f"{stats.policy}, {stats.schedule}: first token after {stats.prefill_seconds:.2f} s, "
        f"{stats.new_tokens} tokens, {stats.decode_tokens_per_second:.1f} tokens/s\n"
        f"KV cache on the host {format_bytes(stats.host_cache_bytes)}, fetched "
        f"{100 * stats.fetched_fraction:.1f} % of the cached rows "
        f"({format_bytes(int(stats.host_to_device_bytes_per_token))} per token)"
    )


def checked_output(name: str | None) -> Path | None:
    """Where the stats go; refused before the work rather than after it."""
    if name is None:
        return None
    path = Path(name)
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(
            f"--stats-json {path}: cannot be written; give a file in a folder of yours"
        )
    return path


def write_stats(run: "Run", path: Path) -> None:
    """Write the stats whole or not at all."""
    record = {"tokens": run.new_tokens, "texts": run.texts} | dataclasses.asdict(run.stats())
    text = json.dumps(record, indent=2) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe: never to be replaced
            path.write_text(text, encoding="utf-8")
            return
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"--stats-json {path}: {error.strerror}; nothing was written") from None
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
