"""Streaming text against decoding all tokens together, and stop strings across its pieces."""

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinigen_jax.loading.load import embedded
from infinigen_jax.text.detokenize import REPLACEMENT, StopFilter, Texts, TextStream

BYTES = ["<0xE2>", "<0x82>", "<0xAC>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<0x41>"]


@functools.cache
def byte_level():
    """Return a tokenizer like GPT-2's: each byte a token, some merges, special tokens."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded())


@functools.cache
def byte_fallback():
    """Return a tokenizer like LLaMA 2's: words with a mark for the space, bytes for the rest."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *BYTES, "▁", "▁the", "cat", "▁▁", ".", "é", "日", REPLACEMENT]
    model = models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def stream(tokenizer, pieces):
    text = TextStream(tokenizer)
    return [text.push(piece) for piece in pieces], text.rest()


UNITS = ["▁", "▁the", "cat", "▁▁", ".", "é", "日", "</s>", BYTES[:3], BYTES[3:7], BYTES[7:]]


@given(st.data())
def test_pieces_make_up_the_whole_text(data):
    """Texts of valid characters, some of them in bytes, and special tokens."""
    tokenizer: Any = byte_fallback()
    tokens = []
    for unit in data.draw(st.lists(st.sampled_from(UNITS), max_size=40)):
        names = unit if isinstance(unit, list) else [unit]
        tokens += tokenizer.convert_tokens_to_ids(names)
    # Models may have more numbers than their tokenizer has tokens; those have no text.
    tokens.append(len(tokenizer) + 3)
    cuts = data.draw(st.sets(st.integers(0, len(tokens))))
    ends = itertools.pairwise(sorted({0, *cuts, len(tokens)}))
    pieces, rest = stream(tokenizer, [tokens[begin:end] for begin, end in ends])
    assert "".join(pieces) + rest == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@given(st.data())
def test_invalid_bytes_are_replaced(make, data):
    tokenizer = make()
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=60))
    pieces, rest = stream(tokenizer, [[token] for token in tokens])
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    streamed, whole = (x.replace(REPLACEMENT, "") for x in ("".join(pieces) + rest, whole))
    left = iter(streamed)
    assert all(character in left for character in whole)
    # The tokenizer replaces a whole run of fallback bytes if one of them is invalid.
    assert streamed == whole or make is byte_fallback


@given(st.text(max_size=40))
def test_valid_text_never_shows_half_a_character(text):
    tokenizer = byte_level()
    tokens = tokenizer.encode(text.replace(REPLACEMENT, ""), add_special_tokens=False)
    pieces, rest = stream(tokenizer, [[token] for token in tokens])
    assert REPLACEMENT not in "".join(pieces) + rest
    assert rest == ""  # nothing is left for the end: each character came when it was complete


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@given(st.text("a �é日😀", max_size=40))
def test_replacement_characters_of_a_text_hide_no_character(make, text):
    """A run of them looks like one unfinished character after another."""
    tokenizer = make()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    pieces, rest = stream(tokenizer, [[token] for token in tokens])
    assert "".join(pieces) + rest == tokenizer.decode(tokens, skip_special_tokens=True)


def test_what_is_shown_at_once_and_what_at_the_end():
    tokenizer: Any = byte_level()
    tokens = tokenizer.encode("a word. a word", add_special_tokens=False)
    pieces, rest = stream(tokenizer, [[token] for token in tokens])
    assert all(pieces) and rest == ""
    unfinished = tokenizer.encode("aф", add_special_tokens=False)[:-1]
    assert stream(tokenizer, [unfinished]) == (["a"], REPLACEMENT)
    text = TextStream(tokenizer)
    word = tokenizer.encode(" word", add_special_tokens=False)
    end, *_ = tokenizer.encode("</s>", add_special_tokens=False)
    for _ in range(2):  # special tokens are silent
        assert text.push([end, *word, end]) == " word"
        assert text.push([end]) == ""
        assert text.rest() == ""


class Counting:
    """Tokenizer that counts the tokens it is asked to decode."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, token_ids, **options):
        self.decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, **options)

    def convert_ids_to_tokens(self, ids):
        return self.tokenizer.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("kind", ["text", "broken", "special"])
def test_cost_is_linear(make, kind):
    tokenizer = Counting(make())
    names = {
        byte_level: {"text": "a", "broken": "ð", "special": "</s>"},
        byte_fallback: {"text": "cat", "broken": "<0xF0>", "special": "</s>"},
    }
    token = tokenizer.tokenizer.convert_tokens_to_ids(names[make][kind])
    count = 1000
    pieces, rest = stream(tokenizer, [[token]] * count)
    expected = tokenizer.tokenizer.decode([token] * count, skip_special_tokens=True)
    assert "".join(pieces) + rest == expected
    assert tokenizer.decoded < 30 * count


def test_a_text_goes_on_after_its_context():
    """A decoder that strips a text's first space strips none of a text that continues another."""
    tokenizer: Any = byte_fallback()
    words = tokenizer.convert_tokens_to_ids(["▁the", "cat", "▁the"])
    assert TextStream(tokenizer, words[:2]).push(words[2:]) == " the"
    assert TextStream(tokenizer).push(words[2:]) == "the"
    # A context that ends within a character does not show where the text begins.
    part = tokenizer.convert_tokens_to_ids(BYTES[:1])
    assert TextStream(tokenizer, part).push(words[2:]) == "the"
    # It may begin within one, where the last tokens of a prompt were cut off.
    rest = tokenizer.convert_tokens_to_ids([*BYTES[2:3], *BYTES[3:7]])
    assert TextStream(tokenizer, rest).push(words[2:]) == " the"
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    texts = Texts(model, 2, contexts=[words[:2], ()])
    assert texts.push(words[2:] * 2, lambda i: False) == [" the", "the"]


def test_a_sequence_without_a_token_in_a_step_has_not_ended():
    """A lossless round may accept more tokens for other sequences."""
    tokenizer: Any = byte_fallback()
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    euro = tokenizer.convert_tokens_to_ids(BYTES[:3])
    texts = Texts(model, 2, [".cat"])
    dot, cat = tokenizer.convert_tokens_to_ids([".", "cat"])
    steps = [[euro[0], dot], [euro[1], None], [None, cat], [euro[2], None]]
    pieces = [texts.push(step, lambda i: False) for step in steps]
    assert "".join(piece[0] for piece in pieces) == "€"
    assert texts.whole == ["€", ""] and texts.stopped(1) and not texts.stopped(0)
    texts = Texts(model, 1)
    assert texts.push(euro[:1], lambda i: False) == [""]
    assert texts.push([None], lambda i: True) == [REPLACEMENT]


SHORT = st.text("ab<|", max_size=3)


def filtered(pieces, stops):
    stop_filter, shown = StopFilter(stops), ""
    for piece in pieces:
        shown += stop_filter.push(piece)
        assert not any(stop in shown for stop in stops)
    return shown + stop_filter.finish(), stop_filter.stopped


@given(st.lists(SHORT, max_size=12), st.lists(SHORT.filter(bool), min_size=1, max_size=3))
def test_text_ends_before_the_stop_string_that_is_complete_first(pieces, stops):
    text = "".join(pieces)
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    expected = text[: min(ends)[1]] if ends else text
    assert filtered(pieces, stops) == (expected, bool(ends))


def test_only_what_may_begin_a_stop_string_is_held_back():
    stop_filter = StopFilter(["<|end|>"])
    assert [stop_filter.push(p) for p in ("a <", "b", "<|en", "x")] == ["a ", "<b", "", "<|enx"]
    assert [stop_filter.push(p) for p in ("y<|", "end|> later", "z")] == ["y", "", ""]
    assert stop_filter.stopped and stop_filter.finish() == ""
