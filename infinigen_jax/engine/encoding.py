"""Prompts, given as text or as token numbers, to token numbers."""

from collections.abc import Sequence

from infinigen_jax.errors import InputError
from infinigen_jax.loading.load import Model
from infinigen_jax.text.detokenize import checked_text

Prompt = str | Sequence[int]
UNSETTLED = 8  # trailing tokens whose tokenisation may change when text is appended


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a single one, text or token numbers, is a list of one.

    Raises:
        InputError: if they are neither.
    """
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # pyright: ignore[reportReturnType]
    for prompt in prompts:
        if isinstance(prompt, int) or not hasattr(prompt, "__len__"):
            kind = type(prompt).__name__
            raise InputError(f"--prompt: a prompt is text or a list of token numbers, not {kind}")
    return list(prompts)  # pyright: ignore[reportReturnType]


def encode(model: Model, prompt: Prompt, *, first: bool = True) -> list[int]:
    """Token numbers of a prompt.

    Args:
        first: it begins a text; what goes on with one gets no special tokens.

    Raises:
        InputError: for an empty prompt or a token that the model does not have.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise InputError("--prompt: the prompt is empty; give at least one character")
        checked_text("--prompt", prompt)
        if model.tokenizer is None:
            raise InputError("this model has no tokenizer; give prompts as token numbers")
        prompt = model.tokenizer.encode(prompt, add_special_tokens=first)
    tokens = [int(token) for token in prompt]
    if not tokens:
        raise InputError("--prompt: the prompt has no tokens; give at least one")
    vocabulary = model.config.vocab_size
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise InputError(
            f"--prompt: token {max(tokens)} is not among the model's {vocabulary} tokens; "
            "the tokenizer is not this model's"
        )
    return tokens


def encode_with_prefix(model: Model, prefix: Prompt, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token numbers of prompts that all follow one prefix; text is tokenised as a whole.

    Raises:
        InputError: as for `encode`, or if some are text and others are not.
    """
    whole = []
    if isinstance(prefix, str):
        checked_text("--prefix", prefix)
    for prompt in prompts:
        if not len(prefix):
            whole.append(encode(model, prompt))
        elif isinstance(prompt, str) and isinstance(prefix, str):
            whole.append(encode(model, prefix + prompt))
        elif isinstance(prompt, str) or isinstance(prefix, str):
            raise InputError("prefix: give it as the prompts, as text or as token numbers")
        else:
            whole.append(encode(model, [*prefix, *prompt]))
    return whole


def prefix_tokens(model: Model, prefix: Prompt) -> int:
    """How many tokens a prefix gives every prompt that follows it.

    The last ones of text are left out: where a word goes on, it may be cut into others.
    """
    if not isinstance(prefix, str):
        return len(prefix)
    return max(0, len(encode(model, prefix)) - UNSETTLED) if prefix else 0
