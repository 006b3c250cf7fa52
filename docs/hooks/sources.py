"""Bring what the pages link to outside of docs/ into the site: code, results, other pages.

Pages are written for the repository, with links such as ../infinigen_jax/decode/layer.py. On the
site, text files are pages below source/, and all other files are copied there.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
HIGHLIGHTED = {".py": "python", ".cu": "cuda", ".yml": "yaml", ".toml": "toml", "": "make"}


def on_files(files: Files, config: Any) -> Files:
    """Add the files that are linked to, and those that they link to in turn."""
    waiting = [
        (f"docs/{page.src_uri}", page.content_string) for page in files.documentation_pages()
    ]
    waiting += [(name, f"]({name})") for name in PAGES]
    while waiting:
        origin, text = waiting.pop()
        for link in LINK.finditer(text):
            path = repository_path(origin, link[1])
            if path and files.get_file_from_path(place(path)) is None:
                files.append(file := generated(path, config))
                if path.endswith(".md") or (ROOT / path).is_dir():
                    waiting.append((path, file.content_string))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at their place on the site."""
    origin = getattr(page.file, "repository_path", f"docs/{page.file.src_uri}")

    def moved(link: re.Match[str]) -> str:
        path = repository_path(origin, link[1])
        if path is None:
            return link[0]
        target = posixpath.relpath(place(path), posixpath.dirname(page.file.src_uri) or ".")
        return f"]({target}{link[2] or ''})"

    return LINK.sub(moved, markdown)


def repository_path(origin: str, link: str) -> str | None:
    """Return a link's target in the repository; None if it is no file or folder of it."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    return None if path.startswith("..") or not (ROOT / path).exists() else path


def place(path: str) -> str:
    """Return the place of a file in the site's sources."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    copied = Path(path).suffix in (".md", ".json", ".svg")
    return PAGES.get(path) or f"source/{path}" + ("" if copied else ".md")


def generated(path: str, config: Any) -> File:
    """Return the site's file for one of the repository."""
    source, name = ROOT / path, posixpath.basename(path)
    if source.is_dir():
        entries = sorted(e.name for e in source.iterdir() if e.is_file())
        shown = "\n".join(f" - [{entry}]({name}/{entry})" for entry in entries)
        file = File.generated(config, place(path), content=f"# {path}\n\n{shown}\n")
    elif place(path).endswith(".md") and not path.endswith(".md"):
        kind, code = HIGHLIGHTED.get(source.suffix, "text"), source.read_text()
        file = File.generated(config, place(path), content=f"# {path}\n\n~~~{kind}\n{code}\n~~~\n")
    else:
        file = File.generated(config, place(path), abs_src_path=str(source))
    file.repository_path = path  # type: ignore[attr-defined]
    return file
