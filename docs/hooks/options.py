"""Write options of command lines, and settings of the library, into pages with certain comments.

MARK stands for all commands: the scripts of pyproject.toml, of which each module has a
`build_parser`. SETTINGS stands for the settings of a class.
"""

import argparse
import dataclasses
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = "<!-- options -->"
SETTINGS = re.compile(r"<!-- settings: (\S+)\.(\w+) -->")
ROOT = Path(__file__).resolve().parents[2]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the comments; MkDocs calls this for every page."""
    if MARK in markdown:
        markdown = markdown.replace(MARK, "\n".join(commands()))
    return SETTINGS.sub(lambda found: "\n".join(settings(*found.groups())), markdown)


def settings(module: str, name: str) -> Iterator[str]:
    """Yield the lines of a table of the settings of a class."""
    yield from ("| setting | default | meaning |", "|---|---|---|")
    for field in dataclasses.fields(getattr(importlib.import_module(module), name)):
        if "option" in field.metadata:
            text = field.metadata["option"].help or "see the description of the class"
            yield f"| `{field.name}` | `{field.default!r}` | {text} |"


def commands() -> Iterator[str]:
    """Yield the lines of all commands."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for script, entry in project["scripts"].items():
        module = entry.partition(":")[0]
        yield from section(importlib.import_module(module).build_parser(), f"`{script}`")


def section(parser: argparse.ArgumentParser, title: str, level: int = 2) -> Iterator[str]:
    """Yield the lines of a parser: its options in their groups, then its sub-commands."""
    usage = parser.format_usage().removeprefix("usage: ").split("[")[0].strip()
    yield from ("", f"{'#' * level} {title}", "", parser.description or "", "", f"    {usage} ...")
    inner = []
    for group in parser._action_groups:
        inner += [a for a in group._group_actions if isinstance(a, argparse._SubParsersAction)]
        actions = [a for a in group._group_actions if a not in inner and shown(a)]
        if actions:
            yield from ("", f"**{str(group.title).capitalize()}**", "", group.description or "")
            yield from ("", "| option | meaning |", "|---|---|", *map(row, actions))
    for command in inner:
        for name, sub in command.choices.items():
            yield from section(sub, f"{title} {name}", level + 1)


def shown(action: argparse.Action) -> bool:
    """Return whether an option is in a table."""
    return action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)


def row(action: argparse.Action) -> str:
    """Return the line of an option in the table."""
    formatter = argparse.HelpFormatter(prog="")
    text = formatter._expand_help(action) if action.help else ""
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return f"| `{formatter._format_action_invocation(action)}` | {text} |"
