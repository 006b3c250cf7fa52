"""Settings of `config.json`: defaults, older spellings, rotary embeddings and windows."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from runtime import SPARSE, long_rope, random_model
from test_families import YARN
from tiny import LLAMA, refuses

from infinigen_jax.checkpoint.hf_folder import read_config
from infinigen_jax.engine.engine import Engine
from infinigen_jax.errors import InputError
from infinigen_jax.models import ModelConfig, config_from_hf


@pytest.mark.parametrize(
    "short, lengths, most",
    [
        (None, [10, 60], 40),
        (None, [10, 20], 64),
        (None, [100], 1),
        (80, [10, 70], 11),
        (80, [80], 1),
        (80, [81], 19),
        (100, [70], 30),
    ],
)
def test_new_tokens_that_a_model_takes(short, lengths, most):
    """100 positions; texts of up to `short` tokens may not grow beyond."""
    config = (long_rope("one", short) if short else random_model("one")).config
    config = dataclasses.replace(config, max_positions=100)
    assert config.fitting(64, [[7] * length for length in lengths]) == most


def test_a_sequence_does_not_grow_out_of_its_frequencies():
    made = Engine(long_rope("one", 32), policy=SPARSE, dense_layers=0)
    with pytest.raises(InputError, match="a prompt of 27 would grow beyond; give at most 6 new"):
        made.generate([[3] * 27, [3] * 40], max_new_tokens=7)
    refuses("context 40: give 2 to 32", made.conversation, context=40)


HF = LLAMA | {"rope_theta": 1e6, "max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("old", "new", "positions"),
    [
        ({"rope_scaling": None}, {"rope_type": "default"}, 32),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"factor": 2.0}, 64),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {"factor": 2.0}, 64),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"factor": 4.0, "original_max_position_embeddings": 32},
            128,
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": None},
                "original_max_position_embeddings": 8,
            },
            {"factor": 4.0, "original_max_position_embeddings": 8},
            32,
        ),
    ],
)
def test_configurations_of_before_transformers_5(old, new, positions):
    kind = (old["rope_scaling"] or {}).get("type", "default")
    before = config_from_hf(HF | old)
    settled = {"rope_theta": 1e6, "rope_type": kind} | new
    after = {name: value for name, value in HF.items() if name != "rope_theta"}
    assert before == config_from_hf(after | {"rope_parameters": settled})
    assert before.max_positions == positions and before.rope is not None
    assert before.rope.theta == 1e6 and before.rope.kind == kind


def test_older_settings_of_the_rotation():
    """OLMo 3 has them by kind of layer, and Ministral 3 has defaults."""
    yarn = YARN | {"rope_theta": 1e5}
    olmo = HF | {"model_type": "olmo3", "num_hidden_layers": 4}
    kinds = {"full_attention": yarn, "sliding_attention": {"rope_theta": 1e5}}
    flat, nested = (config_from_hf(olmo | {"rope_parameters": x}) for x in (yarn, kinds))
    assert flat == nested and flat.layer_ropes[0] != flat.layer_ropes[3]
    ministral = LLAMA | {"model_type": "ministral3", "head_dim": 8, "num_key_value_heads": 2}
    before = {"rope_theta": 1e5, "rope_scaling": YARN | {"llama_4_scaling_beta": 0.3}}
    after = {"rope_parameters": yarn | {"llama_4_scaling_beta": 0.3}}
    assert config_from_hf(ministral | before) == config_from_hf(ministral | after)
    assert config_from_hf(ministral).query_growth == 0.1


def test_settings_that_files_leave_out():
    """Defaults of transformers; Cohere's real context; the approximate GELU of Gemma."""

    def read(family: str, **changes) -> ModelConfig:
        sizes = {"max_position_embeddings": 32, "num_key_value_heads": 2}
        return config_from_hf(LLAMA | {"model_type": family} | sizes | changes)

    assert read("cohere", model_max_length=48).max_positions == 48
    assert read("cohere2", sliding_window=7, model_max_length=None).max_positions == 32
    thetas = {"apertus": 1.2e7, "cohere": 5e5, "cwm": 1e6, "helium": 1e5}
    for family, theta in thetas.items():
        for left_out in ({}, {"rope_theta": None}):
            rope = read(family, **left_out).rope
            assert rope is not None and rope.theta == theta
            assert rope.factor == {"apertus": 8, "cwm": 16}.get(family, 1)
    chunked = {"original_max_position_embeddings": 16}  # supported up to the original context
    assert read("qwen2", dual_chunk_attention_config=chunked).max_positions == 16
    assert read("cwm").eos_ids == () and len(read("cwm", vocab_size=128256).eos_ids) == 3
    assert read("gemma", hidden_act="gelu").activation == "gelu_pytorch_tanh"
    assert read("gemma", hidden_act="silu").activation == "silu"


PLAIN = [None, 0, -1, 1, 4.0, 32, 1e300, float("nan"), "4", "many", [], {}, True]
VALUES = st.sampled_from([*PLAIN, [1.0, 2.0]])
SETTINGS = (
    "factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast beta_slow "
    "attention_factor mscale mscale_all_dim truncate rope_theta partial_rotary_factor "
    "short_factor long_factor"
).split()


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope"]),
    st.dictionaries(st.sampled_from(SETTINGS), VALUES),
)
@example("yarn", {"factor": 4.0, "mscale": -4.0, "mscale_all_dim": 1})
def test_any_rope_settings_are_read_or_refused_in_one_line(tmp_path, kind, rope_settings):
    parameters = {"rope_type": kind} | rope_settings
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"rope_parameters": parameters}))
    try:
        _, config = read_config(tmp_path)
    except InputError as error:
        assert "config.json" in str(error) and "\n" not in str(error)
        return
    assert config.rope is not None and np.isfinite(config.rope.frequencies(8)).all()
    assert np.isfinite(config.rope.attention_factor)


def test_windows_of_configurations():
    def found(**changes) -> tuple[int | None, tuple[int, ...]]:
        sizes = {"num_hidden_layers": 3, "num_key_value_heads": 2}
        config = config_from_hf(LLAMA | sizes | changes)
        return config.sliding_window, config.sliding_layers

    assert found(model_type="mistral", sliding_window=7) == (7, (0, 1, 2))
    assert found(model_type="mistral", sliding_window=None) == (None, ())
    # A window of all positions, like the default here, is none.
    assert found(model_type="mistral") == found(model_type="mistral", sliding_window=64)
    assert found(model_type="mistral", sliding_window=64) == (None, ())
    qwen = {"model_type": "qwen2", "sliding_window": 7, "max_window_layers": 2}
    assert found(**qwen) == found(**qwen | {"max_window_layers": None}) == (None, ())
    assert found(**qwen, use_sliding_window=True) == (7, (2,))
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert found(**qwen, use_sliding_window=True, layer_types=types) == (7, (0,))
