"""Pictures of results. Needs matplotlib.

    python -m benchmarks.pictures

It draws the pictures of the quality pages from the results of `benchmarks.real_model`. An SVG
differs each time it is drawn, so this is separate from the tables.
"""

import sys
from pathlib import Path

from benchmarks.machine import RESULTS, note
from benchmarks.plots import Panel, Point, checked_plot, draw
from benchmarks.quality_tables import DOCS, STEPS
from benchmarks.tables import find, read
from infinigen_jax.errors import Parser, run_command
from infinigen_jax.evaluation.report import labels


def recall(path: Path) -> None:
    """Draw the real model's attention mass and output error by layer."""
    lines = [line for line in read(RESULTS, "real-model/recall-wiki-4096") if not line["reference"]]
    named = list(zip(labels(lines), lines, strict=True))

    def points(key: str) -> dict[str, list[Point]]:
        return {name: [(x["layer"], x[key]) for x in line["layers"]] for name, line in named}

    mass = Panel("layer", "mass, share of the oracle's", points("of_oracle"))
    panels = [mass, Panel("layer", "output error", points("error"))]
    draw(path, panels, "Attention covered, SmolLM2-135M-Instruct, budget 5 %")


def step_points(folder: Path) -> list[tuple[int, float]]:
    """Return the number of each step and its divergence in thousandths of a nat."""
    lines = read(folder, "real-model/steps-wiki-4096")
    steps = enumerate((find(lines, "infinigen", step) for step in STEPS.values()), 1)
    return [(number, 1e3 * line["divergence_nats"]) for number, line in steps if line]


def steps(path: Path) -> None:
    """Draw the divergence of each step from the paper's form to the default."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axis = figure.subplots()
    numbers, values = zip(*step_points(RESULTS), strict=True)
    axis.plot(values, numbers, marker="o")
    axis.set_yticks(range(1, len(STEPS) + 1), [title.replace("*", "") for title in STEPS])
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("divergence from the full cache's predictions, thousandths of a nat per token")
    axis.grid(alpha=0.3)
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    Parser(prog="python -m benchmarks.pictures", description=__doc__).parse_args(argv)

    def draw_all() -> None:
        for name, picture in {"recall-real-model.svg": recall, "steps.svg": steps}.items():
            if path := checked_plot(str(DOCS / name)):
                picture(path)
                note(str(path))

    return run_command(draw_all)


if __name__ == "__main__":
    sys.exit(main())
