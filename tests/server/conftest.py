"""One server for all tests of this folder that do not change it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Running, Served


@pytest.fixture(scope="session")
def served(shallow_folder: Path) -> Iterator[Served]:
    with contextlib.ExitStack() as stack:
        # Undone when the model is loaded: other tests of this process need the whole models.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("infinigen_jax.loading.load.EMBEDDED_FOLDER", shallow_folder)
            server = stack.enter_context(Running())
        yield server


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> None:
    """Forget none between these modules: a server compiles its programs before it is ready."""
