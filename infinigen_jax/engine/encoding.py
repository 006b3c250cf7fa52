"""Encoding of prompts, given as text or token ids, as token ids."""

import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from infinigen_jax.errors import InputError, ParameterError
from infinigen_jax.loading.load import Model
from infinigen_jax.text.detokenize import checked_text
from infinigen_jax.text.tokenizer import check_vocabulary, encode_further

Prompt = str | Sequence[int]
UNSETTLED = 8  # trailing tokens whose tokenisation may change when text is appended


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a single prompt becomes a list of one."""
    given: Any = as_list(prompts)
    if isinstance(given, str) or (isinstance(given, list) and given and _is_token(given[0])):
        return [given]
    for prompt in given if isinstance(given, list) else [given]:
        if isinstance(prompt, Mapping):
            raise ParameterError("prompts", "messages become token ids with `encode_chat`")
        if not isinstance(as_list(prompt), str | list):
            kind = type(prompt).__name__
            problem = f"a prompt is text or a list of token ids, not {kind}"
            raise ParameterError("prompts", problem)
    return given


def as_list(given: Any) -> Any:
    """Return arrays and sequences as lists; other values as they are."""
    if isinstance(given, str | bytes | bytearray | memoryview):
        return given
    if isinstance(given, Sequence):
        return list(given)
    as_list = getattr(given, "tolist", None)
    return given if as_list is None else as_list()


def _is_token(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, numbers.Integral) or getattr(value, "shape", None) == ()


def encode(
    model: Model, prompt: Prompt, *, add_special_tokens: bool = True, further: bool = False
) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        add_special_tokens: whether text gets those that begin one. Not the text of a chat template,
            which writes its own.
        further: whether text continues other text; it gets no special tokens.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise ParameterError("prompts", "the prompt is empty; give at least one character")
        checked_text("prompts", prompt)
        if model.tokenizer is None:
            raise InputError("this model has no tokenizer; give prompts as token ids")
        if further:
            prompt = encode_further(model.tokenizer, prompt)
        else:
            prompt = model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise ParameterError("prompts", "bytes are no prompt; decode them to text")
    try:
        tokens = [operator.index(token) for token in as_list(prompt)]
    except TypeError as error:
        raise ParameterError("prompts", f"a token is a whole number ({error})") from None
    if not tokens:
        raise ParameterError("prompts", "the prompt has no tokens; give at least one")
    check_vocabulary("prompts", tokens, model.config.vocab_size)
    return tokens
