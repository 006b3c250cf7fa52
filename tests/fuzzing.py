"""Random damage to files and to JSON values.

`rounds` has a limited time: FUZZ_SECONDS for each test; FUZZ_SEED is another sequence of cases.
"""

import functools
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from infinigen_jax.errors import InputError


class Edit(NamedTuple):
    """Damage: `cut` bytes at a place, a share of the file, are replaced."""

    place: float
    cut: int
    put: bytes

    def apply(self, data: bytes) -> bytes:
        at = int(self.place * len(data))
        return data[:at] + self.put + data[at + self.cut :]


# Near the start, where headers are, or anywhere.
places = st.one_of(st.floats(0, 0.999), st.floats(0, 0.05), st.floats(0.95, 0.999))
ODD = [b'"', b"{", b"[" * 99, b"-1", b"1e999", b"9" * 30, b"\0", b"null", b"\x8ar", b"..", b"\xff"]
few = st.binary(min_size=0, max_size=4) | st.sampled_from(ODD)
edits = st.one_of(
    st.builds(lambda place, put: Edit(place, len(put), put), places, few),  # changed
    st.builds(Edit, places, st.integers(0, 20), few),  # moved
    st.builds(lambda place: Edit(place, 1 << 40, b""), places),  # truncated
)
damages = st.lists(edits, min_size=1, max_size=3)


def damage(path: Path, changes: list[Edit]) -> bool:
    """Apply the changes to a file; return whether they made a difference."""
    whole = path.read_bytes()
    data = functools.reduce(lambda data, edit: edit.apply(data), changes, whole)
    path.write_bytes(data)
    return data != whole


def attempt(read: Callable[[], Any]) -> Any:
    """Return the result of `read`, or None after an InputError of one line."""
    try:
        return read()
    except InputError as error:
        assert "\n" not in str(error)
        return None


ANYTHING: list[Any] = [None, True, 0, -1, 1, 96, 1 << 31, 1 << 63, 10**30, 1e308, 0.5]
ANYTHING += ["", "a", "<s>", "\ud800", "x" * 10_000, [], {}, [[]], [1, [2]], {"content": "<x>"}]
ANYTHING += [
    {"type": "Fuse"},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False},
    {"type": "ByteFallback"},
    {"type": "Strip", "content": " ", "start": 1 << 40, "stop": 0},
    {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": "x" * 1000},
    {"type": "Prepend", "prepend": ""},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "#", "vocab": {"a": 7}},
    {"type": "Unigram", "unk_id": 5, "vocab": [["a", -1.0]], "byte_fallback": True},
    {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_id": 0, "pad_token": "x"},
    {"max_length": 1, "stride": 9, "strategy": "LongestFirst", "direction": "Left"},
]


def altered(draw: random.Random, value: Any) -> Any:
    """Return a copy of a JSON value; usually one part is replaced, left out or taken elsewhere."""

    def place() -> tuple[Any, Any]:
        inside, key = [whole], 0
        while isinstance(inside[key], dict | list) and inside[key] and draw.random() < 0.8:
            inside = inside[key]
            keys = list(inside) if isinstance(inside, dict) else range(len(inside))
            key = draw.choice(keys)
        return inside, key

    whole = json.loads(json.dumps(value))
    (inside, key), (other, other_key) = place(), place()
    kind = draw.random()
    if kind < 0.7 or inside == [whole]:
        inside[key] = draw.choice(ANYTHING)
    elif kind < 0.85:
        del inside[key]
    else:
        inside[key] = json.loads(json.dumps(other[other_key]))
    return whole


def rounds(
    capfd: pytest.CaptureFixture[str], what: str, seconds: float = 7
) -> Iterator[random.Random]:
    """Yield a generator of random numbers for each case, until the time is over."""
    seed, seconds = os.environ.get("FUZZ_SEED", "0"), float(os.environ.get("FUZZ_SECONDS", seconds))
    end, cases = time.monotonic() + seconds, 0
    for cases in itertools.count(1):
        yield random.Random(f"{what} {seed} {cases}")
        assert capfd.readouterr() == ("", ""), f"{what}: case {cases} of FUZZ_SEED={seed}"
        if time.monotonic() > end:
            break
    with capfd.disabled():
        print(f"\n{what}: {cases} cases, FUZZ_SEED={seed}")
