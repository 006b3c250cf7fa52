"""Details of the code that XLA and the driver receive."""

import pytest

from infinigen_jax.cuda.launch import readable

CODE = "// Compiled by NVRTC\n.version 9.1\n.target sm_90\n// .version 9.1\n"


@pytest.mark.parametrize(
    "driver, version",
    [
        (12000, "8.0"),
        (12050, "8.5"),
        (12060, "8.5"),
        (12090, "8.8"),
        (13000, "9.0"),
        (13010, "9.1"),
        (14000, "9.1"),
    ],
)
def test_the_version_of_ptx_is_one_that_the_driver_reads(driver: int, version: str):
    assert readable(CODE, driver) == CODE.replace(".version 9.1", f".version {version}", 1)
