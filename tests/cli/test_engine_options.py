"""Options of `generate` reach the engine: what it is made with, and what it is asked to start."""

import inspect
from typing import Any

import pytest

from infinigen_jax import generate
from infinigen_jax.engine.engine import Engine
from infinigen_jax.errors import InputError
from infinigen_jax.settings.pool import Pool
from infinigen_jax.settings.sampling import Sampling

pytestmark = pytest.mark.usefixtures("shallow")

STARTED = "a stub that begins nothing"
LIMIT = "--pool-tokens 40 --pool-eviction lru --pool-sinks 2"
# Values that are also options, in the same form.
OTHERS: dict[str, Any] = {
    **{"weights": "host", "rows": "int8", "hot_set": 2.0, "dense_layers": 1},
    **{"schedule": "layerwise", "draft_tokens": 3, "draft_weights": "int4"},
    **{"prefill_chunk": 64, "batch": 1, "max_new_tokens": 3},
}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments by name of the engines that are made, and of their first start."""
    found: dict[str, Any] = {}

    class Stub(Engine):
        def __init__(self, *arguments: Any, **settings: Any):
            found.update(settings)
            super().__init__(*arguments, **settings)

        def start(self, *arguments: Any, **settings: Any) -> Any:
            bound = inspect.signature(Engine.start).bind(self, *arguments, **settings)
            found.update(bound.arguments)
            raise InputError(STARTED)

    monkeypatch.setattr("infinigen_jax.engine.engine.Engine", Stub)
    return found


def test_options_reach_the_engine(given, command):
    alike = [f"--{name.replace('_', '-')}={value}" for name, value in OTHERS.items()]
    drawn = "--temperature 0.5 --top-k 9 --seed 3".split()
    cases: list[tuple[list[str], dict[str, Any]]] = [
        (LIMIT.split(), {"pool": Pool(tokens=40, eviction="lru", sinks=2)}),
        ([*alike, "--lossless", "--check"], OTHERS | {"lossless": True, "check": True}),
        (drawn, {"sampling": Sampling(temperature=0.5, top_k=9, seed=3)}),
    ]
    for options, expected in cases:
        status, out, err = command(generate.main, "--prompt", "The king", "--quiet", *options)
        assert (status, out) == (2, "") and STARTED in err
        assert {key: given[key] for key in expected} == expected


def test_prompts_and_their_prefix_reach_the_engine(given, command, tmp_path):
    file, text = tmp_path / "prompt", "Once upon a time there was an old king. "
    file.write_text("Then")
    prompts = "--prompt", "He said", "--prompt-file", file
    status, _, err = command(generate.main, "--prefix", text, *prompts, "--quiet")
    assert status == 2 and STARTED in err
    engine = given["self"]
    assert given["prompts"] == [engine.encode(text + end) for end in ("He said", "Then")]
    assert given["prefix"] == engine.prefix_tokens(text) > 0
