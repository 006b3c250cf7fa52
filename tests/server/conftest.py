"""One server for all tests of this folder that do not change it."""

import concurrent.futures
import contextlib
from collections.abc import Iterator

import pytest
from serving import LONG, PROMPT, Served, serving
from tiny import make_shallow

from infinigen_jax.loading.load import EMBEDDED_FOLDER


def late_compilations(server: Served) -> int:
    """Return the compilations of requests of every kind, alone and together."""
    penalised = {"temperature": 0.9, "presence_penalty": 0.5, "logprobs": 2}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for settings in ({}, {"temperature": 1}, penalised):
            server.complete(PROMPT, **settings)
            answers = [pool.submit(server.complete, LONG, **settings) for _ in range(4)]
            server.complete(PROMPT, **settings, max_tokens=60)
            assert all(answer.result() for answer in answers)
    list(server.complete(PROMPT, stream=True, extra_body={"heat_map": True}))
    server.chat(max_tokens=5, response_format=shape)
    return server.scheduler.late_compilations


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, int]]:
    """Yield the server, and its compilations after the warm-up."""
    folder = tmp_path_factory.mktemp("served")
    # A layer, whose rows are on the host.
    make_shallow(EMBEDDED_FOLDER / "tiny-llama", folder / "tiny-llama", layers=1)
    with contextlib.ExitStack() as stack:
        # Undone when the model is loaded: other tests of this process need the whole models.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("infinigen_jax.loading.load.EMBEDDED_FOLDER", folder)
            server = stack.enter_context(serving())
        # Before other tests compile a program that the warm-up may lack; none is read from disk.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("infinigen_jax.programs.program.program_folder", lambda: None)
            # The tables of schemas are made before the server is ready, too.
            patch.setattr("infinigen_jax.server.prompts.LLTokenizer", None)
            late = late_compilations(server)
        yield server, late


@pytest.fixture(scope="session")
def served(running: tuple[Served, int]) -> Served:
    return running[0]


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> None:
    """Forget none between these modules: a server compiles its programs before it is ready."""
