"""Stop strings across the borders of pieces."""

from hypothesis import given
from hypothesis import strategies as st
from tiny import refuses

from infinigen_jax.text.stops import StopFilter, checked_stops

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


def test_an_empty_stop_string_is_refused():
    refuses("stop ''", checked_stops, ["a", ""])
