"""The work of a start: tracing of many layers, and savings of a second process."""

import functools
from collections.abc import Callable

from runtime import COMMON, RAGGED, SPARSE, tokens_of
from tiny import ROOT, python

from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.steps import steps
from infinigen_jax.engine.engine import Engine
from infinigen_jax.loading.load import Model
from infinigen_jax.models import config_from_hf, random_params
from infinigen_jax.prefill import compiled


def deep(layers: int) -> Model:
    sizes = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": layers}
    config = config_from_hf(COMMON | sizes)
    return Model.from_params(config, random_params(config, "float32"), "float32")


def test_a_kind_of_layer_is_traced_once_however_many_there_are(monkeypatch):
    traces: list[str] = []

    def counted(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*arguments, **keywords):
            traces.append(function.__name__)
            return function(*arguments, **keywords)

        return call

    # Nothing is loaded instead.
    monkeypatch.setattr("infinigen_jax.programs.program.program_folder", lambda: None)
    monkeypatch.setattr(Decoder, "decode_layer", counted(Decoder.decode_layer))
    monkeypatch.setattr(compiled, "chunk_layer", counted(compiled.chunk_layer))
    engine = Engine(deep(5), policy=SPARSE, dense_layers=1)
    run = engine.start(RAGGED, max_new_tokens=3)
    parts = run.cache.parts(run.decoder.policy.observes)
    steps(run.decoder).fused.trace(engine.weights, *parts, run.drawn)
    # Steps have layers on the device, on the host, and on the host without a layer after it.
    assert (traces.count("chunk_layer"), traces.count("decode_layer")) == (2, 3)


PROGRAM = """
import jax
from test_start import Decoder, start

jax.config.update("jax_default_matmul_precision", "highest")
decode_layer, traces = Decoder.decode_layer, []
Decoder.decode_layer = lambda *given: traces.append(0) or decode_layer(*given)
print(start(), len(traces))
"""


def start() -> list[list[int]]:
    return tokens_of(Engine(deep(1), policy=SPARSE, dense_layers=0), new=3)


def test_a_second_process_traces_no_step(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    tokens = start()
    folders = ROOT, ROOT / "tests", ROOT / "tests/engine"
    done = python("-c", PROGRAM, PYTHONPATH=":".join(map(str, folders)))
    assert (done.returncode, done.stdout) == (0, f"{tokens} 0\n"), done.stderr[-2000:]
