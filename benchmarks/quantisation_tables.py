"""Tables of what `benchmarks.quantisation` measured, in Markdown."""

from typing import Any

from benchmarks.table_cells import markdown

# How columns of keys are brought to one scale, as in `benchmarks.quantisation`.
SCALES = {
    "as in the package": "**centred, scaled by the root of the deviation** (the package)",
    "groups of the row alone": "groups alone",
    "centred": "centred",
    "centred, whole deviation": "centred, scaled by the whole deviation",
}


def rows_table(result: dict[str, Any]) -> str:
    """Relative error of the attention output, by format and scales of the rows."""
    rows = [
        [
            f"{lines[0]['rows']}, {SCALES[lines[0]['scales']]}",
            *(f"{line['attention_error']:.4f}" for line in lines),
        ]
        for lines in zip(*result["rows"].values(), strict=True)
    ]
    return markdown(["rows", *result["rows"]], rows)


def index_table(result: dict[str, Any]) -> str:
    """Attention mass that an index finds, over that of the best rows."""
    head = ["index", "columns", "bytes", *result["index"]]
    rows = [
        [
            lines[0]["index"],
            f"{100 * lines[0]['ratio']:.0f} %",
            str(lines[0]["bytes"]),
            *(f"{line['attention_mass']:.3f}" for line in lines),
        ]
        for lines in zip(*result["index"].values(), strict=True)
    ]
    return markdown(head, rows)


def speed_table(result: dict[str, Any]) -> str:
    """Time to score one layer, by format and columns of the index."""
    groups = [f"ms, group of {each['group']}" for each in result["speed"]]
    rows = [
        [
            lines[0]["index"],
            str(lines[0]["columns"]),
            f"{lines[0]['bytes'] / 1e6:.1f}",
            *(f"{line['milliseconds']:.2f}" for line in lines),
        ]
        for lines in zip(*(each["times"] for each in result["speed"]), strict=True)
    ]
    return markdown(["index", "columns", "MB", *groups], rows)
