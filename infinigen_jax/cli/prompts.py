"""Prompts of the command line: their sources, and the tokens that the model reads."""

import argparse
import contextlib
import secrets
import sys
from typing import TYPE_CHECKING, Any

from infinigen_jax.cli.dialogue import find_template
from infinigen_jax.errors import InputError, ParameterError
from infinigen_jax.files.regular import read_text
from infinigen_jax.messages import Messages
from infinigen_jax.text.detokenize import checked_text
from infinigen_jax.text.templates import render_chat

if TYPE_CHECKING:
    from infinigen_jax.engine.engine import Engine

DEFAULT_PROMPT = "It was a dark and stormy night, and the old man"
NEW_TOKENS = 64
ANSWER_TOKENS = 512  # in place of NEW_TOKENS with a chat template, which lets a model end by itself


def prepare_prompts(
    engine: "Engine", arguments: argparse.Namespace, prompts: list[str], prefix: str
) -> dict[str, Any]:
    """Return the prompts as they are, or as user messages if the model has a chat template.

    They are arguments of `Engine.start`.
    """
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

    def encode(text: str) -> list[int]:
        return engine.encode(text, add_special_tokens=False)

    tokens = [encode(rendered(prefix + checked_text("prompts", prompt))) for prompt in prompts]
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
