"""The benchmark of perplexity with small weights, on a shallow model."""

import json

import pytest

from benchmarks import small_weights
from infinigen_jax.settings.engine import WEIGHT_DTYPES

pytestmark = [pytest.mark.usefixtures("shallow"), pytest.mark.bench]


def test_weights_are_compared_with_those_in_float32(tmp_path, capsys):
    text, result = tmp_path / "text.txt", tmp_path / "result.json"
    text.write_text("The rain fell in torrents on the old town, and nobody was in the street. " * 9)
    arguments = ("--text", text, "--window", "32", "--windows", "2", "--json", result)
    assert small_weights.main([str(x) for x in arguments]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4
    record = json.loads(result.read_text())
    full, *small = record["configurations"]
    assert full["weights"] == "float32" and full["reference"] and full["difference_nats"] is None
    assert [line["weights"] for line in small] == list(WEIGHT_DTYPES)
    assert record["settings"]["context"] == 16 and record["model"]["weight_dtype"] == "float32"
    sizes = [line["weight_bytes"] for line in record["configurations"]]
    assert sizes == sorted(sizes, reverse=True)
    assert abs(small[0]["divergence_nats"]) < 1e-6 < small[1]["divergence_nats"] < 1e-2
    assert small[1]["divergence_nats"] < small[2]["divergence_nats"]
