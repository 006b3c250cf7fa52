"""Models of all families and their rotary embeddings against transformers, in float32.

Logits of a whole pass; then through convert, load and the engine, token by token, next to
transformers' own decoding with its cache.
"""

import copy
import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
from runtime import ALL, check_speculated_logits, engine, numbers, slow_except
from safetensors.torch import save_file
from tiny import COMMON, TEXT, VISION, logits_of, make_tiny, take_tensors

from benchmarks.prefill import cache_shapes
from infinigen_jax.cache.layers import DenseLayer, Resident, Sliding
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.memory_plan import plan_cache
from infinigen_jax.loading import load as checkpoint
from infinigen_jax.settings.sampling import Sampling

# Two orders of the same float32 sums over at most 64 terms and 3 layers, logits up to about 10.
TOLERANCE = 1e-4

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GQA = {"num_key_value_heads": 2}


def kinds(pattern: str) -> dict[str, Any]:
    """Layers with a window of 7 tokens, and without."""
    names = {"s": "sliding_attention", "f": "full_attention"}
    types = [names[kind] for kind in pattern]
    return {"sliding_window": 7, "layer_types": types, "num_hidden_layers": len(types)}


def heads(queries: int, keys: int) -> dict[str, Any]:
    return {"num_attention_heads": queries, "num_key_value_heads": keys}


def rope(**changes) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0} | changes}


def longrope(original: int, columns: int, **changes) -> dict[str, Any]:
    factors = np.linspace(1.0, 4.0, columns // 2)
    kind = {"rope_type": "longrope", "short_factor": (factors**0.2).tolist()} | changes
    kind |= {"long_factor": factors.tolist(), "original_max_position_embeddings": original}
    return rope(**kind) | {"original_max_position_embeddings": original}


GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0}
BASES = {"sliding_attention": {"rope_theta": 100.0}, "full_attention": {"rope_theta": 1e4}}
GEMMA3 = GEMMA | {"rope_parameters": BASES, "final_logit_softcapping": 6.0}
GEMMA4 = {"hidden_size_per_layer_input": 0, "head_dim": 8, "global_head_dim": 16}
GEMMA4 |= {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
MUSE = {"head_dim": 12, "qk_scale_factor": 1.7, "output_multiplier": 0.6, "post_norm_eps": 0.1}
FACTORS = {"embedding_multiplier": 1.7, "residual_multiplier": 0.6}
FACTORS |= {"attention_multiplier": 0.35, "logits_scaling": 2.5}
GRANITE4 = GQA | FACTORS | {"layer_types": ["full_attention"] * 2, "num_local_experts": 0}
GRANITE4 |= {"shared_intermediate_size": 40, "mamba_n_heads": 4}
NOPE = {"no_rope_layers": [0, 1]}
DYNAMIC, SHORT = {"rope_type": "dynamic", "factor": 4.0}, {"max_position_embeddings": 16}
USED = {"use_sliding_window": True}
PARTIAL = rope(partial_rotary_factor=0.5)

BY_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": YARN | {"rope_theta": 1e4},
}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ALPHA = {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}
YARN_ALL = YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False, "attention_factor": 1.3}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("apertus", GQA | {"head_dim": 12}),
    "apertus 1.5": ("apertus1p5_text", GQA | {"head_dim": 12}),
    "arcee": ("arcee", GQA),
    "cohere": ("cohere", GQA | {"logit_scale": 0.4}),
    "cohere plus": ("cohere", GQA | {"use_qk_norm": True}),
    "cohere2": ("cohere2", GQA | kinds("sf")),
    "cwm": ("cwm", GQA | kinds("fs") | {"head_dim": 12}),
    "ernie4_5": ("ernie4_5", GQA | {"head_dim": 12}),
    "exaone": ("exaone", GQA | rope(**LLAMA3)),
    "exaone4": ("exaone4", GQA | kinds("ff") | {"sliding_window": None}),
    "exaone4 windows": ("exaone4", GQA | kinds("sf")),
    "gemma": ("gemma", GQA | {"head_dim": 12}),
    "gemma2": ("gemma2", GQA | GEMMA | CAPS | kinds("sfs")),
    "gemma2 plain": ("gemma2", GEMMA | dict.fromkeys(CAPS) | {"sliding_window": 64}),
    "gemma3": ("gemma3_text", GQA | GEMMA3 | kinds("sf")),
    "gemma4": ("gemma4_text", GQA | GEMMA4 | kinds("sfsf")),
    "gemma4 plain": ("gemma4_text", GEMMA4 | kinds("sf") | {"attention_k_eq_v": False}),
    "gemma4 unified": ("gemma4_unified_text", GQA | GEMMA4 | kinds("sf") | CAPS),
    "glm": ("glm", GQA | {"head_dim": 12, "partial_rotary_factor": 0.7}),
    "glm4": ("glm4", GQA | {"head_dim": 16}),
    "glm4 dynamic": ("glm4", SHORT | {"head_dim": 16} | rope(**DYNAMIC, partial_rotary_factor=0.5)),
    "granite": ("granite", GQA | FACTORS),
    "granite 4": ("granitemoehybrid", GRANITE4 | {"position_embedding_type": "rope"}),
    "granite 4 without rotation": ("granitemoehybrid", GRANITE4),
    "helium": ("helium", GQA | {"head_dim": 12}),
    "hyperclovax": ("hyperclovax", GQA | FACTORS),
    "hyperclovax plain": ("hyperclovax", {"use_post_norm": False}),
    "hunyuan": ("hunyuan_v1_dense", GQA | rope(**ALPHA) | {"head_dim": 12}),
    "internlm3": ("internlm3", {"num_key_value_heads": 2, "head_dim": 12}),
    "iquestcoder": ("iquestcoder", GQA | {"head_dim": 12}),
    "jais2": ("jais2", GQA),
    "mistral 0.1": ("mistral", {"sliding_window": 7} | GQA),
    "ministral": ("ministral", kinds("fsf") | GQA | {"head_dim": 12}),
    "qwen2": ("qwen2", GQA | {"tie_word_embeddings": True}),
    "qwen2 windows": ("qwen2", USED | {"sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", GQA | {"head_dim": 20}),
    "qwen3 tied": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 windows": ("qwen3", USED | kinds("sff") | GQA | {"head_dim": 20}),
    "ministral3": ("ministral3", GQA | rope(**YARN, llama_4_scaling_beta=0.3) | {"head_dim": 12}),
    "muse_glimmer": ("muse_glimmer_text", GQA | MUSE | kinds("sf")),
    "nemotron": ("nemotron", GQA | {"head_dim": 12}),
    "olmo2": ("olmo2", GQA),
    "olmo3": ("olmo3", GQA | kinds("sf") | {"rope_parameters": BY_KIND}),
    "opt": ("opt", {}),
    "linear": ("llama", rope(rope_type="linear", factor=4.0)),
    "dynamic": ("llama", SHORT | rope(**DYNAMIC)),
    "yarn": ("llama", rope(**YARN)),
    "yarn, all settings": ("qwen2", rope(**YARN_ALL)),
    "phi3": ("phi3", GQA),
    "phi3 longrope": ("phi3", longrope(26, 12)),
    "phi3 parts": ("phi3", GQA | longrope(26, 8, partial_rotary_factor=0.67, factor=3.0)),
    "phi3 window": ("phi3", GQA | rope(partial_rotary_factor=0.5) | {"sliding_window": 7}),
    "seed_oss": ("seed_oss", GQA | {"head_dim": 12}),
    "smollm3": ("smollm3", GQA | NOPE),
    "smollm3 yarn": ("smollm3", GQA | NOPE | rope(**YARN)),
    "stablelm": ("stablelm", GQA | PARTIAL | {"use_qkv_bias": True}),
    "stablelm parallel": ("stablelm", PARTIAL | {"use_parallel_residual": True}),
    "starcoder2": ("starcoder2", GQA | {"sliding_window": 7}),
    "vaultgemma": ("vaultgemma", GQA | GEMMA | CAPS | kinds("sf")),
    "yarn, two scales": ("llama", rope(**YARN, mscale=0.7, mscale_all_dim=1.2)),
}
TIED, WIDE = {"tie_word_embeddings": True}, {"head_dim": 20, "hidden_act": "gelu"}
BIASES = {"attention_bias": True, "mlp_bias": True}
THETA = rope(rope_type="default", rope_theta=5e5)
BARE = {"tie_word_embeddings": False, "enable_bias": False}
# Decoding them differs in nothing from decoding the models above.
BASIC: dict[str, tuple[str, dict[str, Any]]] = {
    "one KV head, tied, rope llama3": ("llama", heads(4, 1) | TIED | rope(**LLAMA3)),
    "three wide heads, theta, gelu": ("llama", heads(3, 3) | WIDE | THETA),
    "six heads over three, biases": ("llama", heads(6, 3) | BIASES),
    "opt untied, three heads, no biases": ("opt", {"num_attention_heads": 3} | BARE),
}


@pytest.mark.parametrize("name", MODELS | BASIC)
def test_logits_of_a_whole_pass(name, tokens, tmp_path):
    """With one layer where all are alike."""
    family, changes = (MODELS | BASIC)[name]
    differ = changes.keys() & {"layer_types", "no_rope_layers", "max_window_layers"}
    layers = {} if differ else {"num_hidden_layers": 1}
    reference = make_tiny(tmp_path / "source", family, **layers, **changes)
    model = checkpoint.load(convert(reference.folder, tmp_path / "out", skew="none"), "float32")
    expected = reference.logits(tokens)
    np.testing.assert_allclose(logits_of(model, tokens), expected, atol=TOLERANCE, rtol=0)


MROPE = rope(rope_type="default", mrope_section=[2, 2, 2])


GLM = rope(rope_type="default", mrope_section=[1, 1, 1], partial_rotary_factor=0.5)


@pytest.mark.parametrize(
    "whole, family, tied, changes",
    [
        ("Glm4v", "glm4", False, GLM),
        ("Exaone4_5_", "exaone4", False, MODELS["exaone4"][1]),
        ("Gemma3", "gemma3_text", True, GEMMA | {"rope_parameters": BASES}),
        ("Gemma4", "gemma4_text", True, GEMMA4 | kinds("fsf")),
        ("Mistral3", "ministral3", True, {"head_dim": 12} | MODELS["ministral3"][1]),
        ("Qwen2_5_VL", "qwen2", False, MROPE),
        ("Qwen3VL", "qwen3", True, MROPE | {"head_dim": 12}),
    ],
)
def test_the_language_model_of_one_with_images(whole, family, tied, changes, tokens, tmp_path):
    """The configuration says that embeddings are tied; the weights decide."""
    import torch
    import transformers

    text = COMMON | {"intermediate_size": 56, "model_type": family} | GQA | changes
    parts: dict[str, Any] = {"text_config": text, "vision_config": VISION, "eos_token_id": [1, 2]}
    config = getattr(transformers, f"{whole}Config")(tie_word_embeddings=tied, **parts)
    torch.manual_seed(0)
    model = getattr(transformers, f"{whole}ForConditionalGeneration")(config).eval()
    model.save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    converted = convert(tmp_path / "source", tmp_path / "out", skew="none")
    loaded = checkpoint.load(converted, "float32")
    assert loaded.config.eos_ids == (1, 2) and loaded.config.window_of(0) is None
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits_of(loaded, tokens), expected, atol=TOLERANCE, rtol=0)
    again = transformers.AutoModelForCausalLM.from_pretrained(converted, dtype="float32")
    assert type(again).__name__.lower() == family.removesuffix("_text") + "forcausallm"


def test_tokens_without_logits_are_never_generated(tokens, tmp_path):
    sizes = {"output_vocab_size": 80, "head_dim": 12}
    reference = make_tiny(tmp_path / "source", "apertus1p5_text", **GQA, **sizes)
    stored = take_tensors(reference.folder)  # as in a model that reads images and speech
    stored = {name.replace("model.", "model.language_model."): x for name, x in stored.items()}
    for kind in "vision", "audio":
        stored[f"model.{kind}_tokenizer.quantize.weight"] = stored["lm_head.weight"].clone()
    save_file(stored, reference.folder / "model.safetensors")
    file = reference.folder / "config.json"
    text = json.loads(file.read_text())
    file.write_text(json.dumps({"model_type": "apertus1p5", "text_config": text}))
    model = checkpoint.load(convert(reference.folder, tmp_path / "out", skew="none"), "float32")
    logits, expected = logits_of(model, tokens), reference.logits(tokens)
    assert expected.shape[-1] == 80
    np.testing.assert_allclose(logits[..., :80], expected, atol=TOLERANCE, rtol=0)
    assert np.all(logits[..., 80:] < -1e29)
    model = dataclasses.replace(model, path=None)
    result = Engine(model, policy=ALL).generate(PROMPTS, Sampling(temperature=100.0), NEW)
    assert {token for tokens in result.tokens for token in tokens} <= set(range(80))


PROMPTS = [numbers(n) for n in (27, 5, 14)]
NEW = 12


def greedy(reference: Any, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """Generate with transformers and its cache; return tokens and logits [NEW, v]."""
    import torch
    import transformers

    from benchmarks.torch_systems import with_cache

    model = copy.deepcopy(reference)  # one with dynamic frequencies remembers the longest call
    logits, inputs = [], torch.tensor([prompt])
    cache = with_cache(model, transformers.DynamicCache(config=model.config))
    with torch.no_grad():
        for _ in range(NEW):
            made = model(inputs, **cache)
            inputs = made.logits[:, -1:].argmax(-1)
            logits.append(made.logits[0, -1].numpy())
    return [int(row.argmax()) for row in logits], np.stack(logits)


def record_output(decoder, layer):
    return layer.after, layer.after.x


def decoded(made: Engine, tokens: list[list[int]]) -> np.ndarray:
    """Logits [b, NEW - 1, v] of decode steps over given tokens, after PROMPTS."""
    run, steps = made.start(PROMPTS, max_new_tokens=NEW), []
    embedding = made.decoder.blueprint.embedding(made.runtime.weights.params["embedding"])
    for column in np.array(tokens).T[:-1]:
        records = run.watch(record_output, column)[1]
        steps.append(np.asarray(embedding.logits(records[-1])))
    return np.stack(steps, axis=1)


@pytest.mark.parametrize("name", slow_except(MODELS, "gemma4"))
def test_decoding_is_that_of_transformers(name, tmp_path):
    """Calibrated and skewed; the window fits one prompt whole and moves over the others."""
    family, changes = MODELS[name]
    reference = make_tiny(tmp_path / "source", family, **changes)
    model = checkpoint.load(convert(reference.folder, tmp_path / "out", calibration=TEXT))
    model = dataclasses.replace(model, path=None)  # there is no tokenizer in it
    expected = [greedy(reference.model, prompt) for prompt in PROMPTS]
    tokens = [tokens for tokens, _ in expected]
    everything, config = Engine(model, policy=ALL, dense_layers=0), model.config
    assert everything.decoder.host_layers == config.num_layers - len(config.sliding_layers)
    for i in everything.decoder.on_host:
        check_speculated_logits(model, i)
    for made in (everything, Engine(model, policy=ALL, dense_layers=1)):
        for row, (_, of_row) in zip(decoded(made, tokens), expected, strict=True):
            np.testing.assert_allclose(row, of_row[1:], atol=TOLERANCE, rtol=0)
            assert row.argmax(-1).tolist() == of_row[1:].argmax(-1).tolist()


def test_layers_with_a_window_stay_on_the_device():
    decoder = engine("windows").decoder
    assert decoder.on_host == (2,)
    cache = cache_shapes(decoder, 3, 128)
    assert [type(local) for local in cache.local] == [DenseLayer, Sliding, Resident]
    assert cache.host is not None and cache.host.shape[0] == 1
    local = cache.local[1]
    assert isinstance(local, Sliding) and local.keys.shape[2] == 9
    on_device = jax.tree.leaves(cache.local[:2])
    expected = sum(x.size * x.dtype.itemsize for x in on_device)
    assert plan_cache(decoder, 3, 128).dense_cache == expected
