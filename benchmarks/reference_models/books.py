"""Reader of book archives, `books_train_*.tar.xz` and `books_val.tar.xz`, one Markdown file a book.

A file begins with its title, author and year, then a line of dashes, then the text.
"""

import re
import tarfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from infinigen_jax.errors import InputError

PATTERNS = {"train": "books_train_*.tar.xz", "val": "books_val*.tar.xz"}

_PLAIN = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013", "-"),
        **dict.fromkeys("\u2014\u2015", "--"),
        "\u2026": "...",
        "\u00a0": " ",
        **dict.fromkeys("*_#\\\ufeff", ""),
    }
)
_RULE = re.compile(r"^-{5,}\s*$", re.MULTILINE)
_HEADING = re.compile(r"^#+ +", re.MULTILINE)
_HEADER = 2000  # maximum position of the line of dashes


class Book(NamedTuple):
    """A book's text, ready for tokenisation."""

    name: str
    text: str


def archives(folder: Path, split: str) -> list[Path]:
    """Return the archives of a split ("train" or "val").

    Raises:
        InputError: the folder has none.
    """
    paths = sorted(folder.glob(PATTERNS[split]))
    if not paths:
        raise InputError(f"--books {folder}: holds no {PATTERNS[split]}; give the books' folder")
    return paths


def read_books(paths: list[Path], most: int | None) -> Iterator[Book]:
    """Yield the books of archives in order, each truncated to `most` characters.

    Raises:
        InputError: names the archive if it cannot be read.
    """
    for path in paths:
        try:
            with tarfile.open(path, "r|*") as archive:
                for member in archive:
                    file = archive.extractfile(member) if member.isfile() else None
                    if file is not None and member.name.endswith(".md"):
                        text = plain(file.read().decode("utf-8", "replace"))[:most]
                        if text:
                            yield Book(member.name, text)
        except (OSError, tarfile.TarError, EOFError) as error:
            raise InputError(f"--books {path}: cannot be read ({error}); get it again") from None


def with_broken_lines(text: str, width: int) -> str:
    """Break the lines of a text with one paragraph per line before `width` characters."""
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapper.fill(line) for line in text.split("\n"))


def plain(markdown: str) -> str:
    """Return a book without header, markup and blank line runs, with ASCII quotes and dashes."""
    rule = _RULE.search(markdown, 0, _HEADER)
    text = markdown[rule.end() :] if rule else markdown
    text = _HEADING.sub("", text).translate(_PLAIN)
    lines = [line.rstrip() for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
