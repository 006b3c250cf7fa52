"""One server for all tests of this folder that do not change it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Running, Served


@pytest.fixture(scope="package")
def shallow(shallow_folder: Path) -> Iterator[None]:
    """Replace the embedded models by shallow ones as long as the server runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infinigen_jax.loading.load.EMBEDDED_FOLDER", shallow_folder)
        yield


@pytest.fixture(scope="package")
def served(shallow: None) -> Iterator[Served]:
    with Running() as server:
        yield server
