"""The paper's figures as commands: known answers on a tiny random model, and bad input."""

import importlib.util
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from tiny import add_tokenizer, make_tiny, only

from benchmarks.figures import kv_size, long_context, pool, sensitivity
from benchmarks.figures.__main__ import FIGURES, main
from infinigen_jax import evaluate
from infinigen_jax.cli.options import read_policy
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.selection.select import budget_rows

PROSE = "The old man went down to the sea, and nobody asked him where he had been. " * 10
SMALL = ("--window", "308", "--context", "300", "--batch", "1", "--windows", "1", "--chunk", "4")
SELECTED_INT8 = ("--policy", "h2o", "--rows", "int8")  # the figure leaves this pair out
ITEM = {"query": "It rained", "connector": "because", "choices": ["of the sun.", "no."], "gold": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Three layers, so that one is left where the paper's settings stream two."""
    folder = tmp_path_factory.mktemp("figures")
    sizes = {"vocab_size": 1024, "num_hidden_layers": 3, "max_position_embeddings": 384}
    made = make_tiny(folder / "source", "llama", **sizes)
    return convert(add_tokenizer(made.folder), folder / "model", calibration=list(range(3, 96)))


@pytest.fixture
def figure(command, model, tmp_path):
    """Return `figure(name, ...)`, which makes a figure; its table and its result."""
    text = tmp_path / "text.txt"
    text.write_text(PROSE * 9)

    def call(name: str, *arguments: str, of: tuple[str, ...] = ("--text", str(text))):
        result = tmp_path / "result.json"
        files = ("--json", result, "--plot", tmp_path / "plot.svg", "--quiet")
        status, out, err = command(main, name, "--model", model, *of, *arguments, *files)
        assert (status, err) == (0, "")
        assert only(tmp_path) == ["plot.svg", "result.json", "text.txt"]
        record = json.loads(result.read_text())
        assert record["figure"].startswith("InfiniGen (OSDI 2024), ")
        return out.splitlines(), record

    return call


def test_relative_sizes():
    def line(rows: str, attended: float):
        return {"attended_fraction": attended, "settings": {"rows": rows}}

    assert kv_size.relative_size(line("exact", 0.3), 64) == 0.3
    # A group of 64 columns of K and of V: a byte each and two bfloat16s, to 16 bytes: 136 -> 144.
    assert kv_size.relative_size(line("int8", 1.0), 64) == 144 / 256
    assert kv_size.relative_size(line("int4", 0.5), 64) == 0.5 * 80 / 256


@pytest.mark.slow
def test_kv_size(figure):
    asked = ("--policy", "full", "infinigen:alpha=inf,budget=0.1", "--rows", "auto", "int8")
    table, record = figure("kv-size", *SMALL, *asked, "--dense-layers", "1")
    lines = record["configurations"]
    assert [(x["policy"], x["settings"]["rows"]) for x in lines] == [
        ("full", "exact"),
        ("full", "int8"),
        ("infinigen", "exact"),
    ]
    assert [x["relative_kv_size"] for x in lines][0] == 1 and "KV size" in table[0]
    # A tenth of 299 to 306 tokens, 4 sinks and 255 recent ones.
    assert lines[2]["relative_kv_size"] == pytest.approx(
        sum((n // 10 + 259) / n for n in range(299, 307)) / 8
    )


COPA = """
task: local_copa
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{query}}}} {{{{connector}}}}"
doc_to_choice: choices
doc_to_target: gold
"""


@pytest.mark.filterwarnings("ignore")  # the harness's own
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_accuracy_on_a_local_task_file(figure, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    # Whichever choice a model prefers, it is the wrong one in one of three items.
    golds = (ITEM["gold"], ITEM["gold"], 1 - ITEM["gold"])
    data = folder / "copa.jsonl"
    data.write_text("".join(json.dumps(ITEM | {"gold": gold}) + "\n" for gold in golds))
    (folder / "copa.yaml").write_text(COPA.format(data=data))
    given = ("--tasks", "local_copa", "--include-path", str(folder))
    asked = ("--policy", "window:window=4,sinks=0", "--rows", "auto")
    table, record = figure("kv-size", *asked, of=given)
    assert record["settings"]["tasks"] == ["local_copa"] and "local_copa" in table[0]
    accuracy = record["configurations"][0]["accuracy"]
    assert accuracy in (pytest.approx(1 / 3), pytest.approx(2 / 3))


def test_without_the_harness_tasks_name_the_remedy(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install" in refused(main, "kv-size", "--tasks", "piqa")


@pytest.mark.slow
def test_all_columns_choose_alike_in_any_basis(figure):
    asked = ("--bases", "none", "svd", "--partial-ratio", "0.2", "1.0")
    _, record = figure("skewing", *SMALL, *asked)
    full, *lines = record["configurations"]
    assert full["reference"] and not any(line["reference"] for line in lines)
    assert all(line["perplexity_change_percent"] is not None for line in lines)
    scores = {
        (line["settings"]["basis"], line["settings"]["partial_ratio"]): line["nats_per_token"]
        for line in lines
    }
    assert scores["none", 1.0] == pytest.approx(scores["svd", 1.0], abs=1e-4)
    assert len({round(score, 4) for score in scores.values()}) == 3


@pytest.mark.slow
def test_as_many_tokens_are_kept_at_any_length(figure):
    asked = ("--kept", "16", "--length", "32", "64", "--policy", "infinigen-paper")
    table, record = figure("long-context", *asked, "--dense-layers", "1", "--no-reference")
    lines = record["configurations"]
    assert [line["length"] for line in lines] == [32, 64]
    column = [cell.strip() for cell in table[0].split("|")].index("length")
    assert [row.split("|")[column].strip() for row in table[2:]] == ["32", "64"]
    for line in lines:
        kept = line["attended_fraction"] * line["length"]
        assert 14 <= kept <= 16 * 32 / 28  # a share of what is cached, up to its end
    assert [line["chunks"][0]["from"] for line in lines] == [28, 56]


@pytest.mark.slow
def test_limits_of_the_pool(figure):
    asked = ("--policy", "infinigen:window=4,sinks=2", "--dense-layers", "1")
    limits = ("--pool-tokens", "all", "50%", "--pool-eviction", "fifo", "counter")
    table, record = figure("pool", *SMALL, *asked, *limits)
    full, unlimited, *lines = record["configurations"]
    assert [pool.eviction(line) for line in lines] == ["fifo", "counter"]
    assert [pool.limit(line) for line in lines] == [50, 50]
    assert unlimited["settings"]["pool"] == "all" and unlimited["change_by_pool_percent"] == 0
    for line, row in zip(lines, table[4:], strict=True):
        ratio = line["perplexity"] / unlimited["perplexity"]
        assert line["change_by_pool_percent"] == pytest.approx(100 * (ratio - 1)) != 0
        assert f"{line['change_by_pool_percent']:+.3f} %" in row
        assert line["host_cache_bytes"] < unlimited["host_cache_bytes"]


@pytest.mark.slow
def test_positions(figure):
    table, record = figure("chunks", *SMALL, "--policy", "window", "--budget", "0.1")
    assert [cell.strip() for cell in table[0].split("|")][5:7] == ["to 304", "to 308"]
    change = record["configurations"][1]["chunks"][0]["perplexity_change_percent"]
    assert f"{change:+.2f} %" in table[3]


def test_sweeps_meet_in_a_point():
    options = evaluate.build_parser(FIGURES)
    chosen = options.parse_args(["sensitivity", "--text", "t"]).policy
    ratios = sum(map(len, sensitivity.RATIOS.values()))
    assert len(chosen) == len(set(chosen)) == 2 * (len(sensitivity.ALPHAS) - 1) + ratios
    one = {"policy": "infinigen", "reference": False, "perplexity": 5.0}
    lines = [
        one | {"settings": {"alpha": a, "partial_ratio": r}}
        for a, r in ((4.0, 0.75), (2.0, 0.75), (4.0, 0.5), ("inf", 0.75))
    ]
    over_alpha = sensitivity.sweep(lines, "perplexity", "alpha", sensitivity.ALPHAS)
    assert over_alpha == {"infinigen": [(2.0, 5.0), (4.0, 5.0)]}
    ratios = sensitivity.RATIOS["infinigen"]
    over_ratio = sensitivity.sweep(lines, "perplexity", "partial_ratio", ratios)
    assert over_ratio == {"infinigen": [(0.5, 5.0), (0.75, 5.0)]}


def test_bad_input(refused, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(PROSE * 9)
    for arguments, message in {
        ("kv-size",): "give either --text F",
        ("skewing", "--text", text, "--tasks", "piqa"): "give either --text F",
        ("kv-size", "--text", text, "--no-reference", *SELECTED_INT8): "--rows: smaller rows are",
        ("chunks",): "--text",
        ("pie",): "pie",
        ("long-context", "--text", text, "--window", "48"): "--window: this figure sets it",
        ("long-context", "--text", text, "--policy", "h2o:window=3"): "give its name alone",
        ("long-context", "--text", text, "--kept", "257"): "only 1024 positions",
        ("skewing", "--text", text, "--alpha", "odd"): "--alpha odd",
        ("chunks", "--text", text, "--plot", tmp_path / "p.txt"): "--plot",
    }.items():
        assert message in refused(main, *arguments)
    assert only(tmp_path) == ["text.txt"]


def test_kept_rows_are_split_alike():
    for length in (512, 131072):
        for name in ("infinigen", "infinigen-paper", "h2o", "window"):
            kind, settings = read_policy(long_context.keeping(name, 64, length))
            policy = kind(**settings)
            rows = int(budget_rows(policy.budget, jnp.int32(length)))
            assert policy.sinks + (policy.window - 1) + rows == 64
            assert getattr(policy, "layer_budgets", "equal") == "equal"  # in every layer
