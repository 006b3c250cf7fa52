"""Commands and links of README and docs; the policies of docs/policies.md, and its test."""

import argparse
import importlib
import importlib.util
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from runtime import slow_except
from tiny import ROOT

from infinigen_jax import generate, policies
from infinigen_jax.policies.base import Policy

pytestmark = pytest.mark.usefixtures("shallow")

SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Where a program's `build_parser` is, if not in its module.
PARSERS = {"infinigen_jax.convert": ".__main__"}
PROGRAMS = {f"infinigen_jax.{x}" for x in ("generate", "evaluate", "plan", "convert", "serve")}


PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("benchmarks/*/*.md")),
]


def commands() -> list[str]:
    blocks = [block for page in PAGES for block in SHELL.findall(page.read_text())]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    lines = [re.sub("^infinigen-", "python -m infinigen_jax.", line) for line in lines]
    return [line for line in lines if line.startswith(("python -m infinigen_jax.", "python -m b"))]


def parser_of(program: str) -> argparse.ArgumentParser:
    place = PARSERS.get(program, program)
    return importlib.import_module(place, program).build_parser()


@pytest.mark.parametrize("line", commands())
def test_a_command_parses(line):
    module, *arguments = shlex.split(line, comments=True)[2:]
    assert parser_of(module).parse_args(arguments)


def test_every_program_has_one():
    assert PROGRAMS <= {shlex.split(line)[2] for line in commands()}


LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Names of a page's headings in links, as on GitHub."""
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


PAGE = ROOT / "docs" / "policies.md"
BLOCK = re.compile(r"^```python\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTSIDE, WATCH, WHOLE = "my_policy.py", "watch.py", "whole.py"
POLICY, TEST = "infinigen_jax/policies/key_norm.py", "tests/policies/test_key_norm.py"
BLOCKS = dict(BLOCK.findall(PAGE.read_text()))
TESTS = re.findall(r"^def (test_\w+)", BLOCKS[TEST], re.MULTILINE)


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Iterator[ModuleType]:
    """Yield the page's test, while its policy is one more file of the policies."""
    folder: Path = tmp_path_factory.mktemp("page")
    for name in (POLICY, TEST):
        (folder / Path(name).name).write_text(BLOCKS[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "__path__", [*policies.__path__, str(folder)])
        for name, kind in policies._found().items():
            patch.setitem(policies.POLICIES, name, kind)
        place = folder / "test_key_norm.py"
        spec: Any = importlib.util.spec_from_file_location("test_key_norm", place)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    del sys.modules["infinigen_jax.policies.key_norm"]
    delattr(policies, "key_norm")


def test_the_page_lists_every_policy():
    """The policies that the package exports by name."""
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", PAGE.read_text(), re.MULTILINE)
    found = policies._found()
    exported = {name for name, kind in found.items() if kind.__name__ in vars(policies)}
    assert exported <= set(rows) <= set(found) and len(rows) == len(set(rows))


def test_the_page_tells_every_flag():
    flags = re.findall(r"^ - (`\w+`.*?):", PAGE.read_text(), re.MULTILINE)
    told = {name for flag in flags for name in re.findall(r"`(\w+)`", flag)}
    public = {name for name in vars(Policy) if not name.startswith("_")}
    assert told == {name for name in public if not inspect.isfunction(getattr(Policy, name))}


def test_it_is_one_file_and_one_test():
    assert list(BLOCKS) == [OUTSIDE, WATCH, WHOLE, POLICY, TEST] and len(TESTS) == 4


def test_selections_are_watched():
    names: dict[str, Any] = {}
    exec(BLOCKS[WATCH], names)
    requests = [record for record in names["records"] if record is not None]
    assert requests and all(count.min() > 0 for _, count in requests)


def test_a_pass_without_a_cache_has_gradients():
    names: dict[str, Any] = {}
    exec(BLOCKS[WHOLE], names)
    tokens = jnp.array([[5, 6, 7]])
    gradients = jax.grad(lambda params: names["logits"](params, tokens)[0, -1, 9])
    largest = jax.tree.map(lambda x: jnp.abs(x).max(), gradients(names["model"].params))
    assert all(0 < x < jnp.inf for x in jax.tree.leaves(largest["layers"][0]["qkv"]))


def test_a_file_outside_the_package(tmp_path, monkeypatch, command):
    (tmp_path / OUTSIDE).write_text(BLOCKS[OUTSIDE])
    monkeypatch.syspath_prepend(str(tmp_path))
    prompt = "The old man and the sea " * 60
    asked = ("--prompt", prompt, "--max-new-tokens", "2", "--ignore-eos", "--policy")
    status, _, err = command(generate.main, *asked, "my_policy:MyPolicy:stride=8")
    assert status == 0 and "my-policy" in err and "fetched 0.0 %" not in err


@pytest.mark.parametrize("name", slow_except(TESTS, "test_the_shortest_keys_are_taken"))
def test_one_file_adds_a_policy(example, command, name):
    test = getattr(example, name)
    test(**({"command": command} if "command" in inspect.signature(test).parameters else {}))
