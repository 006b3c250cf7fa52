"""The loss curve as a picture, where matplotlib is installed."""

from pathlib import Path
from typing import Any

from benchmarks.files import note


def draw(result: dict[str, Any], path: Path) -> bool:
    """Loss on books, on answers and on held-out books over tokens; whether there is a picture."""
    try:
        import matplotlib
    except ImportError:
        note(f"{path.name} is not drawn: matplotlib is not installed (pip install matplotlib)")
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    lines = {
        "books": ("books, training", result["curve"], "-"),
        "answers": ("answers of retrieval tasks", result["curve"], "-"),
        "val": ("held-out books", result["validations"], "o-"),
    }
    for name, (label, points, style) in lines.items():
        there = [(point["tokens"], point[name]) for point in points if name in point]
        if there:
            axis.plot(*zip(*there, strict=True), style, label=label, linewidth=1, markersize=4)
    axis.set_xlabel("tokens")
    axis.set_ylabel("nats per token")
    axis.set_title(f"{result['shape']}, {result['size']}: {result['parameters']:,} parameters")
    axis.grid(alpha=0.3)
    axis.legend()
    partial = path.with_name("partial-" + path.name)
    figure.savefig(partial)
    plt.close(figure)
    partial.replace(path)
    return True
