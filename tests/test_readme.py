"""README's commands are commands: every option that they use exists, and takes what is given.

Links of all pages lead to files and headings that are there.
"""

import importlib
import re
import shlex
from pathlib import Path

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


LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("benchmarks/*/*.md")),
]


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links, as on GitHub."""
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
