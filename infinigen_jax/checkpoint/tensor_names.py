"""Table of Hugging Face tensor names and parameter paths for each family.

A rule says: the stored module `name` is part `part` of `parts` of the module `module`. Parts are
joined on the first (output) axis. Matching is strict: one error lists all missing, unexpected,
duplicate and mis-shaped tensors.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from infinigen_jax.checkpoint.tensor_source import TensorSource, is_float
from infinigen_jax.errors import InputError
from infinigen_jax.models import Blueprint, Params
from infinigen_jax.models.linear import join

# The longest first. Language models within models of text and images have the first three.
PREFIXES = (
    *("model.language_model.", "language_model.model.", "language_model."),
    *("model.decoder.", "decoder.", "model.", "transformer."),
)
# Parts of names that a family's published files have in place of LLaMA's.
RENAMED = {
    "exaone": {
        ".wte.": ".embed_tokens.",
        ".h.": ".layers.",
        ".ln_f.": ".norm.",
        ".attn.attention.": ".self_attn.",
        ".out_proj.": ".o_proj.",
        ".ln_1.": ".input_layernorm.",
        ".ln_2.": ".post_attention_layernorm.",
        ".c_fc_0.": ".gate_proj.",
        ".c_fc_1.": ".up_proj.",
        ".c_proj.": ".down_proj.",
    }
}
# Recomputed, constant or unused.
HARMLESS = (
    *("rotary_emb.inv_freq", "rotary.inv_freq", "decoder.version"),
    *("act_fn.beta", "act_fn.eps"),
)
# Unused parts: of models of text and images, and drafters.
UNUSED = (
    *("vision_tower.", "multi_modal_projector.", "visual.", "embed_vision.", "audio_tower."),
    *("embed_audio.", "vision_embedder.", "vision_adapter.", "vision_projection."),
    *("vision_tokenizer.", "audio_tokenizer.", "mtp."),
)
LISTED = 20  # tensors named per kind of error
# Endings of names in files, by names of parameters, in the order of written files.
ENDINGS = {
    **dict.fromkeys(("weight", "scale", "embedding"), "weight"),
    **{"bias": "bias", "positive": "alpha_p", "negative": "alpha_n", "factor": "layer_scalar"},
}


class Rule(NamedTuple):
    """Line of a table, relative to layer or model; ignored by models without the module."""

    name: str
    module: str
    part: int = 0
    parts: int = 1


QKV = [
    Rule("self_attn.q_proj", "q"),
    Rule("self_attn.k_proj", "kv", 0, 2),
    Rule("self_attn.v_proj", "kv", 1, 2),
]
# In place of the last two, if values are the projected keys.
KEYS = Rule("self_attn.k_proj", "kv")
ATTENTION = [*QKV, Rule("self_attn.o_proj", "o")]
DOWN = Rule("mlp.down_proj", "down")
MLP = [
    Rule("mlp.gate_proj", "gate_up", 0, 2),
    Rule("mlp.up_proj", "gate_up", 1, 2),
    Rule("mlp.up_proj", "up"),  # without gate
    DOWN,
]
JOINED_MLP = [Rule("mlp.gate_up_proj", "gate_up"), DOWN]
ATTENTION_NORM = Rule("input_layernorm", "attention_norm")
PRE_NORMS = [ATTENTION_NORM, Rule("post_attention_layernorm", "mlp_norm")]
ATTENTION_POST_NORM = Rule("post_attention_layernorm", "attention_post_norm")
MLP_POST_NORM = Rule("post_feedforward_layernorm", "mlp_post_norm")
HEAD_NORMS = [Rule("self_attn.q_norm", "q_norm"), Rule("self_attn.k_norm", "k_norm")]

BODY = [*ATTENTION, *HEAD_NORMS, *MLP]
LLAMA = [*PRE_NORMS, *BODY]  # of families that TABLES lacks
OLMO = [*ATTENTION, *HEAD_NORMS, ATTENTION_POST_NORM, MLP_POST_NORM, *MLP]
GEMMA = [
    ATTENTION_NORM,
    ATTENTION_POST_NORM,
    Rule("pre_feedforward_layernorm", "mlp_norm"),
    MLP_POST_NORM,
    *BODY,
]

TABLES = {
    **dict.fromkeys(("exaone4", "olmo2", "olmo3"), OLMO),
    **dict.fromkeys(("gemma2", "gemma3", "vaultgemma"), GEMMA),
    "gemma4": [*GEMMA, Rule("", "output")],
    "muse_glimmer": [*GEMMA, Rule("self_attn.gate_proj", "gate")],
    "apertus": [
        Rule("attention_layernorm", "attention_norm"),
        Rule("feedforward_layernorm", "mlp_norm"),
        *BODY,
        Rule("mlp.act_fn", "activation"),
    ],
    "glm": [*PRE_NORMS, *ATTENTION, *JOINED_MLP],
    "glm4": [
        *PRE_NORMS,
        Rule("post_self_attn_layernorm", "attention_post_norm"),
        Rule("post_mlp_layernorm", "mlp_post_norm"),
        *ATTENTION,
        *JOINED_MLP,
    ],
    "granitemoehybrid": [
        *PRE_NORMS,
        *ATTENTION,
        Rule("shared_mlp.input_linear", "gate_up"),
        Rule("shared_mlp.output_linear", "down"),
    ],
    "hunyuan_v1_dense": [
        *PRE_NORMS,
        *ATTENTION,
        Rule("self_attn.query_layernorm", "q_norm"),
        Rule("self_attn.key_layernorm", "k_norm"),
        *MLP,
    ],
    "hyperclovax": [
        *PRE_NORMS,
        Rule("post_norm1", "attention_post_norm"),
        Rule("post_norm2", "mlp_post_norm"),
        *BODY,
    ],
    "phi3": [
        *PRE_NORMS,
        Rule("self_attn.qkv_proj", "qkv"),
        Rule("self_attn.o_proj", "o"),
        *JOINED_MLP,
    ],
    "starcoder2": [
        *PRE_NORMS,
        *ATTENTION,
        Rule("mlp.c_fc", "up"),
        Rule("mlp.c_proj", "down"),
    ],
    "opt": [
        Rule("self_attn_layer_norm", "attention_norm"),
        *QKV,
        Rule("self_attn.out_proj", "o"),
        Rule("final_layer_norm", "mlp_norm"),
        Rule("fc1", "up"),
        Rule("fc2", "down"),
    ],
}


class TensorSpec(NamedTuple):
    """A tensor that a model of this shape must have: its full name and shape in the file.

    It is part `part` of the parameter at `path`; a `gain` is stored minus 1.
    """

    name: str
    shape: tuple[int, ...]
    path: tuple[str, str]
    part: int = 0
    gain: bool = False

    @property
    def is_matrix(self) -> bool:
        """Whether its parameter can be small, see `models.small_weights.shrink`."""
        return self.path[1] == "weight" or self.path[0] == "tokens"


class TensorSpecs(NamedTuple):
    """Every tensor of a model, grouped like the parameters."""

    embedding: list[TensorSpec]
    layers: list[list[TensorSpec]]

    def flat(self) -> list[TensorSpec]:
        """Return all tensors, the embedding's first."""
        return [*self.embedding, *(spec for layer in self.layers for spec in layer)]


def expected(blueprint: Blueprint) -> TensorSpecs:
    """List the tensors of a checkpoint of this architecture."""
    config = blueprint.config
    opt = config.family == "opt"
    prefix = "model.decoder." if opt else "model."
    embedding = [
        Rule("embed_tokens", "tokens"),
        Rule("embed_positions", "positions"),
        Rule("final_layer_norm" if opt else "norm", "norm"),
        Rule("lm_head", "head"),
    ]
    layer = TABLES.get(config.family, LLAMA)
    joined = any(rule.module == "qkv" for rule in layer)

    def specs(rules: Sequence[Rule], shapes: Params, prefix: str) -> list[TensorSpec]:
        found = []
        for rule in rules:
            leaves = shapes.get(rule.module, {})
            for leaf, ending in ENDINGS.items():
                if leaf in leaves:
                    name = f"{rule.name}.{ending}".removeprefix(".")
                    name = name if rule.module == "head" else prefix + name
                    size, *others = leaves[leaf].shape
                    shape, path = (size // rule.parts, *others), (rule.module, leaf)
                    gain = leaf == "scale" and config.minus_one(rule.module)
                    found.append(TensorSpec(name, shape, path, rule.part, gain))
        return found

    def specs_of(number: int) -> list[TensorSpec]:
        shapes, rules = blueprint.of(number).layer_shapes, layer
        if joined:
            shapes = jax.eval_shape(join, shapes)
        if config.of(number).values_from_keys:
            rules = [KEYS if rule == QKV[1] else rule for rule in layer if rule != QKV[2]]
        return specs(rules, shapes, f"{prefix}layers.{number}.")

    return TensorSpecs(
        specs(embedding, blueprint.embedding_shapes, prefix),
        [specs_of(i) for i in range(config.num_layers)],
    )


def match(
    tensors: Mapping[str, TensorSource], blueprint: Blueprint, where: Any
) -> dict[str, TensorSource]:
    """Return the source of each tensor in `expected`, whatever prefix a checkpoint's names have."""
    config = blueprint.config
    specs = {_stem(spec.name): spec for spec in expected(blueprint).flat()}
    matches: dict[str, TensorSource] = {}
    tied_heads: list[TensorSource] = []
    kinds = ("missing", "unexpected", "doubled", "wrong shape", "not floating point")
    errors: dict[str, list[str]] = {kind: [] for kind in kinds}
    for name, tensor in tensors.items():
        stem = _renamed(_stem(name), config.family)
        if stem in matches:
            errors["doubled"].append(f"{matches[stem].name} and {name}")
        elif stem in specs:
            matches[stem] = tensor
        elif stem == "lm_head.weight" and config.tie_embeddings:
            tied_heads.append(tensor)
        elif not (name.endswith(HARMLESS) or stem.startswith(UNUSED) or _no_bias(tensor)):
            errors["unexpected"].append(f"{name} {tensor.shape}")
    for head in tied_heads:
        # Two different matrices under one tied name: one of them would be lost silently.
        twin = matches.get("embed_tokens.weight")
        if twin is None or not _same(twin, head):
            why = "which differs from the embeddings it is tied to"
            errors["unexpected"].append(f"{head.name} {head.shape} {why}")
    for stem, spec in specs.items():
        if (tensor := matches.get(stem)) is None:
            errors["missing"].append(f"{spec.name} {spec.shape}")
            continue
        if tensor.shape != spec.shape:
            errors["wrong shape"].append(f"{tensor.name} {tensor.shape} instead of {spec.shape}")
        if not is_float(tensor):
            errors["not floating point"].append(f"{tensor.name} as {tensor.dtype}")
    report = "; ".join(f"{kind}: {_listed(names)}" for kind, names in errors.items() if names)
    if report:
        raise InputError(
            f"{where}: the weights do not fit config.json: {report}; get the folder again"
        )
    return {spec.name: matches[stem] for stem, spec in specs.items()}


def read_tree(
    specs: Sequence[TensorSpec],
    sources: Mapping[str, TensorSource],
    dtype: Any,
    of_matrices: Any = None,
) -> Params:
    """Read the parameters of the embedding or of a layer; see `Blueprint.complete`.

    Matrices (`TensorSpec.is_matrix`) have the dtype `of_matrices`, if it is given.
    """
    params: Params = {}
    for path in dict.fromkeys(spec.path for spec in specs):
        chosen = sorted((s for s in specs if s.path == path), key=lambda spec: spec.part)
        parts = [sources[spec.name].read() for spec in chosen]
        wanted = dtype if of_matrices is None or not chosen[0].is_matrix else of_matrices
        params.setdefault(path[0], {})[path[1]] = _parameter(parts, chosen[0].gain, wanted)
    return params


def _parameter(parts: list[np.ndarray], gain: bool, dtype: Any) -> Array:
    """Join a parameter from its parts on the device; a gain is float32 (see `gemma2`)."""
    dtype = jnp.dtype(jnp.float32 if gain else dtype)
    if len(parts) == 1 and parts[0].dtype == dtype and not gain:
        # Not the mapped file itself, which may be overwritten while the model is in use. On a CPU
        # JAX would alias it, `may_alias=False` or not.
        return jax.device_put(np.array(parts[0]))
    return _cast([jax.device_put(part) for part in parts], gain, dtype)


@functools.partial(jax.jit, static_argnames=("gain", "dtype"))
def _cast(parts: list[Array], gain: bool, dtype: Any) -> Array:
    parts = [part.astype(dtype) for part in parts]
    return jnp.concatenate([part + 1 for part in parts] if gain else parts)


@functools.cache
def _stem(name: str) -> str:
    prefix = next((p for p in PREFIXES if name.startswith(p)), "")
    return name.removeprefix(prefix)


def _renamed(stem: str, family: str) -> str:
    name = f".{stem}"
    for old, new in RENAMED.get(family, {}).items():
        name = name.replace(old, new)
    return name[1:]


def _no_bias(tensor: TensorSource) -> bool:
    """Whether a tensor is a bias of zeros, as some GPTQ files have for every matrix."""
    return tensor.name.endswith(".bias") and not np.any(tensor.read())


def _same(first: TensorSource, second: TensorSource) -> bool:
    if first.shape != second.shape:
        return False
    a, b = first.read(), second.read()
    step = 4096  # rows at a time, to bound the temporaries
    return all(np.array_equal(a[i : i + step], b[i : i + step]) for i in range(0, a.shape[0], step))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
