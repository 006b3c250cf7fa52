"""docs/policies.md: its example is added to a copy of the package, and its test run there."""

import os
import re
import subprocess
import sys

from tiny import ROOT

from infinigen_jax.policies import POLICIES

PAGE = ROOT / "docs" / "policies.md"
BLOCK = re.compile(r"^```python\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_one_file_and_one_test_add_a_policy(tmp_path):
    blocks = dict(BLOCK.findall(PAGE.read_text()))
    assert list(blocks) == ["infinigen_jax/policies/key_norm.py", "tests/test_key_norm.py"]
    # The package as it is, file by file: only the folder of the policies gets a file more.
    for file in (ROOT / "infinigen_jax").iterdir():
        copy = tmp_path / "infinigen_jax" / file.name
        copy.parent.mkdir(exist_ok=True)
        if file.name != "policies":
            copy.symlink_to(file)
    for folder, names in {
        "infinigen_jax/policies": "*.py",
        "tests": "[crt]*.py",  # conftest, runtime, tiny
        ".": "pyproject.toml",
    }.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        for file in (ROOT / folder).glob(names):
            if not file.name.startswith("test_"):
                (tmp_path / folder / file.name).write_text(file.read_text())
    for name, code in blocks.items():
        (tmp_path / name).write_text(code)
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *sorted(blocks)[1:]],
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "4 passed" in process.stdout


def test_the_page_lists_every_policy():
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(POLICIES)
