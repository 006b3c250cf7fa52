"""One server for all tests of this folder that do not change it."""

from collections.abc import Iterator

import pytest
from serving import Running, Served


@pytest.fixture(scope="package")
def served(shallow_folder) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infinigen_jax.loading.load.EMBEDDED_FOLDER", shallow_folder)
        with Running() as server:
            yield server
