"""Markdown tables of a result of `benchmarks.decode`."""

from typing import Any

from benchmarks.tables import entry_table
from benchmarks.trace import PARTS

SPEEDS = {
    "system": ("system", "{}"),
    "tok/s": ("tokens_per_second", "{:.1f}"),
    "ms/step": ("milliseconds_per_step", "{:.2f}"),
    "floor ms": ("floor_milliseconds", "{:.2f}"),
    "over floor": ("time_over_floor", "{:.2f}"),
    "selected": ("selected_fraction", "{:.2%}"),
    "fetched": ("fetched_fraction", "{:.2%}"),
    "hit rate": ("hot_set_hit_rate", "{:.2f}"),
    "bytes/token": ("host_to_device_bytes_per_token", "{:.3g}"),
    "link": ("link_share", "{:.1%}"),
    "memory": ("memory_share", "{:.1%}"),
    "p50": ("single_steps.p50_ms", "{:.2f}"),
    "p99": ("single_steps.p99_ms", "{:.2f}"),
    "max": ("single_steps.max_ms", "{:.2f}"),
    "flush": ("single_steps.flush_over_median", "{:.2f}x"),
    "Python ms": ("dispatch_ms", "{:.2f}"),
}
BREAKDOWN = {
    "system": ("system", "{}"),
    "step": ("breakdown.step_ms", "{:.2f}"),
    **{part: (f"breakdown.{part}", "{:.2f}") for part in PARTS},
    "transfers": ("breakdown.transfer_ms", "{:.2f}"),
    "hidden": ("breakdown.hidden_share", "{:.0%}"),
}


def title(result: dict[str, Any]) -> str:
    """Return the model, the batch size and the dtypes as text."""
    settings = result["settings"]
    model = result["model"].get("name") or f"{settings['shape']} shape"
    small = settings.get("weight_dtype")
    weights = f", weights {small}" if small else ""
    return f"{model}, batch {settings['batch']}, {settings['dtype']}{weights}"


def table(result: dict[str, Any]) -> str:
    """Format the whole result in Markdown."""
    described, link = result["machine"], result["host_to_device_bytes_per_second"]
    lines = [
        f"{title(result)}; "
        f"{described['cpu']}, {described['cores']} cores, {described['device']}; memory read at "
        f"{result['memory_read_bytes_per_second'] / 1e9:.1f} GB/s"
        + (f", host to device at {link / 1e9:.1f} GB/s" if link else "")
        + f"; {described['date']}, commit {(described['commit'] or 'unknown')[:12]}"
    ]
    for context in result["contexts"]:
        entries = [{"system": name} | entry for name, entry in context["systems"].items()]
        measured = [entry for entry in entries if "absent" not in entry]
        lines += ["", f"### {context['context']} tokens of context", ""]
        lines += [entry_table(SPEEDS, measured), ""]
        lines += [
            f"- {entry['system']}: {entry['absent']}, {entry['reason']}"
            for entry in entries
            if "absent" in entry
        ]
        traced = [
            entry | {"breakdown": entry["breakdown"] | entry["breakdown"]["parts_ms"]}
            for entry in measured
            if "breakdown" in entry
        ]
        if traced:
            lines += ["", "Milliseconds of a step, traced:", "", entry_table(BREAKDOWN, traced)]
    return "\n".join(lines)
