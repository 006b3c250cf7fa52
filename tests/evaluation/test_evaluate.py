"""The evaluate command line: its measurements and files, and how it refuses bad input."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime import engine, random_model
from tiny import ROOT, only, refuses

from infinigen_jax import evaluate, generate
from infinigen_jax.cli.options import options_without_effect, unused_options
from infinigen_jax.engine import memory_plan as planning
from infinigen_jax.evaluation import perplexity
from infinigen_jax.evaluation.report import labels, name_columns
from infinigen_jax.evaluation.session import Configuration, Measurement, Session, configurations
from infinigen_jax.evaluation.texts import load_windows
from infinigen_jax.policies import Full, InfiniGen, InfiniGenPaper, Quest, Window

pytestmark = pytest.mark.usefixtures("shallow")

PROSE = "The old man went down to the sea, and nobody asked him where he had been. " * 12
KINDS: dict[type, str] = {
    str: "policy",
    bool: "reference",
    dict: "settings",
    list: "chunks window_nats",
    int: "tokens host_cache_bytes device_index_bytes hot_set_bytes",
    float: "nats_per_token standard_error perplexity difference_nats difference_standard_error "
    "perplexity_change_percent divergence_nats divergence_standard_error same_best_fraction "
    "selected_fraction fetched_fraction attended_fraction hot_set_hit_rate "
    "host_to_device_bytes_per_token seconds",
}
SIZES = "--window 320 --context 288 --windows 3 --batch 2 --dense-layers 2".split()


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(PROSE)
    return path


@pytest.fixture
def refused(refused, text):
    """Return `refused(*arguments)`, which checks that `perplexity` fails and returns its line."""

    def call(*arguments: str | Path) -> str:
        line = refused(evaluate.main, "perplexity", "--text", text, "--quiet", *arguments)
        assert only(text.parent, "model") == ["text.txt"]
        return line

    return call


def test_table_and_record(tmp_path, text, command):
    result = tmp_path / "result.json"
    text.write_text(PROSE * 8)
    arguments = ["--text", text, "--json", result, *SIZES, "--chunk", "20", "--alpha", "inf"]
    arguments += ["--policy", "full", "infinigen", "--budget", "0.1", "--weight-dtype", "int8"]
    status, out, err = command(evaluate.main, "perplexity", *arguments)
    assert status == 0, err
    assert "2/2 infinigen 0.1" in err and "96/96" in err and "arning" not in err
    lines = [[c.strip() for c in line.split("|")][1:-1] for line in out.splitlines()]
    assert lines[0][:5] == ["policy", "budget", "selected", "fetched", "perplexity"]
    assert [line[:2] for line in lines[2:]] == [["full", ""], ["infinigen", "0.1"]]

    def never(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    record = json.loads(result.read_text(), parse_constant=never)
    assert record["text"]["file"] == "text.txt" and record["text"]["prefix_tokens"] == 1
    assert record["model"]["weight_dtype"] == "int8"
    assert record["model"]["name"] == "books-llama" and record["versions"]["jax"]
    sizes = dict(window=320, context=288, windows=3, batch=2, chunk=20)
    assert record["settings"] == sizes | {"likeliest": 128}
    # No path of this machine is recorded.
    assert str(tmp_path) not in result.read_text() and str(ROOT) not in result.read_text()
    full, sparse = record["configurations"]
    every = {name for names in KINDS.values() for name in names.split()}
    for line, missing in ((full, {type(None)}), (sparse, set())):
        assert set(line) == every and line["tokens"] == 3 * 32
        for kind, names in KINDS.items():
            assert {type(line[name]) for name in names.split()} - missing == {kind}, names
        assert [chunk["to"] for chunk in line["chunks"]] == [308, 320]
        assert np.mean(line["window_nats"]) == pytest.approx(line["nats_per_token"], abs=1e-6)
    assert full["reference"] and full["difference_nats"] is None
    assert full["fetched_fraction"] == full["attended_fraction"] == 1.0
    assert full["device_index_bytes"] == 0
    assert float(lines[3][4]) == pytest.approx(sparse["perplexity"], abs=1e-4)
    assert sparse["settings"]["budget"] == 0.1 and sparse["settings"]["alpha"] == "inf"
    assert 0 < sparse["fetched_fraction"] <= 0.1
    difference = sparse["nats_per_token"] - full["nats_per_token"]
    assert sparse["difference_nats"] == pytest.approx(difference)
    assert 0 < sparse["divergence_nats"] < 0.1 and 0.8 < sparse["same_best_fraction"] <= 1
    assert only(tmp_path, "text.txt") == ["result.json"]


def options_of(*arguments: str) -> argparse.Namespace:
    return evaluate.build_parser().parse_args(["perplexity", "--text", "t", *arguments])


def parsed(*arguments: str, reference: bool = True) -> list[Configuration]:
    return configurations(options_of(*arguments), reference=reference)


def test_lists_are_combined():
    asked = ("--policy", "infinigen", "full", "full", "--budget", "0.05", "0.1")
    chosen = parsed(*asked, "--rows", "auto", "int8", "--alpha", "3")
    labels = [configuration.label for configuration in chosen]
    assert labels == [
        "full auto",
        "infinigen 0.05 alpha 3.0 auto",
        "infinigen 0.05 alpha 3.0 int8",
        "infinigen 0.1 alpha 3.0 auto",
        "infinigen 0.1 alpha 3.0 int8",
        "full int8",  # a budget makes no difference to it
    ]
    assert chosen[1].policy == InfiniGen(budget=0.05, alpha=3.0)
    assert len(parsed("--policy", "infinigen", "infinigen-paper")) == 3


def test_settings_behind_a_policy():
    asked = ("--policy", "window", "window:window=8", "quest:page=4,sinks=0,budget=0.2")
    chosen = [c.policy for c in parsed(*asked, "--budget", "0.05", reference=False)]
    assert chosen == [
        Window(budget=0.05),
        Window(budget=0.05, window=8),
        Quest(budget=0.2, page=4, sinks=0),
    ]
    (paper,) = parsed("--policy", "infinigen-paper:tail=true,alpha=inf", reference=False)
    assert paper.policy == InfiniGenPaper(tail=True, alpha=math.inf)
    for text, message in {
        "quest:page=x": "'x' is not a whole number",
        "infinigen:tail=yes": "'yes' is not true or false",
        "infinigen:alpha": "'' is not a number",
        "infinigen:count=most": "policy infinigen:count=most: count most: use head or mean",
        "window:window=0": "window 0: it must be at least 1",
    }.items():
        refuses(message, parsed, "--policy", text)
    assert parsed("--policy", "quest:")


def test_what_tells_lines_apart():
    def line(policy: str, **settings):
        return {"policy": policy, "settings": {"dense_layers": 2} | settings}

    a = [
        line("full", rows="exact"),
        line("infinigen", budget=0.05, count="head", tail=True, index_dtype="int4", rows="exact"),
        line("infinigen", budget=0.1, count="mean", tail=False, index_dtype="int4", rows="exact"),
        line("window", budget=0.1, rows="exact"),
    ]
    assert name_columns(a)[0] == ["policy", "budget", "count", "tail"]
    assert labels(a) == ["full", "infinigen 0.05 head yes", "infinigen 0.1 mean no", "window 0.1"]
    # A preset's name implies its differences.
    b = [line("infinigen", budget=0.1, alpha=4.0), line("infinigen-paper", budget=0.1, alpha=5.0)]
    assert name_columns(b)[0] == ["policy", "budget"]
    c = [line("infinigen", budget=0.1, alpha=alpha) for alpha in (4.0, "inf")]
    assert name_columns(c)[1] == [["infinigen", "0.1", "4"], ["infinigen", "0.1", "inf"]]
    # Lines of different policies with different numbers of dense layers.
    d = [line("quest", budget=0.1), line("infinigen", budget=0.1, dense_layers=0)]
    head, cells = name_columns(d)
    assert head == ["policy", "budget", "dense"]
    assert cells == [["quest", "0.1", "2"], ["infinigen", "0.1", "0"]]
    assert labels(d) == ["quest 0.1", "infinigen 0.1"]


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        (["window"], ["--alpha: no effect with --policy window"]),
        (["full", "quest:page=8"], ["--alpha: no effect with --policy full quest:page=8"]),
        (["infinigen-paper", "window"], []),
        (["infinigen:alpha=4"], ["--alpha: no effect with --policy infinigen:alpha=4"]),
    ],
)
def test_options_that_no_policy_has_are_said(policies, said):
    given = ["--text", "t", "--alpha", "3", "--budget", "0.2", "--policy", *policies]
    lines: list[str] = []
    Session(evaluate.build_parser().parse_args(["perplexity", *given]), lines.append)
    assert lines == said
    if len(policies) == 1:
        arguments = generate.build_parser().parse_args(["--alpha", "3", "--policy", *policies])
        assert unused_options(arguments) == said


def test_options_of_draws_have_no_effect_on_greedy_tokens():
    parse = generate.build_parser().parse_args
    said = ["--top-k: no effect without --temperature", "--seed: no effect without --temperature"]
    assert unused_options(parse(["--top-k", "5", "--seed", "0"])) == said
    assert unused_options(parse(["--top-k", "5", "--temperature", "0.7"])) == []
    assert unused_options(parse(["--presence-penalty", "1"])) == []


def test_what_comes_to_the_same_is_measured_once_and_options_without_effect_are_said():
    """The engine chooses by the own query, which is guessed from nothing."""
    given = ("--alpha", "3", "5", "--budget", "0.3")
    policies = (
        *("infinigen:count=mean", "infinigen:count=mean,speculate_from=resident"),
        *("infinigen:tail=false,tail_tokens=16", "window"),
    )
    given += ("--prefill-chunk", "64", "--pool-tokens", "all", "20", "--quiet")
    said: list[str] = []
    session = Session(options_of(*given, "--policy", *policies), said.append)
    measured = session.measure(random_model("gqa"), lambda *_: Measurement({}, {}), 1, "x")
    lines = [line.values["settings"] for line in measured]
    assert [(s.get("count"), s.get("alpha"), s["pool"]) for s in lines] == [
        (None, None, "all"),
        *(("mean", a, pool) for a in (3.0, 5.0) for pool in ("all", "20 counter")),
        *(("head", a, pool) for a in (3.0, 5.0) for pool in ("all", "20 counter")),
        *((None, None, pool) for pool in ("all", "20 counter")),
    ]
    assert all(s.get("tail_tokens") in (0, 64, None) for s in lines)
    other = {line.split(": ", 1)[1] for line in said if "the same as" not in line}
    for option in (
        *("--prefill-chunk 64", f"--policy {policies[1]}: speculate_from"),
        f"--policy {policies[2]}: tail_tokens",
    ):
        assert any(line.startswith(f"{option}: ") for line in other), option
    equal = sum("equal to an earlier line" in line for line in said)
    assert equal == len(session.chosen) - len(lines)


def test_a_hot_set_without_selections_is_said():
    arguments = generate.build_parser().parse_args(["--policy", "full", "--hot-set", "2"])
    lines = options_without_effect(arguments, engine("one", Full(), hot_set=2.0))
    assert lines == ["--hot-set 2: no effect, as no layer selects rows"]


def test_all_orders_of_a_streamed_pool_are_one():
    asked = ("--pool-tokens", "50%", "--pool-eviction", "counter", "lru", "fifo")
    chosen = parsed(*asked, "--policy", "full", "infinigen")
    labels = [configuration.label for configuration in chosen]
    assert labels[:2] == ["full auto", "full 50% fifo auto"] and len(labels) == 5


def test_what_was_measured_before_is_still_compared_with(tmp_path):
    """A resumed run takes the full cache's predictions from its parts."""
    few = [f"window:window=4,sinks=2,budget={budget}" for budget in (0.1, 0.2)]
    given = ["--dense-layers", "0", "--policy", "full", *few]
    arguments = options_of(*given, "--json", str(tmp_path / "result.json"), "--quiet")
    chosen = configurations(arguments, reference=True)
    sizes = {"context": 20, "chunk": 16, "batch": 2, "likeliest": 8}
    windows = np.random.default_rng(3).integers(3, 96, (3, 40)).astype(np.int32)
    said: list[str] = []

    def lines(of: list[Configuration]) -> list[dict[str, Any]]:
        scoring = perplexity.Scoring(windows, sizes)
        session = Session(arguments, said.append)
        session.chosen = of
        measured = session.measure(random_model("one"), scoring, 40, "x")
        return perplexity.lines_of(measured, scoring)

    first = lines(chosen[:2])
    assert said == []
    second = lines(chosen)
    assert len(said) == 2 and all("measured before" in line for line in said)
    assert second[:2] == first and first[1]["divergence_nats"] > 1e-3
    assert first[1]["same_best_fraction"] < 1
    assert second[2]["divergence_nats"] != first[1]["divergence_nats"]
    alone = lines(configurations(arguments, reference=False)[1:])
    assert alone[0]["perplexity"] == first[1]["perplexity"]
    assert alone[0]["difference_nats"] is alone[0]["divergence_nats"] is None


def test_a_wrong_value_at_the_end_of_a_list_is_told_before_the_work(refused, text):
    assert "--rows int3" in refused("--window", "64", "--rows", "auto", "int3")
    assert "--budget 7" in refused("--window", "64", "--budget", "0.1", "7")
    assert "--alpha -1" in refused("--window", "64", "--alpha", "3", "-1")
    for path in (text.parent / "absent" / "f.json", text.parent, ""):
        assert "--json" in refused("--window", "64", "--json", path)


def test_windows_too_short_to_select_are_mentioned(text):
    asked = f"--text {text} --window 64 --windows 1 --model tiny-llama --no-reference"
    asked += " --policy h2o window:window=8 --budget 0.1 0.2"
    said: list[str] = []
    arguments = evaluate.build_parser().parse_args(["perplexity", *asked.split()])
    load_windows(Session(arguments, said.append))
    (line,) = (each for each in said if "selects nothing" in each)
    assert line.startswith("h2o selects nothing: its sinks and 256 recent tokens cover the whole")


def test_pools_that_cannot_be(refused, command, text):
    said = refused("--window", "64", "--pool-tokens", "20", "--no-reference")
    assert "--pool-tokens" in said and "use at least" in said and "--batch" not in said
    given = ("recall", "--text", text, "--pool-tokens", "50%", "--quiet")
    status, _, err = command(evaluate.main, *given)
    assert status == 2 and err.startswith("error: --pool-tokens: recall")


def test_texts_that_cannot_be(refused, text):
    message = refused("--window", "1000")
    assert "the text has only" in message and "lower it to at most" in message
    text.write_bytes(b"\x80\xff")
    assert "not UTF-8" in refused()
    text.write_bytes(b"")
    assert "empty" in refused()
    text.write_bytes(b"A")
    assert "longer --text" in refused()
    assert "/absent" in refused("--text", "/absent")
    assert "--text" in refused("--text", text.parent)


def test_more_memory_than_there_is(refused, monkeypatch):
    monkeypatch.setattr(planning, "available_host_bytes", lambda: 3 << 10)
    message = refused("--window", "64")
    assert "--batch" in message and "--window 64" in message and "3.0 KiB" in message
