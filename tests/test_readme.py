"""README's commands are commands: every option that they use exists, and takes what is given."""

import importlib
import re
import shlex

import pytest
from tiny import ROOT

SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PARSERS = {
    "infinigen_jax.generate": "infinigen_jax.generate",
    "infinigen_jax.evaluate": "infinigen_jax.evaluate",
    "infinigen_jax.plan": "infinigen_jax.plan",
    "infinigen_jax.convert": "infinigen_jax.convert.__main__",
}


def commands() -> list[str]:
    blocks = SHELL.findall((ROOT / "README.md").read_text())
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("python -m ")]


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_readme(line):
    module, *arguments = shlex.split(line, comments=True)[2:]
    parser = importlib.import_module(PARSERS[module]).build_parser()
    assert parser.parse_args(arguments)


def test_every_program_has_one():
    assert {shlex.split(line)[2] for line in commands()} == set(PARSERS)
