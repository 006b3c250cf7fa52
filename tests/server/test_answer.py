"""Texts of answers, token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinigen_jax.engine.results import Choice
from infinigen_jax.server.answer import Answer


class Letters:
    """A tokenizer with a character for each token."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, tokens))

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)


def answered(text: str, stop: list[str], most: int = 1000, ends: str = "") -> tuple[list, Answer]:
    answer = Answer(Letters(), 0, most, stop, frozenset(map(ord, ends)))
    pieces = []
    for letter in text:
        pieces.append(answer.push(ord(letter), Choice(-1.0, [])))
        if pieces[-1].finish:
            break
    return pieces, answer


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text, stop):
    pieces, _ = answered(text + "c", stop, ends="c")
    sent = "".join(piece.text for piece in pieces)
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert sent == (text[: min(ends)[1]] if ends else text)
    assert pieces[-1].finish == "stop"
    assert "".join(chr(s.token) for p in pieces for s in p.scores) == sent


@pytest.mark.parametrize("most, finish", [(3, "length"), (9, "stop")])
def test_why_an_answer_ends(most, finish):
    pieces, answer = answered("abcdef.", [], most, ends=".")
    assert pieces[-1].finish == finish
    assert len(answer.tokens) == min(most, 7)


def test_text_that_may_begin_a_stop_string_is_held_back():
    pieces, _ = answered("a<|b<|e", ["<|end"])
    assert [piece.text for piece in pieces] == ["a", "", "", "<|b", "", "", ""]
