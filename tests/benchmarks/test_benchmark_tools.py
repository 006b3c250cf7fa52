"""The smaller benchmarks at toy sizes: transfer, selection, hot set, and the GPU session."""

import json
import re
import statistics
import subprocess

import numpy as np
import pytest

from benchmarks import (
    decode,
    lossless,
    machine,
    on_gpu,
    prefill,
    small_weights,
    trace,
    transfer,
)
from benchmarks.startup import usage_of
from infinigen_jax.settings.engine import WEIGHT_DTYPES
from infinigen_jax.transfer import Transfer


def test_transfer_needs_a_gpu_and_says_so(capsys):
    if machine.has_gpu():
        pytest.skip("there is one")
    assert transfer.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_prefill_of_a_missing_model_is_one_line(tmp_path, capsys):
    assert prefill.main(["--model", str(tmp_path / "missing")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_transfer_is_measured_alone_and_beside_work(monkeypatch):
    """With the transfer that every backend has; rates mean nothing here."""
    monkeypatch.setattr(transfer, "MOVED_BYTES", 1 << 17)
    monkeypatch.setattr(transfer, "REPEATS", 1)
    host, request, expected = transfer.make_rows(144, 1 << 20)
    assert expected.shape[3] == 144 and expected.nbytes <= 1 << 17
    slots = np.asarray(request.slots)
    found = np.take_along_axis(np.asarray(host)[0], slots[..., None], axis=2)
    np.testing.assert_array_equal(found, expected)
    work = transfer.random_work((2, 64, 64))
    entry = transfer.measure_one(Transfer(), host, request, expected, work)
    assert entry["bytes"] == 64 * slots.shape[2] * 144
    assert entry["bytes_per_second"] == pytest.approx(entry["bytes"] * 1e3 / entry["transfer_ms"])
    hidden = 1 + (entry["compute_ms"] - entry["both_ms"]) / entry["transfer_ms"]
    assert entry["hidden_share"] == pytest.approx(hidden)


def steps(*events):
    """Operations: line, path, start and end in milliseconds; "copy" as path, or a kernel's name."""
    ops = []
    for line, path, start, end in events:
        name = path if path.startswith("gather") else "fusion"
        known = "" if path in ("copy", "?") or name == path else f"jit(fused)/layer1/{path}/dot"
        ops.append(trace.Op(line, name, known, start * 1e6, end * 1e6, path == "copy"))
    return sorted(ops, key=lambda op: op.start)


CONCURRENT = ("gather_rows", "copy")  # a kernel on a separate stream, or a copy engine


@pytest.mark.parametrize("moves", CONCURRENT)
def test_transfer_beside_computation_is_hidden_until_it_is_waited_for(moves):
    found = trace.account(
        steps(
            ("main", "speculate", 0, 10),
            ("main", "attention", 10, 30),
            ("own", moves, 10, 50),
            ("main", "mlp", 30, 40),
            ("main", "attention", 55, 60),
        ),
        steps=2,
    )
    assert len(set(trace.PARTS)) == len(trace.PARTS)  # columns of a table
    parts = {name: value for name, value in found["parts_ms"].items() if value}
    assert parts == {
        "speculation": 5.0,
        "attention": 12.5,
        "mlp": 5.0,
        "exposed wait": 5.0,
        "idle": 2.5,
    }
    assert found["step_ms"] == 30
    assert found["transfer_ms"] == 20 and found["hidden_share"] == 0.75


def test_transfer_in_line_hides_nothing_and_loops_belong_to_their_parts():
    found = trace.account(
        steps(
            ("main", "select/while", 0, 20),
            ("main", "select/while/body", 5, 10),
            ("main", "fetch", 20, 30),
            ("main", "?", 30, 35),
            ("main", "wait", 35, 40),
        ),
        steps=1,
    )
    parts = found["parts_ms"]
    assert (parts["selection"], parts["transfer"], parts["exposed wait"]) == (20, 15, 5)
    assert found["hidden_share"] == 0 and found["guessed_share"] == 5 / 40


def test_pieces_of_a_gpu_session_end_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "GRACE", 0.5)
    monkeypatch.setattr(on_gpu, "LEAST", 0.0)
    (tmp_path / "quick.py").write_text(
        "import os, sys; print('table', *sys.argv[3:], os.environ.get('INFINIGEN_JAX_KERNELS'))"
    )
    (tmp_path / "stuck.py").write_text("import time; time.sleep(60)")
    (tmp_path / "wrong.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    shares = {"quick": 0.9, "wrong": 0.9, "stuck": 0.1}
    pieces = [on_gpu.Piece(name, share, (name,)) for name, share in shares.items()]
    statuses = on_gpu.run(pieces, tmp_path / "out", 6.0)
    assert statuses == {"quick": "done", "wrong": "status 3", "stuck": "out of time"}
    summary = (tmp_path / "out" / "summary.md").read_text()
    # Without the kernels' check in this path, the pieces do not use them.
    assert re.search(r"table --cap-seconds \d+ 0\n", summary) and summary.count("## ") == 4
    assert summary.startswith("## kernels (")
    assert on_gpu.run(pieces[:1], tmp_path / "late", 0.0) == {"quick": "not started"}


@pytest.mark.bench
def test_prompts_are_timed(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.setattr(machine, "memory_read_bandwidth", lambda: 1e10)
    path = tmp_path / "prefill.json"
    given = "--shape toy --prompts 64 80 --batch 2 --rounds 2 --memory 128 256 --cap-seconds 600"
    assert prefill.main([*given.split(), "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [entry["tokens"] for entry in found["times"]] == [64, 80]
    for entry in found["times"]:
        assert list(entry["tokens_per_second"]) == ["infinigen", "transformers"]
        ratios = [r["transformers"] / r["infinigen"] for r in entry["rounds"]]
        assert len(ratios) == 2
        assert min(ratios) <= entry["over_infinigen"]["transformers"] <= max(ratios)
        seconds = statistics.median(r["infinigen"] for r in entry["rounds"])
        assert entry["tokens_per_second"]["infinigen"] == 2 * entry["tokens"] / seconds
    assert found["logits_relative_difference"] < 1e-4
    short, long = (entry["temporaries"] for entry in found["memory"])
    assert 0 < short <= long
    table = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("| 64 ", "| 80 ")) for line in table) == 2


@pytest.mark.parametrize("piece", on_gpu.PIECES, ids=lambda piece: piece.name)
def test_commands_of_a_gpu_session_parse(piece, tmp_path):
    module, *arguments = piece.command
    parse = {
        "benchmarks.decode": decode.parse,
        "benchmarks.lossless": lossless.build_parser().parse_args,
        "benchmarks.prefill": prefill.build_parser().parse_args,
        "benchmarks.transfer": transfer.build_parser().parse_args,
    }[module]
    options = parse([*arguments, "--json", str(tmp_path / "x.json"), "--cap-seconds", "9"])
    assert options.cap_seconds == 9


@pytest.mark.bench
@pytest.mark.usefixtures("shallow")
def test_small_weights_are_compared_with_those_in_float32(tmp_path, capsys):
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


@pytest.mark.bench
@pytest.mark.usefixtures("shallow")
def test_small_weights_are_timed_in_batches(tmp_path, capsys):
    text, result = tmp_path / "text.txt", tmp_path / "result.json"
    text.write_text("The rain fell in torrents on the old town, and nobody was in the street. " * 9)
    given = ["--text", str(text), "--json", str(result), "--speed", "1", "2"]
    with pytest.raises(SystemExit):
        small_weights.main(given)
    assert "--speed: give --context" in capsys.readouterr().err
    assert small_weights.main([*given, "--context", "16"]) == 0
    record = json.loads(result.read_text())
    assert [each["batch"] for each in record["batches"]] == [1, 2]
    for each in record["batches"]:
        assert list(each["tokens_per_second"]) == ["float32", *WEIGHT_DTYPES]
        assert all(len(seconds) == record["rounds"] for seconds in each["seconds"].values())


def test_the_peak_of_a_process_is_its_own(tmp_path):
    large = np.ones(200_000_000, np.uint8)
    usage = usage_of(["json.tool", "--help"], tmp_path, stdout=subprocess.DEVNULL)
    assert usage["peak_bytes"] < large.nbytes / 2 and usage["wall_seconds"] > 0
    with pytest.raises(SystemExit, match="failed"):
        usage_of(["json.tool", "absent"], tmp_path, stderr=subprocess.DEVNULL)
