"""The documentation's pictures of quality, out of the results of `benchmarks.quality`.

    python -m benchmarks.pictures

Needs matplotlib. An SVG is another file each time it is drawn, so this is not part of the tables.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.files import RESULTS, note
from benchmarks.quality_tables import DOCS, measured_models
from benchmarks.table_cells import BUDGETS, STEPS, find
from infinigen_jax.errors import Parser, run_command
from infinigen_jax.evaluation.plots import checked_plot, draw
from infinigen_jax.evaluation.recall import panels


def recall(folder: Path) -> None:
    """Attention found by layer and position, at the smaller budget; exact top-k is the measure."""
    result = json.loads((folder / "recall-tiny-llama.json").read_text())
    lines = [
        line
        for line in result["configurations"]
        if line["settings"].get("budget") == BUDGETS[0] and line["policy"] != "oracle"
    ]
    path = checked_plot(str(DOCS / "recall-tiny-llama.svg"))
    assert path is not None
    draw(path, panels(lines), f"Attention found, {result['model']['name']}, budget 5 %")
    note(f"{path}")


def step_points(folder: Path) -> dict[str, list[tuple[float, int]]]:
    """By model: divergence, in thousandths of a nat, and number of each step."""
    found: dict[str, list[tuple[float, int]]] = {}
    for model, lines in measured_models(folder, "perplexity-steps").items():
        for number, settings in enumerate(STEPS.values()):
            if line := find(lines, "infinigen", {**settings, "budget": BUDGETS[0]}):
                point = 1e3 * line["divergence_nats"], number
                found.setdefault(model, []).append(point)
    return found


def steps(folder: Path) -> None:
    """Divergence of each step from the paper's form to the default, at the smaller budget."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
    titles = [title.replace("*", "") for title in STEPS]
    for model, points in step_points(folder).items():
        axis.plot(*zip(*points, strict=True), marker="o", label=model)
    axis.set_yticks(range(len(titles)), titles)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("divergence from the full cache's predictions, thousandths of a nat a token")
    axis.grid(alpha=0.3)
    axis.legend()
    axis.set_title("5 % of the rows fetched, a part more changed in each line")
    path = DOCS / "steps.svg"
    figure.savefig(path)
    plt.close(figure)
    note(f"{path}")


def main(argv: list[str] | None = None) -> int:
    parser: argparse.ArgumentParser = Parser(
        prog="python -m benchmarks.pictures", description="Draw the documentation's pictures."
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args(argv)

    def all_of_them() -> None:
        recall(options.results)
        steps(options.results)

    return run_command(all_of_them)


if __name__ == "__main__":
    sys.exit(main())
