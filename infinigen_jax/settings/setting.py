"""A setting: a dataclass field that knows its help and its check.

The command lines make their options from these fields (`cli.options`).
"""

import dataclasses
import functools
import numbers
from typing import Any, ClassVar, NamedTuple

from infinigen_jax.errors import ParameterError
from infinigen_jax.numeric import Check, check_value


class Option(NamedTuple):
    """Part of a setting beyond its name, type and default."""

    help: str  # noun phrase that names the setting, then its effect; empty if no option sets it
    metavar: str = ""
    check: Check | None = None  # allowed values; None for any


def setting(default: Any, help: str = "", metavar: str = "", check: Check | None = None) -> Any:
    """Return a dataclass field with an `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help, metavar, check)})


class Settings:
    """Base of dataclasses with settings, which are checked on construction.

    Raise ParameterError for a value that is not allowed. The message names the setting, prefixed
    by `room`. None is allowed where it is the default. NumPy's numbers become Python's.
    """

    room: ClassVar[str] = ""

    def __post_init__(self):
        defaults = defaults_of(type(self))
        for name in options_of(type(self)):
            value = getattr(self, name)
            item = getattr(value, "item", None)
            if item is not None and isinstance(value, numbers.Real):  # of NumPy
                value = item()
                object.__setattr__(self, name, value)
            if value is not None or defaults[name] is not None:
                check_setting(type(self), name, value)


def check_setting(kind: type[Settings], name: str, value: Any) -> None:
    check = options_of(kind)[name].check
    if isinstance(defaults_of(kind)[name], bool) and not isinstance(value, bool):
        raise ParameterError(f"{kind.room}{name}", "use True or False", value)
    if check is not None:
        check_value(f"{kind.room}{name}", value, check)


@functools.cache
def options_of(kind: type) -> dict[str, Option]:
    """Return the options of a class of settings by name.

    A class that changes only the default of an inherited setting keeps its option.
    """
    options = {}
    for base in reversed(kind.__mro__):
        for field in vars(base).get("__dataclass_fields__", {}).values():
            if "option" in field.metadata:
                options[field.name] = field.metadata["option"]
    return options


def defaults_of(kind: Any) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(kind)}
