"""Drawing results; needs matplotlib, which nothing else here does."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.naming import labels_over_budgets
from infinigen_jax.files.output import checked_output

SUFFIXES = (".png", ".svg", ".pdf")
STYLES = ("-", "--", ":")  # of the first ten lines, the next ten, ...
Point = tuple[float | int, float | int]


def checked_plot(name: str | None) -> Path | None:
    """Where a plot goes; refused before the work rather than after it.

    Raises:
        InputError: for a file that cannot be written, another format, or without matplotlib.
    """
    path = checked_output("--plot", name)
    if path is None:
        return None
    if path.suffix not in SUFFIXES:
        raise InputError(f"--plot {path}: the name must end with {' or '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot: matplotlib is not installed; pip install matplotlib")
    return path


class Panel:
    """One diagram: a line for each policy, or for each configuration.

    Args:
        lines: name -> points (x, y).
    """

    def __init__(self, x: str, y: str, lines: Mapping[str, Sequence[Point]]):
        self.x, self.y, self.lines = x, y, lines


def against_fraction(lines: list[dict[str, Any]], name: str, title: str) -> Panel:
    """A value of each result line over the fraction fetched; lines join different budgets."""
    points: dict[str, list[Point]] = {}
    for label, line in zip(labels_over_budgets(lines), lines, strict=True):
        if line[name] is not None:
            fetched = 100 * line["fetched_fraction"]
            points.setdefault(label, []).append((fetched, line[name]))
    return Panel("fetched, % of the rows", title, {k: sorted(v) for k, v in points.items()})


def draw(path: Path, panels: Sequence[Panel], title: str) -> None:
    """Draw panels side by side, to a file that is written whole or not at all.

    Raises:
        InputError: if the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False, layout="constrained"
    )
    # A name has one colour in all panels, and one legend has them all.
    names = list(dict.fromkeys(n for panel in panels for n in panel.lines if panel.lines[n]))
    handles = {}
    for axis, panel in zip(axes[0], panels, strict=True):
        for name, points in panel.lines.items():
            if not points:
                continue
            number = names.index(name)
            style = {"color": f"C{number % 10}", "linestyle": STYLES[number // 10 % len(STYLES)]}
            style |= {"marker": "o", "markersize": 3}
            handles[name] = axis.plot(*zip(*points, strict=True), label=name, **style)[0]
        axis.set_xlabel(panel.x)
        axis.set_ylabel(panel.y)
        axis.grid(alpha=0.3)
    if names:
        drawn = [handles[name] for name in names]
        figure.legend(drawn, names, fontsize="small", loc="outside right upper")
    figure.suptitle(title)
    temporary = path.with_name(f".{path.stem}.unfinished{path.suffix}")
    try:
        figure.savefig(temporary, dpi=150)
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"--plot {path}: {error.strerror}; nothing was written") from None
    finally:
        temporary.unlink(missing_ok=True)
        plt.close(figure)
