"""A reference model made and measured in limited time: what is run, what is left, what goes on."""

import importlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_reference_models import SMOKE, archive, book

from benchmarks.reference_models import checkpoints, on_gpu
from benchmarks.reference_models.corpus import prepare
from benchmarks.reference_models.on_gpu import Step, perform
from benchmarks.reference_models.recipes import SIZES
from infinigen_jax import evaluate

MODULES = {
    "benchmarks.reference_models.train": "benchmarks.reference_models.train",
    "benchmarks.reference_models.report": "benchmarks.reference_models.report",
    "infinigen_jax.convert": "infinigen_jax.convert.__main__",
    "infinigen_jax.evaluate": "infinigen_jax.evaluate",
}

MADE = ("train", "report", "convert")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    archive(folder / "books_train_0.tar.xz", {f"A/{i}.md": book(i) for i in range(4)})
    archive(folder / "books_val.tar.xz", {"B/8.md": book(8), "B/9.md": book(9)})
    prepare(folder, folder / "data", SMOKE, None)
    return folder / "data"


def options(data: Path, out: Path, *given: str) -> Any:
    return on_gpu.build_parser().parse_args(["--data", str(data), "--out", str(out), *given])


@pytest.mark.parametrize(
    "names", [MADE, pytest.param((*MADE, "perplexity", "recall"), marks=pytest.mark.slow)]
)
def test_a_model_is_trained_and_measured(
    names: tuple[str, ...],
    data: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All in one process, without what needs more positions than this model has."""
    ran = []

    def here(command: tuple[str, ...], *_: Any, **__: Any) -> tuple[int, str]:
        module, *arguments = command
        ran.append(module.rpartition(".")[2])
        status = importlib.import_module(MODULES[module]).main(arguments)
        return status, capsys.readouterr().out

    monkeypatch.setattr(on_gpu, "run_within", here)
    for name in ("PERPLEXITY", "RECALL"):
        monkeypatch.setattr(on_gpu, name, ("--windows", "2", "--budget", "0.05"))
    given = ["--data", str(data), "--out", str(tmp_path), "--size", "smoke", "--tokens", "1024"]
    assert on_gpu.main([*given, "--steps", *names]) == 0
    assert ran == [*MADE, *("evaluate" for _ in names[len(MADE) :])]
    summary = capsys.readouterr().out
    assert [line.split()[1] for line in summary.splitlines() if line[:3] == "## "] == list(names)
    assert "Validation: " in summary
    trained = json.loads((tmp_path / "training" / "loss.json").read_text())
    report = json.loads((tmp_path / "report.json").read_text())
    for name in ("nats_per_token", "characters_per_token"):
        assert report["validation"][name] == pytest.approx(trained["validation"][name], rel=1e-3)
    for name in names[len(MADE) :]:
        measured = json.loads((tmp_path / f"{name}.json").read_text())
        assert measured["settings"]["window"] == SMOKE.context
        assert measured["configurations"][-1]["policy"] == "infinigen"
    assert on_gpu.main([*given, "--steps", *names]) == 0
    assert len(ran) == len(names)  # all is there already


def test_the_held_out_text_is_that_of_the_books(data: Path) -> None:
    text = on_gpu._held_out(data).split()
    assert "<s>" not in text and "</s>" not in text
    assert text == [word for seed in (8, 9) for word in book(seed).split("-------")[1].split()]


@pytest.mark.parametrize("shape", ["llama", "opt"])
def test_commands_of_all_steps_parse(shape: str, data: Path, tmp_path: Path) -> None:
    chosen = on_gpu.steps(options(data, tmp_path, "--shape", shape), tmp_path / "text")
    assert [step.name for step in chosen] == list(on_gpu.NAMES)
    for step in chosen:
        module, *arguments = step.command
        parser = importlib.import_module(MODULES[module]).build_parser()
        parsed = vars(parser.parse_args(arguments))
        if module == evaluate.__name__:
            context = SIZES["gpu"].context
            assert context in (parsed.get("window"), (parsed.get("length") or [None])[0])
        if "json" in parsed:
            assert Path(parsed["json"]) == step.result


def test_a_training_goes_on_with_the_minutes_that_are_left(data: Path, tmp_path: Path) -> None:
    def minutes(*given: str) -> tuple[float, bool]:
        command = on_gpu.steps(options(data, tmp_path, *given), tmp_path / "text")[0].command
        return float(command[command.index("--minutes") + 1]), "--resume" in command

    assert minutes("--train-minutes", "17") == (17, False)
    (tmp_path / "training").mkdir()
    spent = {"clock": {"seconds": 480.0}}
    checkpoints.save(tmp_path / "training" / "checkpoint.npz", {"w": np.zeros(1)}, spent)
    assert minutes("--train-minutes", "17") == (9, True)
    assert minutes("--train-minutes", "8") == (on_gpu.LEAST_TRAINING, True)


def test_steps_end_in_time_and_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {
        "quick": "import sys; print('table'); open(sys.argv[1], 'w')",
        "wrong": "raise SystemExit(3)",
        "stuck": "import time; time.sleep(60)",
        "saving": "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\ntime.sleep(60)",
    }
    for name, text in programs.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log = open(tmp_path / "log.txt", "w")

    def step(name: str, least: float = 0.0, grace: float = 0.0, needs: Path = tmp_path) -> Step:
        result = tmp_path / f"{name}.json"
        return Step(name, (name, str(result)), result, needs, least, grace)

    def status(seconds: float, *chosen: Step) -> set[str]:
        return perform(list(chosen), tmp_path / "summary.md", time.monotonic() + seconds, log)

    with log:
        assert status(60, step("wrong"), step("quick")) == {"status 3", "done"}
        assert status(60, step("quick")) == {on_gpu.THERE}
        assert status(60, step("stuck", least=61)) == {"not started"}
        assert status(60, step("stuck", needs=tmp_path / "none")) == {"not started"}
        assert status(0.5, step("stuck")) == {"out of time"}
        assert status(30, step("saving", grace=28)) == {"interrupted"}
    summary = (tmp_path / "summary.md").read_text()
    assert summary.count("## ") == 4 and summary.count("table") == 1


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((), "--data"),
        (("--minutes", "0"), "--minutes"),
        (("--train-minutes", "-1"), "--train-minutes"),
        (("--tokens", "0"), "--tokens"),
    ],
)
def test_wrong_input_is_one_line(
    given: tuple[str, ...], named: str, tmp_path: Path, capsys: Any
) -> None:
    needed = ["--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]
    assert on_gpu.main([*needed, *given]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
