"""docs/policies.md: its example is added to the package's policies, and its test run."""

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from runtime import slow_except
from tiny import ROOT

from infinigen_jax import generate, policies
from infinigen_jax.policies.base import Policy

pytestmark = pytest.mark.usefixtures("shallow")

PAGE = ROOT / "docs" / "policies.md"
BLOCK = re.compile(r"^```python\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTSIDE, WATCH = "my_policy.py", "watch.py"
POLICY, TEST = "infinigen_jax/policies/key_norm.py", "tests/test_key_norm.py"
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
        spec = importlib.util.spec_from_file_location("test_key_norm", folder / "test_key_norm.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    del sys.modules["infinigen_jax.policies.key_norm"]
    delattr(policies, "key_norm")


def test_the_page_lists_every_policy():
    """The policies that the package exports by name."""
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", PAGE.read_text(), re.MULTILINE)
    found = policies._found()
    exported = {name for name, kind in found.items() if kind.__name__ in policies.__all__}
    assert exported <= set(rows) <= set(found) and len(rows) == len(set(rows))


def test_the_page_tells_every_flag():
    flags = re.findall(r"^ - (`\w+`.*?):", PAGE.read_text(), re.MULTILINE)
    told = {name for flag in flags for name in re.findall(r"`(\w+)`", flag)}
    public = {name for name in vars(Policy) if not name.startswith("_")}
    assert told == {name for name in public if not inspect.isfunction(getattr(Policy, name))}


def test_it_is_one_file_and_one_test():
    assert list(BLOCKS) == [OUTSIDE, WATCH, POLICY, TEST] and len(TESTS) == 4


def test_selections_are_watched():
    names: dict[str, Any] = {}
    exec(BLOCKS[WATCH], names)
    requests = [record for record in names["records"] if record is not None]
    assert requests and all(count.min() > 0 for _, count in requests)


def test_a_file_outside_the_package(tmp_path, monkeypatch, command):
    (tmp_path / OUTSIDE).write_text(BLOCKS[OUTSIDE])
    monkeypatch.syspath_prepend(str(tmp_path))
    prompt = "The old man and the sea " * 9
    asked = ("--prompt", prompt, "--max-new-tokens", "2", "--ignore-eos", "--policy")
    status, _, err = command(generate.main, *asked, "my_policy:MyPolicy:stride=8")
    assert status == 0 and "my-policy" in err and "fetched 0.0 %" not in err


@pytest.mark.parametrize("name", slow_except(TESTS, "test_the_shortest_keys_are_taken"))
def test_one_file_adds_a_policy(example, command, name):
    test = getattr(example, name)
    test(**({"command": command} if "command" in inspect.signature(test).parameters else {}))
