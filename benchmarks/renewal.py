"""Some lines of a result measured again, the others as they were: what a changed default takes.

A line depends on its own settings alone, and is the same in every run on one machine. So lines of
policies that did not change are kept, if the full cache, which comes first in every result, has the
numbers that it had. The model may have been converted anew: a kept line says of which conversion it
is.
"""

from collections.abc import Sequence
from typing import Any

from infinigen_jax.errors import InputError

# What kept lines must have been measured with as well.
SAME = ("command", "text", "settings", "model", "versions", "device")
CONVERSION = "manifest_sha256"  # of a model
# Of the full cache: no number of quality, or one that earlier results do not have.
NOT_COMPARED = ("seconds", "window_nats")


def only_policies(arguments: Sequence[str], names: Sequence[str]) -> tuple[str, ...] | None:
    """A command's arguments with those of its policies alone; None: it has none of them.

    Args:
        arguments: with `--policy` and names, behind which settings may stand.
        names: of policies, without settings.
    """
    if "--policy" not in arguments:
        return None
    first = arguments.index("--policy") + 1
    end = first
    while end < len(arguments) and not arguments[end].startswith("--"):
        end += 1
    kept = [each for each in arguments[first:end] if each.split(":")[0] in names]
    return (*arguments[:first], *kept, *arguments[end:]) if kept else None


def renewed(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new result with those lines of the old one whose policies the new one has not.

    Each line that was kept says when it was measured, and with which conversion if with another.

    Raises:
        InputError: if the two are not of the same text, model, settings, versions and device, or
            their full caches differ.
    """
    for name in SAME:
        if _without_conversion(old.get(name)) != _without_conversion(new.get(name)):
            raise InputError(f"the result is of another {name}: remove it to measure all again")
    before, now = (_reference(result["configurations"]) for result in (old, new))
    if before != now:
        raise InputError("the full cache has other numbers: remove the result to measure all again")
    # The reference comes with every result; other lines of its policy need not have come.
    measured = {line["policy"] for line in new["configurations"] if not line["reference"]}
    origin = {"date": old["date"]}
    if (conversion := (old.get("model") or {}).get(CONVERSION)) != new["model"].get(CONVERSION):
        origin[CONVERSION] = conversion
    kept = [
        origin | line
        for line in old["configurations"]
        if line["policy"] not in measured and not line["reference"]
    ]
    return new | {"configurations": [*new["configurations"], *kept]}


def _without_conversion(record: Any) -> Any:
    if isinstance(record, dict):
        return {name: value for name, value in record.items() if name != CONVERSION}
    return record


def _reference(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    line = next(line for line in lines if line["reference"])
    return {name: value for name, value in line.items() if name not in NOT_COMPARED}
