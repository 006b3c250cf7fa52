"""Checks of values: types of command-line options, and the same checks for the library."""

import abc
import argparse
import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

from infinigen_jax.errors import ParameterError, shortened

LARGEST = 2**31 - 1  # of counts, which are int32 on the device
LARGEST_FACTOR = 10**6  # of multiples, sizes in GiB and bandwidths in GB/s: beyond any machine
LEAST_SHARE = 1e-9  # its inverse fits in 32 bits
SUFFIXES = {"k": 1024, "m": 1024**2}  # of whole numbers, as in --context 128k

Number = int | float


class Check(abc.ABC):
    """Type of an option: parses text, and checks values that were never text."""

    def __call__(self, text: str) -> Any:
        """Return the value of an option's text; raise ArgumentTypeError if it is invalid."""
        try:
            value = self.parse(text)
        except ValueError:
            value = text
        if problem := self.problem(value):
            raise argparse.ArgumentTypeError(f"{shortened(text)}: {problem}")
        return value

    def parse(self, text: str) -> Any:
        """Return the value of a text; raise ValueError if it has none."""
        return text

    @abc.abstractmethod
    def problem(self, value: Any) -> str:
        """Return the problem with a value; empty if there is none."""


@dataclasses.dataclass(frozen=True)
class Range(Check):
    """Numbers in a range, never NaN; `or_zero` allows 0 too.

    As text, whole numbers may have a suffix, and shares may be percentages.
    """

    least: Number
    most: Number = LARGEST_FACTOR
    whole: bool = False
    or_zero: bool = False

    def parse(self, text: str) -> Any:
        if not self.whole:
            percent = self.most == 1 and text.endswith("%")
            return float(text[:-1]) / 100 if percent else float(text)
        factor = SUFFIXES.get(text[-1:].lower())
        return int(text) if factor is None else int(text[:-1]) * factor

    def problem(self, value: Any) -> str:
        kind = numbers.Integral if self.whole else numbers.Real
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"it must be a {'whole ' * self.whole}number"
        exact: Any = value  # a whole number may be too large for a float
        if self.least <= exact <= self.most or (self.or_zero and exact == 0):
            return ""
        lower = "above 0" if self.least == LEAST_SHARE else f"at least {self.least}"
        upper = "" if math.isinf(self.most) else f" and at most {self.most}"
        return f"it must be {'0, or ' * self.or_zero}{lower}{upper}"


@dataclasses.dataclass(frozen=True)
class OneOf(Check):
    """Values of which one is allowed."""

    names: Sequence[Any]

    def problem(self, value: Any) -> str:
        return "" if value in self.names else f"use {listed(self.names)}"


def whole_number(least: int, most: int = LARGEST) -> Range:
    """Return an option's type: whole numbers in a range, also with a suffix: 128k is 131072."""
    return Range(least, most, whole=True)


SHARE = Range(LEAST_SHARE, 1)


def check_value(parameter: str, value: Any, check: Check) -> None:
    """Refuse a value that does not pass a check."""
    if problem := check.problem(value):
        raise ParameterError(parameter, problem, value)


def check_range(parameter: str, value: Any, least: int, most: int = LARGEST) -> None:
    """Refuse all values except whole numbers in a range."""
    check_value(parameter, value, whole_number(least, most))


def listed(names: Sequence[Any]) -> str:
    """Join names as in "a, b or c"."""
    *first, last = map(str, names)
    return " or ".join(filter(None, (", ".join(first), last)))
