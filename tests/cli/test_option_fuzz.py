"""Random options of four commands: each ends with success, or status 2 and one line."""

import argparse
import io
import itertools
import random
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzzing import rounds
from tiny import add_tokenizer, make_tiny

from infinigen_jax import evaluate, generate, plan
from infinigen_jax.convert import __main__ as convert

HOSTILE = [
    *("", " ", "0", "-0", "-1", "1", "2", "1.5", "1e-300", "1e308", "1e400%", "80%", "-5%", "nan"),
    *("inf", "-inf", "9" * 23, "9" * 5000, "3000000000", "0x10", "1_0", "x", "x" * 100_000),
    *("\udcff", "\x1b[31m", "a\nb", "\u2028", "auto", "all", "true", "%", ":", "=", "١٢"),
    *("/dev/null", "é" * 9),
    *("absent/file", ".", "model", "text", "quest:page=0", "quest:=", "quest:page"),
    *("quest:page=3000000000", "window:window=" + "9" * 23, "h2o:sinks=-1", "infinigen:mass=nan"),
    *("infinigen:tail=maybe", "infinigen:streamed_layers=99999999999", "full:budget=1,,", "{}"),
]  # fmt: skip
SENSIBLE = {
    "policy": [
        *("full", "infinigen", "infinigen-paper", "window", "h2o:window=4"),
        *("quest:page=8,window=4", "infinigen:index_dtype=float32,basis=svd,window=4"),
        *("infinigen:query=plain,count=mean,window=4", "infinigen:speculate_from=resident"),
        "infinigen:query=own,layer_budgets=equal,window=4",
    ],
}
SENSIBLE |= {"budget": ["0.5", "1"], "partial_ratio": ["0.5"], "rows": ["int8", "auto"]}
SENSIBLE |= {"pool_tokens": ["50%", "60", "all"], "pool_eviction": ["lru", "fifo", "counter"]}
SENSIBLE |= {"transfer": ["xla", "auto"], "weights": ["host", "device"], "hot_set": ["2"]}
SENSIBLE |= {"schedule": ["layerwise", "fused"], "dtype": ["float32", "bfloat16"]}
SENSIBLE |= {"speculate_from": ["input", "resident"], "prompt": ["The king"]}
SENSIBLE |= {"temperature": ["0.7"], "top_p": ["0.9"]}
LONG = {"max_position_embeddings": 256}  # than a length of 120
BANDWIDTHS = ("--device-bandwidth", "9", "--copy-bandwidth", "9")
POLICY, WINDOW = ("--policy", "infinigen:window=4"), ("--window", "24", "--windows", "1")
BASE: dict[str, list[str]] = {
    "generate": ["--model", "model", "--max-new-tokens", "2"],
    "convert": ["source", "out", "--calibration", "text"],
    "plan": ["--model", "model", "--context", "64", *BANDWIDTHS, *POLICY],
    "perplexity": ["--model", "model", "--text", "text", *WINDOW, *POLICY],
    "recall": ["--model", "model", "--text", "text", *WINDOW, *POLICY],
    "retrieval": ["--model", "model", "--length", "120", "--items", "1"],
}  # fmt: skip
MAINS: dict[str, Callable[..., int]] = {
    "generate": generate.main,
    "convert": convert.main,
    "plan": plan.main,
} | dict.fromkeys(evaluate.COMMANDS, evaluate.main)


def options_of(name: str) -> list[argparse.Action]:
    """Return a command's options from its parser, so that new ones are included."""
    module: Any = {"generate": generate, "convert": convert, "plan": plan}.get(name, evaluate)
    parser = module.build_parser()
    if module is evaluate:
        (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = commands.choices[name]
    return [a for a in parser._actions if a.option_strings and a.dest != "help"]


def drawn(rng: random.Random, name: str, options: list[argparse.Action]) -> list[str]:
    """Return the arguments of one case: the command's base, and one to four options."""
    arguments = [*([name] if name in evaluate.COMMANDS else []), *BASE[name]]
    for action in rng.sample(options, rng.randint(1, min(4, len(options)))):
        option = rng.choice(action.option_strings)
        if action.nargs == 0:
            arguments.append(option)
            continue
        sensible = [str(choice) for choice in action.choices or SENSIBLE.get(action.dest, [])]
        for _ in range(rng.randint(1, 2) if action.nargs == "+" else 1):
            hostile = not sensible or rng.random() < 0.5
            value = rng.choice(HOSTILE if hostile else sensible)
            arguments.append(f"{option}={value}")
    return arguments


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("options")
    made = make_tiny(root / "source", "llama", num_hidden_layers=2, vocab_size=1024, **LONG)
    add_tokenizer(made.folder)
    (root / "text").write_text("The king said that the ship lay at anchor in the bay. " * 40)
    given = (made.folder, root / "model", "--calibration", root / "text")
    assert convert.main([*map(str, given)]) == 0
    return root


def complaint(
    main: Callable[..., int], arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> str:
    """Return the fault in how a command ends; empty if there is none."""
    assert isinstance(sys.stderr, io.TextIOWrapper)
    sys.stderr.reconfigure(errors="backslashreplace")  # as outside of tests
    try:
        status = main(arguments)
    except Exception as error:
        return "".join(traceback.format_exception(error)[-4:])
    err = capfd.readouterr().err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    if "Traceback" in err or status not in (0, 2) or len(errors) != (status == 2):
        return f"status {status}: {err[-2000:]}"
    if status == 2 and not err.rstrip("\n").splitlines()[-1].startswith("error: "):
        return f"the error is not the last line: {err[-2000:]}"
    return ""


@pytest.mark.slow
def test_random_options(place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    text = (place / "text").read_bytes()
    options = {name: options_of(name) for name in MAINS}
    for name, rng in zip(itertools.cycle(MAINS), rounds(capfd, "options", 120), strict=False):
        arguments = drawn(rng, name, options[name])
        monkeypatch.setattr(sys, "stdin", io.StringIO("Who is the king?\n"))
        problem = complaint(MAINS[name], arguments, capfd)
        assert not problem, f"{name} {' '.join(ascii(a[:80]) for a in arguments)}\n{problem}"
        shutil.rmtree("out", ignore_errors=True)
        (place / "text").write_bytes(text)  # a result may have been written there
