"""The measurements of the documentation: their commands, and the tables and pictures of results."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from test_readme import parser_of

from benchmarks import pictures, quality, quality_tables, real_model, tables
from benchmarks.figures import __main__ as figures
from benchmarks.machine import RESULTS
from infinigen_jax import evaluate
from infinigen_jax.evaluation.session import configurations


def test_commands_are_those_of_the_programs(tmp_path):
    for name, experiment in quality.EXPERIMENTS.items():
        command = experiment.command(tmp_path, tmp_path / "text", 1024, tmp_path / "a.json")
        assert importlib.util.find_spec(command[0]), name
        modules = figures.FIGURES if "figures" in command[0] else evaluate.COMMANDS
        parsed = evaluate.build_parser(modules).parse_args(command[1:])
        assert parsed.json == str(tmp_path / "a.json")
        assert configurations(parsed, reference=True), name


def test_commands_of_the_real_model_are_those_of_the_programs(tmp_path):
    given = ["--model", "m", "--gguf", "g", "--texts", "a", "b", "--out", str(tmp_path)]
    for name, command in real_model.commands(real_model.build_parser().parse_args(given)).items():
        parsed = parser_of(command[0]).parse_args([*command[1:], "--json", "j"])
        if command[0] == "infinigen_jax.evaluate":
            assert configurations(parsed, reference=True), name


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
    assert len(ran) == 4 and "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--only", "nothing"], []])
def test_wrong_input_is_one_line(given, capsys):
    assert quality.main(given) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_entry_is_a_row():
    columns = {"name": ("name", "{}"), "ms": ("times.p50", "{:.1f}")}
    entries = [{"name": "a", "times": {"p50": 1.25}}, {"name": "b", "times": {"p50": 3}}]
    assert tables.entry_table(columns, entries).splitlines()[2:] == ["| a | 1.2 |", "| b | 3.0 |"]


def test_ambiguous_lines_are_refused():
    window: dict[str, Any] = {"policy": "window", "reference": False}
    lines = [window | {"settings": {"rows": rows}} for rows in ("exact", "int8")]
    assert tables.find(lines, "window", {"rows": "int8"}) is lines[1]
    assert tables.find(lines, "quest", {}) is None
    with pytest.raises(ValueError, match="2 lines"):
        tables.find(lines, "window", {})


def test_every_table_has_a_page_and_every_page_its_tables():
    text = {path: path.read_text() for path in quality_tables.DOCS.glob("*.md")}
    for page in text.values():
        made = quality_tables.with_tables(page, RESULTS)
        assert made == page, "python -m benchmarks.quality --tables"
    named = {found[2] for page in text.values() for found in quality_tables.PLACE.finditer(page)}
    assert named == set(quality_tables.TABLES)


def test_results_are_those_that_a_page_quotes():
    """Or that the tables are made of."""
    root = RESULTS.parent.parent
    pages = [root / "README.md", *root.glob("docs/*.md"), *root.glob("benchmarks/*/*.md")]
    text = "\n".join(page.read_text() for page in pages)
    read = {
        f"{spec['result'].format(**spec)}.json"
        for rows, columns, *_ in quality_tables.TABLES.values()
        for _, row in rows
        for _, column in columns
        for spec in [{**column, **row}]
    }
    # The figure of chunks is quoted by its folder.
    files = {str(f.relative_to(RESULTS)) for f in RESULTS.rglob("*") if f.is_file()}
    unquoted = {f for f in files - read if f not in text and not f.startswith("figures/chunks-")}
    assert not unquoted and read <= files


def test_pictures_are_of_the_results(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    assert pictures.main([]) == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["recall-real-model.svg", "steps.svg"]
    shown = quality_tables.table("steps", RESULTS).splitlines()[2:]
    points = pictures.step_points(RESULTS)
    values = [row.split("|")[3].split()[0] for row in shown]
    assert [f"{value:.2f}" for _, value in points] == values
