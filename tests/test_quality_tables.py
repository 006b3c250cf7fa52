"""The measurements behind the documentation: their commands, and the tables made of them."""

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import pictures, quality, quality_tables, table_cells
from benchmarks.figures import __main__ as figures
from benchmarks.files import RESULTS
from infinigen_jax import evaluate
from infinigen_jax.evaluation.configurations import configurations


def line(policy: str, change: float, **settings):
    return {
        "policy": policy,
        "reference": False,
        "settings": settings,
        "perplexity_change_percent": change,
        "difference_standard_error": 0.0123,
        "fetched_fraction": 0.0456,
    }


@pytest.mark.parametrize("name", quality.EXPERIMENTS)
def test_commands_are_those_of_the_programs(name, tmp_path):
    experiment = quality.EXPERIMENTS[name]
    command = experiment.command(tmp_path, [tmp_path / "text"], 1024, tmp_path / "a.json")
    assert importlib.util.find_spec(command[0])
    modules = figures.FIGURES if "figures" in command[0] else evaluate.COMMANDS
    parsed = evaluate.build_parser(modules).parse_args(command[1:])
    assert parsed.json == str(tmp_path / "a.json") and configurations(parsed, reference=True)


def test_an_experiment_runs_once_and_for_its_models(tmp_path, monkeypatch, capsys):
    ran = []

    def fake(command, **_):
        ran.append(command[2:])
        Path(command[command.index("--json") + 1]).write_text("{}")
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(quality.subprocess, "run", fake)
    for _ in range(2):
        names = ("perplexity", "perplexity-books-tiny-opt", "retrieval")
        given = ["--text", "t", "--only", *names, "--models", "tiny-opt", "books-llama"]
        assert quality.main([*given, "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "perplexity-books-llama.json",
        "perplexity-books-tiny-opt.json",
        "perplexity-tiny-opt.json",
        "retrieval-books-llama.json",
    ]
    assert len(ran) == 4 and "there already" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--only", "nothing"], [], ["--text", "t", "--tasks", "no"]])
def test_what_cannot_be_measured_is_said(given, capsys):
    assert quality.main(given) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_table_has_a_column_for_each_model_and_budget(tmp_path):
    for model, change in (("books-llama", 1.0), ("tiny-opt", 2.0)):
        lines = [
            line("infinigen", change, budget=0.05, query="own", alpha=4.0),
            line("infinigen", -change, budget=0.1, query="own", alpha=4.0),
            line("window", 10 * change, budget=0.1),
        ]
        (tmp_path / f"perplexity-{model}.json").write_text(json.dumps({"configurations": lines}))
    head, _, *rows = quality_tables.perplexity_table(tmp_path).splitlines()
    assert head == "|  | books-llama 5 % | 10 % | tiny-opt 5 % | 10 % |"
    assert rows == [
        "| **infinigen**, own query (CPU) | +1.00 (1.23) | -1.00 (1.23) "
        "| +2.00 (1.23) | -2.00 (1.23) |",
        "| window |  | +10.00 (1.23) |  | +20.00 (1.23) |",
        "| *fetched by infinigen, own query* | *4.6 %* | *4.6 %* | *4.6 %* | *4.6 %* |",
    ]


def test_two_lines_that_are_meant_are_refused():
    lines = [line("window", 1.0, rows=rows) for rows in ("exact", "int8")]
    assert table_cells.find(lines, "window", {"rows": "int8"}) is lines[1]
    assert table_cells.find(lines, "quest", {}) is None
    with pytest.raises(ValueError, match="2 lines"):
        table_cells.find(lines, "window", {})


def table_rows(name: str) -> list[list[str]]:
    """The cells of a table that the results make, without its head."""
    lines = quality_tables.TABLES[name](RESULTS).splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_pictures_are_of_the_results(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    assert pictures.main([]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "recall-tiny-llama.svg",
        "steps.svg",
    ]
    shown = table_rows("steps divergence")
    for column, points in enumerate(pictures.step_points(RESULTS).values()):
        values = [f"{value:.2f}" for value, _ in points]
        assert values == [row[1 + 2 * column].split()[0] for row in shown]  # each at 5 and 10 %


def test_the_documentation_has_the_tables_of_the_results():
    for path in quality_tables.DOCS.glob("*.md"):
        text = path.read_text()
        assert quality_tables.with_tables(text, RESULTS) == text, "benchmarks.quality --tables"
    text = (quality_tables.DOCS / "quality.md").read_text()
    assert "<!-- table: perplexity -->\n| " in text
