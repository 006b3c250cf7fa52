"""Diagrams of results; needs matplotlib."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from infinigen_jax.errors import ParameterError
from infinigen_jax.files.atomic import whole_file
from infinigen_jax.files.output import checked_output
from infinigen_jax.numeric import listed

SUFFIXES = (".png", ".svg", ".pdf")
STYLES = ("-", "--", ":")  # for the first ten lines, the next ten, ...
Point = tuple[float | int, float | int]


def checked_plot(name: str | None) -> Path | None:
    """Return the path of a plot after checking, before the work, that it can be written."""
    path = checked_output("plot", name)
    if path is None:
        return None
    if path.suffix not in SUFFIXES:
        raise ParameterError("plot", f"the name must end with {listed(SUFFIXES)}", path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ParameterError("plot", "matplotlib is not installed; pip install matplotlib")
    return path


class Panel(NamedTuple):
    """Diagram with labelled axes, and points (x, y) for each policy or configuration."""

    x: str
    y: str
    lines: Mapping[str, Sequence[Point]]


def draw(path: Path, panels: Sequence[Panel], title: str) -> None:
    """Draw panels side by side into a file, written whole or not at all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(panels), 4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)
    # A name has the same colour in all panels, and one legend lists all names.
    names = list(dict.fromkeys(n for panel in panels for n in panel.lines if panel.lines[n]))
    handles = {}
    for axis, panel in zip(axes[0], panels, strict=True):
        for name, points in panel.lines.items():
            if not points:
                continue
            index = names.index(name)
            style = {"color": f"C{index % 10}", "linestyle": STYLES[index // 10 % len(STYLES)]}
            style |= {"marker": "o", "markersize": 3}
            handles[name] = axis.plot(*zip(*points, strict=True), label=name, **style)[0]
        axis.set(xlabel=panel.x, ylabel=panel.y)
        axis.grid(alpha=0.3)
    if handles:
        figure.legend([*handles.values()], [*handles], fontsize="small", loc="outside right upper")
    figure.suptitle(title)
    try:
        with whole_file(path) as file:
            figure.savefig(file, format=path.suffix[1:], dpi=150)
    except OSError as error:
        raise ParameterError("plot", f"{error.strerror}; nothing was written", path) from None
