"""Ranges of numbers: types of command-line options, and the same check for the library."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from infinigen_jax.errors import InputError

LARGEST = 2**31 - 1  # of counts, which are int32 on the device
LARGEST_FACTOR = 10**6  # of multiples, sizes in GiB and bandwidths in GB/s: beyond any machine
LEAST_SHARE = 1e-9  # its inverse is a number of 32 bits
SHOWN = 60  # characters of a refused value
SUFFIXES = {"k": 1024, "m": 1024**2}  # as in --context 128k

Number = int | float


def whole_number(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """An option's type: a whole number in a range, also with a suffix: 128k is 131072."""
    return _type(parse_whole, "a whole number", least, most)


def number(least: Number, most: Number = LARGEST_FACTOR) -> Callable[[str], float]:
    """An option's type: a number in a range; never NaN."""
    return _type(float, "a number", least, most)


def share() -> Callable[[str], float]:
    """An option's type: a share, above 0 and at most 1."""
    return number(LEAST_SHARE, 1)


def check_range(option: str, value: Number, least: Number, most: Number = LARGEST) -> None:
    """Refuse a number outside of a range, NaN included.

    Raises:
        InputError: naming the option.
    """
    if not least <= value <= most:
        raise InputError(f"{option} {_shown(value)}: {_wanted(least, most)}")


def parse_whole(text: str) -> int:
    """A whole number; with the suffix k in units of 1024, with m of 1024 x 1024.

    Raises:
        ValueError: for other text.
    """
    factor = SUFFIXES.get(text[-1:].lower())
    return int(text) if factor is None else int(text[:-1]) * factor


def _type(
    kind: Callable[[str], Number], noun: str, least: Number, most: Number
) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{_shown(text)}: it must be {noun}") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{_shown(text)}: {_wanted(least, most)}")
        return value

    return parse


def _wanted(least: Number, most: Number) -> str:
    """The range in words."""
    upper = "" if math.isinf(most) else f" and at most {most}"
    return f"it must be at least {least}{upper}"


def _shown(value: object) -> str:
    """A value for a message, shortened."""
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
