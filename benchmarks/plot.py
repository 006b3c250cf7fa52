"""Drawing result files: `python -m benchmarks.plot FILE.json... -o FIGURE`. Needs matplotlib."""

import argparse
import json
from pathlib import Path
from typing import Any


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Tokens per second over context, a panel for each result."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(results), figsize=(5.5 * len(results), 4), squeeze=False, layout="constrained"
    )
    for axis, result in zip(axes[0], results, strict=True):
        contexts = [entry["context"] for entry in result["contexts"]]
        for name in result["settings"]["systems"]:
            speeds = {
                context["context"]: context["systems"][name]["tokens_per_second"]
                for context in result["contexts"]
                if "absent" not in context["systems"].get(name, {"absent": True})
            }
            if speeds:
                dashed = "--" if name.startswith("transformers") else "-"
                axis.plot(*zip(*speeds.items(), strict=True), dashed, marker="o", label=name)
        settings = result["settings"]
        axis.set_title(f"{settings['shape']}, batch {settings['batch']}, {settings['dtype']}")
        axis.set_xscale("log", base=2)
        axis.set_xticks(contexts, [f"{n:,}" for n in contexts])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("context, tokens")
        axis.set_ylabel("tokens per second")
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw result files of benchmarks.decode.")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    draw([json.loads(file.read_text()) for file in options.files], options.output)


if __name__ == "__main__":
    main()
