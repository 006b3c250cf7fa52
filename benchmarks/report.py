"""What a result file says, for reading: the table, the breakdown, and the goals."""

from typing import Any

from benchmarks.trace import PARTS

# Goals: what is compared, by its step time or otherwise, and the least value wanted.
RATIOS = (
    # (devices, shapes or None for any, context or None, over, system, least)
    ("cpu", None, 16384, "transformers-static", "infinigen", 4.0),
    ("cpu", None, 16384, "transformers", "infinigen", 4.0),
    ("cpu", None, 16384, "full-streamed", "infinigen", 3.0),
    ("gpu", ("llama-8b",), None, "full-device", "infinigen", 0.9),
    ("gpu", ("llama-8b",), None, "full-streamed", "infinigen", 10.0),
    ("gpu", ("llama-8b",), None, "transformers-offloaded", "infinigen", 20.0),
    ("gpu", ("opt-13b",), None, "infinigen-paper", "infinigen", 3.0),
)
LONG, SHORT = 32768, 4096  # contexts of "step time at 32K over step time at 4K"
LARGEST_GROWTH = 2.0  # of the step from SHORT to LONG, with as many rows at both
LARGEST_SPIKE = 2.0
LEAST_HIDDEN = 0.9


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each goal for which the systems needed were measured.

    Returns:
        what; context (None: of several); value; bound, "at least" or "at most" some number, None if
        it is for information; met.
    """
    found: list[dict[str, Any]] = []
    device, shape = result["device"], result["settings"]["shape"]
    measured = {
        context["context"]: {n: e for n, e in context["systems"].items() if "absent" not in e}
        for context in result["contexts"]
    }
    for context, systems in measured.items():
        for where, shapes, at, over, name, least in RATIOS:
            fits = where == device and (shapes is None or shape in shapes)
            if fits and at in (None, context) and over in systems and name in systems:
                value = _speed(systems[name]) / _speed(systems[over])
                found.append(_goal(f"{name} over {over}", context, value, least=least))
        for name, entry in systems.items():
            spike = (entry.get("single_steps") or {}).get("flush_over_median")
            if name.startswith("infinigen") and spike is not None:
                what = f"{name}: step with a flush over median step"
                found.append(_goal(what, context, spike, most=LARGEST_SPIKE))
            hidden = (entry.get("breakdown") or {}).get("hidden_share")
            if device == "gpu" and name.startswith("infinigen") and hidden is not None:
                what = f"{name}: share of the transfer that is hidden"
                found.append(_goal(what, context, hidden, least=LEAST_HIDDEN))
    for name in measured.get(LONG, {}):
        if name in measured.get(SHORT, {}):
            long, short = (measured[c][name]["milliseconds_per_step"] for c in (LONG, SHORT))
            what = f"{name}: step at {LONG} over step at {SHORT}"
            most = None
            if name == "infinigen-fixed":
                what += f", {result['settings']['budget_rows']} rows at both"
                most = LARGEST_GROWTH
            found.append(_goal(what, None, long / short, most=most))
    return found


def _speed(entry: dict[str, Any]) -> float:
    return entry["tokens_per_second"]


def _goal(
    what: str,
    context: int | None,
    value: float,
    least: float | None = None,
    most: float | None = None,
) -> dict[str, Any]:
    bound, met = None, None
    if least is not None:
        bound, met = f"at least {least:g}", value >= least
    if most is not None:
        bound, met = f"at most {most:g}", value <= most
    return {"what": what, "context": context, "value": value, "bound": bound, "met": met}


def table(result: dict[str, Any]) -> str:
    """The whole result in Markdown."""
    settings, described = result["settings"], result["machine"]
    link = result["host_to_device_bytes_per_second"]
    lines = [
        f"{settings['shape']} shape, batch {settings['batch']}, {settings['dtype']}; "
        f"{described['cpu']}, {described['cores']} cores, {described['device']}; memory read at "
        f"{result['memory_read_bytes_per_second'] / 1e9:.1f} GB/s"
        + (f", host to device at {link / 1e9:.1f} GB/s" if link else "")
        + f"; {described['date']}, commit {(described['commit'] or 'unknown')[:12]}"
    ]
    for context in result["contexts"]:
        lines += ["", f"### {context['context']} tokens of context", "", *_speeds(context)]
        if any("breakdown" in entry for entry in context["systems"].values()):
            lines += ["", "Milliseconds of a step, traced:", "", *_breakdown(context)]
    if result["goals"]:
        lines += ["", "### Goals", "", *_goals(result["goals"])]
    return "\n".join(lines)


COLUMNS = {
    "tok/s": ("tokens_per_second", "{:.1f}"),
    "ms/step": ("milliseconds_per_step", "{:.2f}"),
    "floor ms": ("floor_milliseconds", "{:.2f}"),
    "over floor": ("time_over_floor", "{:.2f}"),
    "selected": ("selected_fraction", "{:.2%}"),
    "fetched": ("fetched_fraction", "{:.2%}"),
    "hit rate": ("hot_set_hit_rate", "{:.2f}"),
    "MB/token": ("host_to_device_bytes_per_token", None),
    "link": ("link_share", "{:.1%}"),
    "memory": ("memory_share", "{:.1%}"),
    "p50": ("p50_ms", "{:.2f}"),
    "p99": ("p99_ms", "{:.2f}"),
    "max": ("max_ms", "{:.2f}"),
    "flush": ("flush_over_median", "{:.2f}x"),
    "Python ms": ("dispatch_ms", "{:.2f}"),
}


def _speeds(context: dict[str, Any]) -> list[str]:
    lines = _head(["system", *COLUMNS])
    absent = []
    for name, entry in context["systems"].items():
        if "absent" in entry:
            absent.append(f"- {name}: {entry['absent']}, {entry['reason']}")
            continue
        values = entry | entry.get("single_steps", {})
        cells = [_cell(values.get(key), pattern) for key, pattern in COLUMNS.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines + ([""] + absent if absent else [])


def _cell(value: float | None, pattern: str | None) -> str:
    if value is None:
        return ""
    return pattern.format(value) if pattern else f"{value / 1e6:.2f}"


def _breakdown(context: dict[str, Any]) -> list[str]:
    lines = _head(["system", "step", *PARTS, "transfers", "hidden"])
    for name, entry in context["systems"].items():
        if traced := entry.get("breakdown"):
            cells = [f"{traced['parts_ms'][part]:.2f}" for part in PARTS]
            hidden = traced["hidden_share"]
            cells += [f"{traced['transfer_ms']:.2f}", "" if hidden is None else f"{hidden:.0%}"]
            lines.append(f"| {name} | {traced['step_ms']:.2f} | {' | '.join(cells)} |")
    return lines


def _goals(found: list[dict[str, Any]]) -> list[str]:
    lines = _head(["", "context", "value", "goal", "met"])
    for goal in found:
        met = {None: "", True: "yes", False: "no"}[goal["met"]]
        lines.append(
            f"| {goal['what']} | {goal['context'] or ''} | {goal['value']:.2f} "
            f"| {goal['bound'] or ''} | {met} |"
        )
    return lines


def _head(names: list[str]) -> list[str]:
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
