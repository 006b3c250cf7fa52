"""Answers that follow a JSON schema: a mask of the tokens that may come next, by llguidance.

A mask is computed on the host from the tokens drawn so far, while the device computes the step that
gives the next logits. It therefore delays no step.
"""

import functools
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

MOST_MULTIPLE = 50_000  # an automaton has as many states
MOST_PARTS = 1000  # llguidance recurses into them, on a stack of 8 MiB
# White space between two parts. Without a limit, a model may write it until `max_tokens`.
SPACES = r"[ \n]{0,12}"


class Grammars:
    """Grammars over the tokens of a model."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]):
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends

    def matcher(self, schema: Mapping[str, Any]) -> LLMatcher:
        """Return a matcher of texts that follow a JSON schema; raise ValueError if unsupported."""
        _check_size(schema)
        options: Any = {"whitespace_pattern": SPACES}
        grammar = LLMatcher.grammar_from_json_schema(dict(schema), defaults=options)
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error().splitlines()[0])
        return matcher

    @functools.cached_property
    def _tokens(self) -> LLTokenizer:
        backend = self._tokenizer.backend
        # Tokenizers may have tokens that the model lacks.
        size = max(self._vocabulary, backend.get_vocab_size())
        return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=sorted(self._ends) or None)


def _check_size(schema: Any) -> None:
    """Refuse schemas that take llguidance too much time, memory or stack."""
    parts, count, multiples = [schema], 0, [Decimal(1)]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            count += 1
            if count > MOST_PARTS:
                raise ValueError(f"the schema has more than {MOST_PARTS} parts; simplify it")
            multiple: Any = part.get("multipleOf")
            if type(multiple) in (int, float) and 0 < multiple < math.inf:
                multiples.append(Decimal(str(multiple)))
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    # All may apply to one number. Of decimals, the last digits of all count.
    digits = max(-int(multiple.as_tuple().exponent) for multiple in multiples)
    common = 1
    for multiple in multiples[1:]:
        common = math.lcm(common, int(multiple.scaleb(digits)))
        if common > MOST_MULTIPLE:  # before it becomes a number of millions of digits
            problem = "the least common multiple of all multipleOf, in their last digit, exceeds"
            raise ValueError(f"{problem} {MOST_MULTIPLE}; use simpler ones")


def allowed_tokens(matchers: Mapping[int, LLMatcher], batch: int, vocabulary: int) -> np.ndarray:
    """Return the tokens that sequences may draw, all without a matcher: bits, int32 [b, v / 32]."""
    allowed = np.full((batch, -(-vocabulary // 32)), -1, np.int32)
    for sequence, matcher in matchers.items():
        mask = np.frombuffer(matcher.compute_bitmask(), np.int32)
        allowed[sequence] = mask[: allowed.shape[1]]
    return allowed
