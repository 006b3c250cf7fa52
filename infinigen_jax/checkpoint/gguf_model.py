"""Models in GGUF files: their settings as a `config.json`, tensors by Hugging Face's names.

llama.cpp's converter changes weights: it reorders the rows of queries and keys of some
architectures for another layout of the rotation, and adds 1 to the norms that are stored minus 1.
Both are undone.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from infinigen_jax.checkpoint.gguf_file import GgufFile
from infinigen_jax.checkpoint.tensor_names import expected
from infinigen_jax.checkpoint.tensor_source import TensorSource
from infinigen_jax.errors import InputError, UnsupportedModelError
from infinigen_jax.models import ModelConfig, blueprint, config_from_hf
from infinigen_jax.models.hf import FULL, LLAMA3, SLIDING, errors_naming

SUFFIX = ".gguf"
SETTINGS = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    # Three families have a name of their own for it.
    **dict.fromkeys(("layer_norm_eps", "norm_eps", "norm_epsilon"), "attention.layer_norm_epsilon"),
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    **dict.fromkeys(("logits_scaling", "logit_scale"), "logit_scale"),
    "num_local_experts": "expert_count",
    "rope_local_base_freq": "rope.freq_base_swa",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
}
TOKENS = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
# llama.cpp also ends a turn at these tokens, regardless of the settings.
END_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|endoftext|>"),
    *("<|end_of_text|>", "<|eom_id|>", "</s>"),
)
LOG_MULTIPLIER, TEMPERATURE = "rope.scaling.yarn_log_multiplier", "attention.temperature_scale"
CONTROL = 3  # kind of a token in tokenizer.ggml.token_type
# Factors of rotary frequencies, which become settings.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
SAME_NAME = (  # as the family in `config.json`
    *("apertus", "arcee", "cohere2", "ernie4_5", "exaone", "exaone4", "gemma", "gemma2", "glm4"),
    *("granite", "llama", "nemotron", "olmo2", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3"),
    "starcoder2",
)
ARCHITECTURES = {
    **{name: name for name in SAME_NAME},
    "command-r": "cohere",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "hunyuan-dense": "hunyuan_v1_dense",
    "mistral3": "llama",  # Mistral Small; Ministral 3 has TEMPERATURE
    "qwen2vl": "qwen2",
    "qwen3vl": "qwen3",
}
# Their rows of queries and keys are reordered.
PERMUTED = ("arcee", "granite", "llama", "mistral3", "smollm3")
# Parameters of the activation xIELU, which files keep as settings.
FITTED = {"xielu.alpha_p": "mlp.act_fn.alpha_p", "xielu.alpha_n": "mlp.act_fn.alpha_n"}


def read_config(file: GgufFile) -> tuple[dict[str, Any], ModelConfig]:
    """Return the settings as parsed JSON of a `config.json`, and as a ModelConfig."""
    with errors_naming(file.path):
        hf = _settings(file)
        return hf, config_from_hf(hf)


def open_tensors(file: GgufFile) -> dict[str, TensorSource]:
    """Return tensors by Hugging Face's names; unknown names stay, for the error of `match`."""
    config, name = read_config(file)[1], _architecture(file)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    columns = None
    if name == "glm4" and np.any(file.metadata.get("glm4.rope.dimension_sections", 0)):
        # In files of GLM-4 with images, the columns of a pair are half of the rotated ones apart.
        assert config.rope is not None
        columns = config.rope.columns(config.head_dim)
    sources, names = {}, _names(file, config)
    for stored, tensor in file.tensors.items():
        if stored in ROPE_TENSORS or _is_drafter(stored, config.num_layers):
            continue
        parts = stored.split(".")  # blk, number, module, weight or bias
        reordered = len(parts) == 4 and (name in PERMUTED or columns)
        turned = heads.get(parts[2]) if reordered else None
        shift = int(config.norms_minus_one and stored.endswith("norm.weight"))
        read = functools.partial(_read, file, stored, turned, shift, columns)
        full, release = names.get(stored, stored), functools.partial(file.release, stored)
        sources[full] = TensorSource(full, file.path, tensor.shape, tensor.dtype, read, release)
    for key, parameter in FITTED.items():
        try:
            values = np.atleast_1d(np.asarray(file.metadata.get(key, ()), np.float32))
        except (TypeError, ValueError):
            raise InputError(f"{file.path}: {key} holds no numbers; get the file again") from None
        for layer, one in enumerate(values.reshape(-1, 1)):
            full = f"model.layers.{layer}.{parameter}"
            sources[full] = TensorSource(full, file.path, one.shape, one.dtype, one.copy)
    return sources


def stored_bits(file: GgufFile) -> dict[str, float]:
    """Return the bits of a number in each tensor, with its share of the scales.

    Names are Hugging Face's.
    """
    names = _names(file, read_config(file)[1])
    return {names.get(n, n): 8 * t.size / math.prod(t.shape) for n, t in file.tensors.items()}


def _names(file: GgufFile, config: ModelConfig) -> dict[str | None, str]:
    """Return Hugging Face's names of tensors by GGUF's, from the table of llama.cpp's converter."""
    name = _architecture(file)
    kinds = {known: kind for kind, known in file.package.MODEL_ARCH_NAMES.items()}
    if name not in kinds:
        raise InputError(f"{file.path}: the gguf package does not know {name}; upgrade it")
    known = file.package.get_tensor_name_map(kinds[name], config.num_layers)
    names = [spec.name for spec in expected(blueprint(config, jnp.float32)).flat()]
    # Names have an ending in these files, also those that have none elsewhere.
    full = {x if x.endswith((".weight", ".bias")) else f"{x}.weight": x for x in names}
    # The table lacks the output matrix of families that always share it with the embeddings.
    named = {known.get_name(x, (".weight", ".bias")): name for x, name in full.items()}
    return {"output.weight": "lm_head.weight"} | named


def _is_drafter(name: str, layers: int) -> bool:
    """Whether a tensor belongs to a layer after the first `layers`, which only drafts tokens."""
    number = name.split(".", 2)[1] if name.startswith("blk.") else ""
    # Python refuses thousands of digits.
    return number.isdecimal() and len(number) < 9 and int(number) >= layers


def _architecture(file: GgufFile) -> str:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {name!r} is not supported (supported: {', '.join(ARCHITECTURES)})"
        )
    parts = file.metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise UnsupportedModelError(
            f"one of {parts} parts of a model; join them with llama.cpp's "
            "`llama-gguf-split --merge`"
        )
    return name


def _settings(file: GgufFile) -> dict[str, Any]:
    name, data = _architecture(file), file.metadata
    hf: dict[str, Any] = {"model_type": ARCHITECTURES[name]}
    hf |= {ours: data.get(f"{name}.{theirs}") for ours, theirs in SETTINGS.items()}
    hf |= {ours: data.get(f"tokenizer.ggml.{theirs}") for ours, theirs in TOKENS.items()}
    hf = {setting: value for setting, value in hf.items() if value is not None}
    if drafting := data.get(f"{name}.nextn_predict_layers"):
        hf["num_hidden_layers"] -= drafting  # the last ones
    hf |= _end_tokens(file) | _rope_settings(file, name)
    embedding = file.tensors.get("token_embd.weight")
    hf["vocab_size"] = embedding.shape[0] if embedding else None
    for token in TOKENS:  # in some files an invalid number means none
        if embedding and not 0 <= hf.get(token, 0) < embedding.shape[0]:
            del hf[token]
    hf["tie_word_embeddings"] = "output.weight" not in file.tensors
    bias = "blk.0.attn_q.bias" in file.tensors
    hf |= dict.fromkeys(("attention_bias", "use_bias"), bias)
    hf["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors  # of Command R+
    hf["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    if name == "gemma4":
        return hf | _gemma4(file, hf)
    return hf | _special_settings(name, hf, data)


def _gemma4(file: GgufFile, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of Gemma 4, whose layers are of two kinds."""
    data, layers = file.metadata, hf["num_hidden_layers"]
    slides = np.asarray(data["gemma4.attention.sliding_window_pattern"], bool)[:layers]
    heads = np.broadcast_to(np.asarray(hf["num_key_value_heads"], int), layers)
    factors = file.read("rope_freqs.weight")
    turning = int(np.sum(factors == 1))  # the others are so large that a pair does not rotate
    if not (np.all(factors[:turning] == 1) and np.all(factors[turning:] >= 1e10)):
        problem = "other than Gemma 4's are not supported"
        raise UnsupportedModelError(f"frequency factors (rope_freqs.weight) {problem}")
    whole = {"rope_type": "proportional", "rope_theta": hf["rope_theta"]}
    whole["partial_rotary_factor"] = turning / len(factors)
    return {
        "layer_types": [SLIDING if sliding else FULL for sliding in slides],
        "num_key_value_heads": int(heads[np.flatnonzero(slides)[0]]),
        "num_global_key_value_heads": int(heads[np.flatnonzero(~slides)[0]]),
        "head_dim": data["gemma4.attention.key_length_swa"],
        "global_head_dim": hf["head_dim"],
        "attention_k_eq_v": f"blk.{np.flatnonzero(~slides)[0]}.attn_v.weight" not in file.tensors,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": hf.get("rope_local_base_freq", 1e4)},
            FULL: whole,
        },
    }


def _special_settings(name: str, hf: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that llama.cpp derives from the architecture instead of storing them."""
    layers = hf.get("num_hidden_layers")
    if name in ("cohere2", "exaone4"):
        window, pattern = hf.get("sliding_window"), f"{name}.attention.sliding_window_pattern"
        given = data.get(pattern)
        if given is None or isinstance(given, int):
            return {"sliding_window": window, "sliding_window_pattern": given or 4}
        types = [SLIDING if sliding else FULL for sliding in given][:layers]
        return {"sliding_window": window, "layer_types": types}
    if name == "mistral3" and (beta := data.get(f"{name}.{TEMPERATURE}")):
        scales = {"mscale": 1.0, "mscale_all_dim": data.get(f"{name}.{LOG_MULTIPLIER}", 0.0)}
        rope = {**(hf.get("rope_scaling") or {}), **scales, "llama_4_scaling_beta": beta}
        return {"model_type": "ministral3", "rope_scaling": rope}
    if name == "starcoder2" and layers in (30, 32, 40):  # other sizes are IBM's, without a window
        return {"sliding_window": hf.get("sliding_window", 4096)}
    if name == "olmo2" and hf.get("sliding_window"):
        return {"model_type": "olmo3"}
    if name not in ("gemma2", "gemma3"):
        return {}
    # Queries of the 27B models are scaled by the hidden size per head.
    largest = layers == {"gemma2": 46, "gemma3": 62}[name]
    per_head = hf["hidden_size"] // hf["num_attention_heads"] if largest else hf.get("head_dim")
    windowed = name == "gemma2" or hf.get("sliding_window")
    return {"query_pre_attn_scalar": per_head} | ({} if windowed else {"sliding_window_pattern": 1})


def _end_tokens(file: GgufFile) -> dict[str, Any]:
    """Return `eos_token_id` with the tokens that end a turn."""
    data = file.metadata
    ids = [data.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    kinds, tokens = data.get("tokenizer.ggml.token_type"), data.get("tokenizer.ggml.tokens")
    if isinstance(kinds, np.ndarray) and isinstance(tokens, list) and len(kinds) == len(tokens):
        controls = {tokens[i]: int(i) for i in np.flatnonzero(kinds == CONTROL)}
        ids += [controls.get(text) for text in END_OF_TURN]
    unique = list(dict.fromkeys(i for i in ids if i is not None))
    return {"eos_token_id": unique} if unique else {}


def _rope_settings(file: GgufFile, name: str) -> dict[str, Any]:
    """Return `rope_scaling` and `partial_rotary_factor`."""
    data = file.metadata
    hf: dict[str, Any] = {"rope_scaling": None}
    width = data.get(f"{name}.rope.dimension_count")
    head = data.get(f"{name}.attention.key_length")
    if head is None and (heads := data.get(f"{name}.attention.head_count")):
        head = data.get(f"{name}.embedding_length", 0) // heads
    if width and head and name != "nemotron":  # whose converter takes a share of another size
        hf["partial_rotary_factor"] = width / head
    scaling = f"{name}.rope.scaling"
    kind, factor = data.get(f"{scaling}.type"), data.get(f"{scaling}.factor")
    factor = factor or data.get(f"{name}.rope.scale_linear")  # the former key
    if kind is None and factor not in (None, 0, 1):
        kind = "linear"
    if kind in ("linear", "yarn"):
        turns = {f"beta_{end}": data.get(f"{scaling}.yarn_beta_{end}") for end in ("fast", "slow")}
        hf["rope_scaling"] = {"rope_type": kind, "factor": factor} | turns
        if kind == "yarn":
            _check_yarn(data, name, factor)
    elif kind not in (None, "none", "longrope"):
        raise UnsupportedModelError(f"rope.scaling.type {kind!r} is not supported")
    if "rope_freqs.weight" in file.tensors and name != "gemma4":
        theta = data.get(f"{name}.rope.freq_base") or 10000.0
        hf["rope_scaling"] = _llama3(file.read("rope_freqs.weight"), float(theta))
    if ROPE_TENSORS[1] in file.tensors and ROPE_TENSORS[2] in file.tensors:
        factors = {
            f"{length}_factor": file.read(f"rope_factors_{length}.weight").tolist()
            for length in ("long", "short")
        }
        hf["rope_scaling"] = {"type": "longrope"} | factors
    return hf


def _check_yarn(data: Mapping[str, Any], name: str, factor: Any) -> None:
    """Refuse settings of YaRN that change the length of queries and keys from the usual one.

    Files have 1 for the usual factor, or its value, as for OLMo 3. Ministral 3 leaves it out.
    """
    usual = 0.1 * math.log(factor) + 1 if isinstance(factor, int | float) and factor > 0 else 1.0
    known = {
        "rope.scaling.attn_factor": (1.0, usual),
        "rope.scaling.yarn_attn_factor": (1.0, usual),
        "rope.scaling.yarn_ext_factor": (1.0,),
        LOG_MULTIPLIER: (0.0, 1.0) if data.get(f"{name}.{TEMPERATURE}") else (0.0,),
    }
    for key, values in known.items():
        given = data.get(f"{name}.{key}", values[0])
        if not isinstance(given, int | float) or not np.isclose(given, values, rtol=1e-3).any():
            raise UnsupportedModelError(f"{key} {given} is not supported")


def _llama3(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """Recover the settings of the rope type "llama3" from its factors of the frequencies."""
    factors = factors.astype(np.float64)
    scaling: dict[str, Any] = LLAMA3 | {"factor": float(factors.max())}
    turns = 8192 * theta ** -(np.arange(factors.size) / factors.size) / (2 * np.pi)
    kept = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
    expected = 1.0 / (kept + (1.0 - kept) / max(scaling["factor"], 1.0))
    if not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModelError(
            "frequency factors (rope_freqs.weight) other than LLaMA 3's are not supported"
        )
    return scaling


def _read(
    file: GgufFile, name: str, heads: int | None, shift: int, columns: int | None
) -> np.ndarray:
    """Read a tensor, undo the reordering of its `heads` and subtract `shift`.

    By default the columns of a pair, half a head apart, have become neighbours. With `columns`,
    neighbours among the first columns of a head have come apart.
    """
    tensor = file.read(name)
    if heads is not None:
        if tensor.shape[0] % (2 * heads):
            raise InputError(f"{file.path}: {name} cannot have {heads} heads; get the file again")
        by_head = tensor.reshape(heads, -1, *tensor.shape[1:])
        pairs = (-1, 2) if columns is None else (2, -1)
        moved = by_head[:, :columns].reshape(heads, *pairs, *tensor.shape[1:]).swapaxes(1, 2)
        moved = moved.reshape(heads, -1, *tensor.shape[1:])
        rest = by_head[:, moved.shape[1] :]
        tensor = np.concatenate([moved, rest], axis=1).reshape(tensor.shape)
    return tensor - tensor.dtype.type(shift) if shift else tensor
