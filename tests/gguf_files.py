"""Tiny transformers models written as GGUF files, the way llama.cpp's converter does it."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, quants
from tiny import TinyModel

from infinigen_jax.loading.load import embedded

PERMUTED = ("arcee", "granite", "llama", "mistral3", "smollm3")
ARCHITECTURES = {
    **{"cohere": "command-r", "gemma3_text": "gemma3", "gemma4_text": "gemma4"},
    "hunyuan_v1_dense": "hunyuan-dense",
    **{"ministral3": "mistral3", "olmo3": "olmo2"},
}
PLUS_ONE = ("gemma", "nemotron")  # stored norms are 1 more, except for Gemma 4


def write_gguf(
    path: Path,
    made: TinyModel,
    kind: Kind = Kind.F32,
    tensors: Mapping[str, np.ndarray] = MappingProxyType({}),
    others: Mapping[str, Kind] = MappingProxyType({}),
    **settings: Any,
) -> Path:
    """Write a model in a format, `others` for some modules; it gets the rounded weights itself."""
    import torch

    config = made.model.config
    name = str(ARCHITECTURES.get(config.model_type, config.model_type))
    writer = GGUFWriter(path, name)
    write_config(writer, config.per_layer_config[-1] if name == "gemma4" else config)
    for extra, values in tensors.items():
        writer.add_tensor(extra, values)
    tokenizer = byte_level() if config.vocab_size == 1024 else {}
    for key, value in (tokenizer | settings).items():
        add_setting(writer, key, value)
    if name == "apertus":
        write_activations(writer, made.model)
    architecture = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for full, parameter in made.model.named_parameters():
        if "act_fn" in full:
            continue
        own = others.get(full.split(".")[-2], kind)
        stored = Kind.F32 if parameter.ndim == 1 else own
        values = parameter.detach().numpy()
        rounding = own if own in (Kind.F16, Kind.BF16) else stored
        rounded = quants.dequantize(quants.quantize(values, rounding), rounding)
        with torch.no_grad():
            parameter.copy_(torch.tensor(rounded))
        if name in PERMUTED and full.split(".")[-2] in ("q_proj", "k_proj"):
            queries, keys = config.num_attention_heads, config.num_key_value_heads
            rounded = permuted(rounded, queries if "q_proj" in full else keys)
        if name.startswith(PLUS_ONE) and name != "gemma4" and full.endswith("norm.weight"):
            rounded = rounded + 1
        target = names.get_name(full, (".weight", ".bias"))
        assert target is not None, full
        writer.add_tensor(target, quants.quantize(rounded, stored), raw_dtype=stored)
    if name == "gemma4":
        write_gemma4(writer, made.model)
    written(writer)
    return path


def written(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_config(writer: GGUFWriter, config: Any) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if epsilon := getattr(config, "rms_norm_eps", None):
        writer.add_layer_norm_rms_eps(epsilon)
    for setting in ("layer_norm_eps", "norm_eps", "norm_epsilon"):
        if epsilon := getattr(config, setting, None):
            writer.add_layer_norm_eps(epsilon)
    if scale := getattr(config, "logit_scale", None):
        writer.add_logit_scale(scale)
    writer.add_key_length(head)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_dimension_count(int(head * (rope.get("partial_rotary_factor") or 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    for length in ("long", "short") if "long_factor" in rope else ():
        factors = np.array(rope[f"{length}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if beta := rope.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(beta)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if original := getattr(config, "original_max_position_embeddings", None):
        writer.add_rope_scaling_orig_ctx_len(original)
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
        if config.model_type == "exaone4":
            kinds = [kind == "sliding_attention" for kind in config.layer_types]
            writer.add_sliding_window_pattern(kinds)
    if config.model_type == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if cap := getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(cap)
    if cap := getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(cap)


def write_gemma4(writer: GGUFWriter, model: Any) -> None:
    """Write what differs between its two kinds of layers, and the factors of their outputs."""
    config = model.config
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    each = [config.per_layer_config[i] for i in range(len(slides))]
    whole, windowed = (each[slides.index(kind)] for kind in (False, True))
    writer.add_sliding_window_pattern(slides)
    add_setting(writer, "gemma4.attention.head_count_kv", [x.num_key_value_heads for x in each])
    add_setting(writer, "gemma4.attention.key_length", whole.head_dim)
    writer.add_value_length(whole.head_dim)
    writer.add_key_length_swa(windowed.head_dim)
    writer.add_value_length_swa(windowed.head_dim)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    add_setting(writer, "gemma4.rope.dimension_count", whole.head_dim)
    writer.add_rope_dimension_count_swa(windowed.head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    pairs = whole.head_dim // 2
    turning = int(config.rope_parameters["full_attention"]["partial_rotary_factor"] * pairs)
    factors = np.where(np.arange(pairs) < turning, 1.0, 1e30).astype(np.float32)
    writer.add_tensor("rope_freqs.weight", factors)
    for i, layer in enumerate(model.model.layers):
        writer.add_tensor(f"blk.{i}.layer_output_scale.weight", layer.layer_scalar.numpy())


def write_activations(writer: GGUFWriter, model: Any) -> None:
    """Write the numbers of Apertus's activations as settings."""
    for name in ("alpha_n", "alpha_p", "beta", "eps"):
        values = [getattr(layer.mlp.act_fn, name) for layer in model.model.layers]
        add_setting(writer, f"xielu.{name}", [float(value.detach()) for value in values])


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Return the row order of `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def add_setting(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add a setting, or replace one; None leaves it out."""
    writer.kv_data[0].pop(key, None)
    if value is None:
        return
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def byte_level(pre: str = "gpt-2") -> dict[str, Any]:
    """Return the settings of the embedded models' tokenizer."""
    whole = json.loads((embedded() / "tokenizer.json").read_text())
    ids = whole["model"]["vocab"] | {t["content"]: t["id"] for t in whole["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    special = {token["content"] for token in whole["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in whole["model"]["merges"]]
    kinds = [3 if token in special else 1 for token in tokens]
    settings: dict[str, Any] = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges}
    settings |= {"token_type": kinds, "bos_token_id": 0, "padding_token_id": 1, "eos_token_id": 2}
    return {f"tokenizer.ggml.{name}": value for name, value in settings.items()}


def sentencepiece() -> dict[str, Any]:
    """Return settings of a small SentencePiece vocabulary: pieces of a sentence, and all bytes."""
    pieces = ["\u2581", *"thequickbrownfxjmpsvlazydg", "th", "qu", "\u2581th", "\u2581the", "ck"]
    pieces += ["ow", "own", "\u2581br", "\u2581brown", "er", "\u2581\u2581"]
    pieces = list(dict.fromkeys(pieces))
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    settings: dict[str, Any] = {"model": "llama", "tokens": tokens, "scores": scores}
    settings |= {"token_type": kinds, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{name}": value for name, value in settings.items()}


SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2}
