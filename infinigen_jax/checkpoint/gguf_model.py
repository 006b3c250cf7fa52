"""Models in GGUF files: their settings as a `config.json`, tensors by Hugging Face's names.

llama.cpp's converter changes weights: it reorders the rows of queries and keys of some
architectures for another layout of the rotation, and adds 1 to the norms of Gemma. Both are undone.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from infinigen_jax.checkpoint.gguf_file import GgufFile
from infinigen_jax.checkpoint.gguf_rope import ROPE_TENSORS, rope_settings
from infinigen_jax.checkpoint.hf_folder import TensorSource
from infinigen_jax.checkpoint.tensor_names import expected
from infinigen_jax.errors import InputError, UnsupportedModelError
from infinigen_jax.models import ModelConfig, blueprint, config_from_hf
from infinigen_jax.models.hf import FULL, SLIDING

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
}
TOKENS = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
# llama.cpp also ends a turn at these tokens, regardless of the settings.
END_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>"),
    *("<|end_of_text|>", "<|eom_id|>", "</s>"),
)
FOUR_BITS = 5  # bits of a number and its share of the scales: Q4_1 has these, Q5_0 more
CONTROL = 3  # kind of a token in tokenizer.ggml.token_type


class Architecture(NamedTuple):
    """llama.cpp's form of a family.

    Attributes:
        model_type: the family in `config.json`.
        permuted: whether rows of queries and keys are reordered.
        shift: number added to the weights of norms.
        activation: activation of the MLP, which files do not name.
    """

    model_type: str
    permuted: bool = False
    shift: int = 0
    activation: str = "silu"


GELU = "gelu_pytorch_tanh"
UNCHANGED = (  # weights that the converter only renames
    *("cohere2", "ernie4_5", "exaone", "exaone4", "glm4", "olmo2", "phi3", "qwen2", "qwen3"),
    "seed_oss",
)
ARCHITECTURES = {
    **{name: Architecture(name) for name in UNCHANGED},
    **{name: Architecture(name, permuted=True) for name in ("granite", "llama", "smollm3")},
    **{name: Architecture(name, shift=1, activation=GELU) for name in ("gemma", "gemma2")},
    "apertus": Architecture("apertus", activation="xielu"),
    "arcee": Architecture("arcee", permuted=True, activation="relu2"),
    "command-r": Architecture("cohere"),
    "gemma3": Architecture("gemma3_text", shift=1, activation=GELU),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "mistral3": Architecture("llama", permuted=True),  # Mistral Small; others have a special YaRN
    "nemotron": Architecture("nemotron", shift=1, activation="relu2"),
    "qwen2vl": Architecture("qwen2"),
    "qwen3vl": Architecture("qwen3"),
    "starcoder2": Architecture("starcoder2", activation=GELU),
}
# Parameters of the activation xIELU, which files keep as settings.
FITTED = {"xielu.alpha_p": "mlp.act_fn.alpha_p", "xielu.alpha_n": "mlp.act_fn.alpha_n"}


def read_config(file: GgufFile) -> tuple[dict[str, Any], ModelConfig]:
    """Return the settings as parsed JSON of a `config.json`, and as a ModelConfig."""
    architecture(file)
    try:
        hf = _settings(file)
        return hf, config_from_hf(hf)
    except UnsupportedModelError as error:
        message = str(error).removeprefix("config.json: ")
        raise UnsupportedModelError(f"{file.path}: {message}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise InputError(f"{file.path}: a setting has the wrong type ({error})") from None


def open_tensors(file: GgufFile) -> dict[str, TensorSource]:
    """Return tensors by Hugging Face's names; unknown names stay, for the error of `match`."""
    found = architecture(file)
    counts = {"attn_q": file.metadata.get(f"{found[0]}.attention.head_count")}
    counts["attn_k"] = file.metadata.get(f"{found[0]}.attention.head_count_kv", counts["attn_q"])
    heads = {
        f"{module}.{kind}": count for module, count in counts.items() for kind in ("weight", "bias")
    }
    sources, names = {}, _names(file)
    layers = _layers(file, found[0])
    columns = _reordered_columns(file) if found[0] == "glm4" else None
    for name, tensor in file.tensors.items():
        if name in ROPE_TENSORS or _is_drafter(name, layers):
            continue
        reordered = heads.get(name.split(".", 2)[-1])
        turned = reordered if found[1].permuted or columns else None
        shift = found[1].shift if name.endswith("norm.weight") else 0
        read = functools.partial(_read, file, name, turned, shift, columns)
        full = names.get(name, name)
        release = functools.partial(file.release, name)
        sources[full] = TensorSource(full, file.path, tensor.shape, tensor.dtype, read, release)
    for key, name in FITTED.items():
        try:
            values = np.atleast_1d(np.asarray(file.metadata.get(key, ()), np.float32))
        except (TypeError, ValueError):
            raise InputError(f"{file.path}: {key} holds no numbers; get the file again") from None
        for layer, value in enumerate(values):
            full, one = f"model.layers.{layer}.{name}", np.array([value])
            read = functools.partial(np.copy, one)
            sources[full] = TensorSource(full, file.path, one.shape, one.dtype, read, lambda: None)
    return sources


def wide_tensors(file: GgufFile) -> set[str]:
    """Return the matrices of layers in more than about four bits, by Hugging Face's names.

    A file such as Q4_K_M has some. In a file without matrices in four bits, none counts.
    """
    names = _names(file)
    matrices = {n: t for n, t in file.tensors.items() if n.startswith("blk.") and len(t.shape) > 1}
    wide = {n for n, t in matrices.items() if 8 * t.size > FOUR_BITS * math.prod(t.shape)}
    return set() if len(wide) == len(matrices) else {names.get(name, name) for name in wide}


def _names(file: GgufFile) -> dict[str | None, str]:
    """Return Hugging Face's names of tensors by GGUF's, from the table of llama.cpp's converter."""
    config, name = read_config(file)[1], architecture(file)[0]
    kinds = {known: kind for kind, known in file.package.MODEL_ARCH_NAMES.items()}
    if name not in kinds:
        raise InputError(f"{file.path}: the gguf package does not know {name}; upgrade it")
    known = file.package.get_tensor_name_map(kinds[name], config.num_layers)
    names = [spec.name for spec in expected(blueprint(config, jnp.float32)).flat()]
    # The table lacks the output matrix of families that always share it with the embeddings.
    named = {known.get_name(name, (".weight", ".bias")): name for name in names}
    return {"output.weight": "lm_head.weight"} | named


def _layers(file: GgufFile, name: str) -> Any:
    """Return the number of layers, without those that only draft tokens, which come last."""
    count = file.metadata.get(f"{name}.block_count")
    drafting = file.metadata.get(f"{name}.nextn_predict_layers") or 0
    return count - drafting if isinstance(count, int) and isinstance(drafting, int) else count


def _is_drafter(name: str, layers: Any) -> bool:
    """Whether a tensor belongs to a layer after the first `layers`."""
    number = name.split(".", 2)[1] if name.startswith("blk.") else ""
    numbered = number.isdecimal() and len(number) < 9  # Python refuses thousands of digits
    return numbered and isinstance(layers, int) and int(number) >= layers


def _reordered_columns(file: GgufFile) -> int | None:
    """Return how many columns of a head are reordered in GLM-4's files of models with images.

    The pairs of their rotation are half of these columns apart; in the model they are neighbours.
    """
    if not np.any(file.metadata.get("glm4.rope.dimension_sections", 0)):
        return None
    columns = file.metadata.get("glm4.rope.dimension_count")
    if type(columns) is not int or columns < 2 or columns % 2:
        raise InputError(f"{file.path}: rope.dimension_count is {columns!r}; get the file again")
    return columns


def architecture(file: GgufFile) -> tuple[str, Architecture]:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: architecture {name!r} is not supported "
            f"(supported: {', '.join(ARCHITECTURES)})"
        )
    parts = file.metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise UnsupportedModelError(
            f"{file.path}: one of {parts} parts of a model; join them with llama.cpp's "
            "`llama-gguf-split --merge`"
        )
    return name, ARCHITECTURES[name]


def _settings(file: GgufFile) -> dict[str, Any]:
    name, kind = architecture(file)
    data = file.metadata
    hf: dict[str, Any] = {"model_type": kind.model_type, "hidden_act": kind.activation}
    hf["hidden_activation"] = kind.activation  # Gemma's name of it
    hf |= {ours: data.get(f"{name}.{theirs}") for ours, theirs in SETTINGS.items()}
    hf |= {ours: data.get(f"tokenizer.ggml.{theirs}") for ours, theirs in TOKENS.items()}
    hf["num_hidden_layers"] = _layers(file, name)
    hf = {setting: value for setting, value in hf.items() if value is not None}
    hf |= _end_tokens(file) | rope_settings(file, name)
    embedding = file.tensors.get("token_embd.weight")
    hf["vocab_size"] = embedding.shape[0] if embedding else None
    for token in ("bos_token_id", "pad_token_id"):  # in some files an invalid number means none
        if embedding and not 0 <= hf.get(token, 0) < embedding.shape[0]:
            del hf[token]
    hf["tie_word_embeddings"] = "output.weight" not in file.tensors
    bias = "blk.0.attn_q.bias" in file.tensors
    hf |= dict.fromkeys(("attention_bias", "use_bias"), bias)
    hf["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors  # of Command R+
    hf["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    return hf | _special_settings(name, hf, data)


def _special_settings(name: str, hf: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that llama.cpp derives from the architecture instead of storing them."""
    layers = hf.get("num_hidden_layers")
    if not isinstance(layers, int) or not 0 < layers < 10_000:
        return {}  # refused later
    kinds = (FULL, SLIDING)
    if name in ("cohere2", "exaone4"):
        window, pattern = hf.get("sliding_window"), f"{name}.attention.sliding_window_pattern"
        given = data.get(pattern)
        if given is None or isinstance(given, int):
            return {"sliding_window": window, "sliding_window_pattern": given or 4}
        types = [kinds[bool(sliding)] for sliding in given][:layers]
        return {"sliding_window": window, "layer_types": types}
    if name == "mistral3" and data.get("mistral3.attention.temperature_scale"):
        raise UnsupportedModelError("attention.temperature_scale (Ministral 3) is not supported")
    if name == "starcoder2" and layers in (30, 32, 40):  # other sizes are IBM's, without a window
        return {"sliding_window": hf.get("sliding_window", 4096)}
    if name == "smollm3":
        return {"no_rope_layers": [int((i + 1) % 4 != 0) for i in range(layers)]}
    if name == "olmo2" and hf.get("sliding_window"):
        return {"model_type": "olmo3"}
    if name not in ("gemma2", "gemma3"):
        return {}
    # Queries of the 27B models are scaled by the hidden size per head.
    largest = layers == {"gemma2": 46, "gemma3": 62}[name]
    per_head = hf["hidden_size"] // hf["num_attention_heads"] if largest else hf.get("head_dim")
    period = {"gemma2": 2, "gemma3": 6}[name]
    if name == "gemma3" and not hf.get("sliding_window"):
        period = 1  # no windows
    types = [kinds[(i + 1) % period != 0] for i in range(layers)]
    return {"query_pre_attn_scalar": per_head, "layer_types": types}


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


def _read(
    file: GgufFile, name: str, heads: int | None, shift: int, columns: int | None
) -> np.ndarray:
    """Read a tensor, undo the reordering of its `heads` and subtract `shift`.

    By default the columns of a pair, half a head apart, have become neighbours. With `columns`,
    neighbours among the first columns of a head have come apart.
    """
    tensor = file.read(name)
    if heads is not None:
        if type(heads) is not int or heads < 1 or tensor.shape[0] % (2 * heads):
            raise InputError(f"{file.path}: {name} cannot have {heads} heads; get the file again")
        by_head = tensor.reshape(heads, -1, *tensor.shape[1:])
        pairs = (-1, 2) if columns is None else (2, -1)
        moved = by_head[:, :columns].reshape(heads, *pairs, *tensor.shape[1:]).swapaxes(1, 2)
        moved = moved.reshape(heads, -1, *tensor.shape[1:])
        rest = by_head[:, moved.shape[1] :]
        tensor = np.concatenate([moved, rest], axis=1).reshape(tensor.shape)
    return tensor - tensor.dtype.type(shift) if shift else tensor
