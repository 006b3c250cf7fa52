"""The rooms of the package: each imports only those below it, and imports have no cycle."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

import infinigen_jax

PACKAGE = Path(infinigen_jax.__file__).parent
# From the lowest to the highest; a name with a dot is a module at the root.
ROOMS = (
    *(".errors", ".messages", ".numeric", "settings", ".sampling"),
    *("ops", "files", "machine", "programs"),
    *("models", "selection", "cuda", "skew", "cache", "speculation", "transfer", ".check_kernels"),
    *("policies", "checkpoint", "text", "decode", "prefill", "convert", "loading", "engine"),
    *("server", "cli", "evaluation", "planner", ".evaluate", ".generate", ".plan", ".serve"),
)
MOST_AT_ROOT = 12
MOST_FLOORS = 12


def modules() -> dict[str, Path]:
    files = (f for f in PACKAGE.rglob("*.py") if "embedded" not in f.parts)
    names = {".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts): f for f in files}
    return {name.removesuffix(".__init__"): f for name, f in names.items()}


class Imports(ast.NodeVisitor):
    """Modules of the package that a module imports, except for type checkers."""

    def __init__(self, known: set[str]):
        self.known, self.names = known, set[str]()

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.names |= {alias.name for alias in node.names} & self.known

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        inner = {f"{node.module}.{alias.name}" for alias in node.names} & self.known
        self.names |= inner or {node.module or ""} & self.known


@functools.cache
def graph() -> dict[str, set[str]]:
    found = {}
    for name, file in modules().items():
        visitor = Imports(set(modules()))
        visitor.visit(tree(file))
        found[name] = visitor.names - {name}
    return found


def room(module: str) -> str:
    """Return the room of a module, or its own name with a dot at the root."""
    _, _, inside = module.partition(".")
    first = inside.partition(".")[0]
    return first if (PACKAGE / first).is_dir() else f".{first}"


@functools.cache
def imports_of_rooms() -> dict[str, frozenset[str]]:
    """Return the rooms, and modules at the root, that each of them imports."""
    found: dict[str, frozenset[str]] = {}
    for module, imported in graph().items():
        others = {room(other) for other in imported - {"infinigen_jax"}} - {room(module)}
        found[room(module)] = found.get(room(module), frozenset()) | others
    return found


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def test_every_room_has_its_place():
    rooms = {room(name) for name in graph() if name != "infinigen_jax"}
    assert rooms == set(ROOMS)
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_AT_ROOT


@pytest.mark.parametrize("name", [name for name in ROOMS if not name.startswith(".")])
def test_a_room_states_what_it_imports_and_where_to_start(name):
    """Without the imports of what it names."""

    @functools.cache
    def all_of(name: str) -> frozenset[str]:
        direct = imports_of_rooms()[name]
        return direct.union(*map(all_of, direct))

    direct = imports_of_rooms()[name]
    highest = {x.lstrip(".") for x in direct if not any(x in all_of(other) for other in direct)}
    text = " ".join((ast.get_docstring(tree(PACKAGE / name / "__init__.py")) or "").split())
    stated = re.search(r"\. Imports ([\w, ]+?) and what (?:it imports|they import)[.;]", text)
    assert (set(stated[1].split(", ")) if stated else set()) == highest
    assert stated or "Imports nothing of the package." in text
    start = re.search(r" Start reading at (\w+\.py)", text)
    assert start and (PACKAGE / name / start[1]).is_file()


def test_a_room_imports_only_those_below_it():
    floor = {name: number for number, name in enumerate(ROOMS)}
    for module, imported in graph().items():
        if module == "infinigen_jax":
            continue
        for other in imported - {"infinigen_jax"}:
            assert floor[room(other)] <= floor[room(module)], f"{module} imports {other}"


def test_no_module_closes_a_circle():
    graphlib.TopologicalSorter(graph()).prepare()


def test_floors():
    """Rooms on the longest chain of imports."""

    @functools.cache
    def height(name: str) -> int:
        return (not name.startswith(".")) + max(map(height, imports_of_rooms()[name]), default=0)

    assert max(map(height, ROOMS)) <= MOST_FLOORS
