"""A text as windows of tokens: equal in size, without overlap, each beginning as a prompt does."""

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from infinigen_jax.errors import InputError

if TYPE_CHECKING:
    from infinigen_jax.models import ModelConfig

SMALLEST_WINDOW = 3  # one token to prefill, one to decode, one to score


@dataclasses.dataclass(frozen=True)
class Text:
    """A text file.

    Attributes:
        name: of the file, without its folder.
        content: without a byte order mark, lines ended by "\\n".
        sha256: of the file's bytes.
    """

    name: str
    content: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class TokenizedText:
    """Tokens of a text.

    Attributes:
        prefix: special tokens that the tokenizer puts in front of every prompt, often one or none.
        tokens: of the text itself, [t] int32.
    """

    prefix: tuple[int, ...]
    tokens: Int[np.ndarray, " t"]

    def windows(self, size: int) -> int:
        """How many windows of `size` tokens, the prefix included, the text has."""
        return len(self.tokens) // (size - len(self.prefix))

    def cut(self, size: int, most: int | None = None) -> Int[np.ndarray, "w n"]:
        """Windows of `size` tokens in the order of the text, int32, each behind the prefix.

        Args:
            most: with more windows than this in the text, so many of them, evenly spread over it.

        Raises:
            InputError: if the text is too short for one.
        """
        here = self.windows(size)
        if not here:
            total = len(self.tokens) + len(self.prefix)
            remedy = f"lower --window to at most {total}, or give a longer --text"
            raise InputError(
                f"--window {size}: the text has only {total} tokens; "
                + (remedy if total >= SMALLEST_WINDOW else "give a longer --text")
            )
        own = size - len(self.prefix)
        count = here if most is None else min(most, here)
        chosen = self.tokens[: here * own].reshape(here, own)[np.arange(count) * here // count]
        prefix = np.broadcast_to(np.array(self.prefix, np.int32), (count, len(self.prefix)))
        return np.concatenate([prefix, chosen], axis=1)


def read_text(path: str, option: str = "--text") -> Text:
    """Read a UTF-8 file.

    Args:
        option: that it was given with.

    Raises:
        InputError: naming the file, if it cannot be read, is empty or is not UTF-8.
    """
    try:
        data = Path(path).read_bytes()
        # Some files have been through two conversions: "\r\r\n".
        content = re.sub("\r+\n|\r", "\n", data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InputError(f"{option} {path}: not UTF-8 text; convert it first") from None
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror}; give a text file") from None
    except ValueError as error:  # a null byte in the name
        raise InputError(f"{option}: {error}; give a text file") from None
    if not content:
        raise InputError(f"{option} {path}: the file is empty; give some text")
    return Text(Path(path).name, content, hashlib.sha256(data).hexdigest())


def tokenize(text: Text, tokenizer: Any, vocabulary: int) -> TokenizedText:
    """Tokenise a text.

    Raises:
        InputError: if there is a token that the model does not have.
    """

    def encode(content: str, special: bool) -> list[int]:
        return tokenizer.encode(content, add_special_tokens=special)

    # Of special tokens at both ends, those in front are what stays when nothing is behind them.
    plain, wrapped = encode("a", False), encode("a", True)
    prefix = wrapped[: wrapped.index(plain[0])] if plain and plain[0] in wrapped else []
    tokens = encode(text.content, False)
    if max([*prefix, *tokens], default=0) >= vocabulary:
        raise InputError(
            f"--text {text.name}: token {max(*prefix, *tokens)} is not among the model's "
            f"{vocabulary} tokens; the tokenizer is not this model's"
        )
    return TokenizedText(tuple(prefix), np.array(tokens, np.int32))


def prefixed(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a prompt, special ones in front included; nothing behind it."""
    wrapped = tokenizer.encode(text)
    plain = tokenizer.encode(text, add_special_tokens=False)
    # A tokenizer may end a text with a special token, which a prompt must not have.
    extra = len(wrapped) - len(plain)
    in_front = next((i for i in range(extra + 1) if wrapped[i : i + len(plain)] == plain), 0)
    return wrapped[: in_front + len(plain)] if plain else wrapped


def beginning(tokenizer: Any, config: "ModelConfig") -> int:
    """The token that a text without a context is behind: the tokenizer's or the model's first one,
    else the one that ends the text before."""
    marks = (tokenizer.bos_token_id, config.bos_id, tokenizer.eos_token_id, *config.eos_ids)
    return next((mark for mark in marks if mark is not None), 0)


def split_behind(
    tokenizer: Any, context: str, text: str, first: int
) -> tuple[list[int], list[int]]:
    """Tokens of a context as of a prompt, and those that the text adds; one at least of each.

    Where a token spans both, it belongs to the text. Spaces at the context's end go to the text,
    as tokenizers join them to the word behind.

    Args:
        first: the context where there is none, see `beginning`.

    Raises:
        InputError: for an empty text.
    """
    stripped = context.rstrip(" ")
    whole = prefixed(tokenizer, context + text)
    own = prefixed(tokenizer, stripped)
    common = 0
    for a, b in zip(own, whole, strict=False):
        if a != b:
            break
        common += 1
    common = min(common, len(whole) - 1)
    if not text or common < 0:
        raise InputError(f"nothing to score behind {context[-40:]!r}; give a text")
    return whole[:common] or [first], whole[common:]
