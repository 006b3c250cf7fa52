"""One server for all tests of this folder that do not change it."""

import concurrent.futures
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from serving import LONG, PROMPT, Served, serving
from shallow import make_shallow

from infinigen_jax.loading.load import EMBEDDED_FOLDER
from infinigen_jax.programs.compilations import compilations


@jax.jit
def probe(x: np.ndarray) -> jax.Array:
    return jax.numpy.add(x, 1)


def programs_forgotten() -> bool:
    """Return whether compiled programs were freed since the last call, by modules in between."""
    before = compilations()
    probe(np.zeros(3, np.float32))
    return compilations() > before


def late_compilations(server: Served) -> int:
    """Return the compilations of requests of every kind, alone and together."""
    penalised = {"temperature": 0.9, "presence_penalty": 0.5, "logprobs": 2}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    chat = {"model": "small", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for settings in ({}, {"temperature": 1}, penalised):
            server.complete(PROMPT, **settings)
            answers = [pool.submit(server.complete, LONG, **settings) for _ in range(4)]
            server.complete(PROMPT, **settings, max_tokens=60)
            assert all(answer.result() for answer in answers)
    list(server.complete(PROMPT, stream=True, extra_body={"heat_map": True}))
    server.client.chat.completions.create(**chat, response_format=shape)
    return server.scheduler.late_compilations


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model: a layer, whose rows are on the host."""
    folder = tmp_path_factory.mktemp("served")
    make_shallow(EMBEDDED_FOLDER / "tiny-llama", folder / "tiny-llama", layers=1)
    return folder


@pytest.fixture(scope="session")
def running() -> Iterator[dict[str, Any]]:
    servers: dict[str, Any] = {}
    yield servers
    if servers:
        servers["stack"].close()


@pytest.fixture(scope="module")
def served(small_folder: Path, running: dict[str, Any]) -> Served:
    """Return the server; a new one if its programs were freed, which it would compile again."""
    if programs_forgotten() or not running:
        if running:
            running["stack"].close()
        running["stack"] = stack = contextlib.ExitStack()
        # Undone when the model is loaded: other tests of this process need the whole models.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("infinigen_jax.loading.load.EMBEDDED_FOLDER", small_folder)
            running["served"] = stack.enter_context(serving())
        # Before other tests compile a program that the warm-up may lack; none is read from disk.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("infinigen_jax.programs.program.program_folder", lambda: None)
            # The tables of schemas are made before the server is ready, too.
            patch.setattr("infinigen_jax.server.grammar.LLTokenizer", None)
            running["late"] = late_compilations(running["served"])
    return running["served"]


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> None:
    """Forget none between these modules: a server compiles its programs before it is ready."""
