"""Commands in README and docs parse with the options that they use; links lead somewhere."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest
from tiny import ROOT

SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Where a program's `build_parser` is, if not in its module.
PARSERS = {"infinigen_jax.convert": ".__main__", "benchmarks.decode": "benchmarks.presets"}
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
