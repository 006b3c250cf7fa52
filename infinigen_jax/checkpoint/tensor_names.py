"""Table of Hugging Face tensor names and parameter paths for each family.

A rule says: the tensor `name` is part `part` of `parts` of the parameter at `path`. Parts are
joined on the first (output) axis. Matching is strict: one error lists all missing, unexpected,
duplicate and mis-shaped tensors.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from infinigen_jax.checkpoint.hf_folder import TensorSource
from infinigen_jax.errors import InputError
from infinigen_jax.models import Blueprint, ModelConfig, Params
from infinigen_jax.models.packed import join

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
UNUSED = ("vision_tower.", "multi_modal_projector.", "visual.", "mtp.")
LISTED = 20  # tensors named per kind of error


class Rule(NamedTuple):
    """Line of a table, relative to layer or model; a `gain` is a norm's scale stored minus 1."""

    name: str
    path: tuple[str, str]
    part: int = 0
    parts: int = 1
    gain: bool = False


def _linear(name: str, module: str, part: int = 0, parts: int = 1) -> list[Rule]:
    return [
        Rule(f"{name}.weight", (module, "weight"), part, parts),
        Rule(f"{name}.bias", (module, "bias"), part, parts),
    ]


def _norm(name: str, module: str) -> list[Rule]:
    return [
        Rule(f"{name}.weight", (module, "scale")),
        Rule(f"{name}.bias", (module, "bias")),
    ]


class Table(NamedTuple):
    """A family's rules, and the prefix of its tensors in written files.

    Rules of parameters that a model lacks are ignored.
    """

    prefix: str
    embedding: list[Rule]
    layer: list[Rule]


ATTENTION = [
    *_linear("self_attn.q_proj", "q"),
    *_linear("self_attn.k_proj", "kv", 0, 2),
    *_linear("self_attn.v_proj", "kv", 1, 2),
    *_linear("self_attn.o_proj", "o"),
]
DOWN = _linear("mlp.down_proj", "down")
MLP = [
    *_linear("mlp.gate_proj", "gate_up", 0, 2),
    *_linear("mlp.up_proj", "gate_up", 1, 2),
    *_linear("mlp.up_proj", "up"),  # without gate
    *DOWN,
]
JOINED_MLP = [*_linear("mlp.gate_up_proj", "gate_up"), *DOWN]
PRE_NORMS = [
    *_norm("input_layernorm", "attention_norm"),
    *_norm("post_attention_layernorm", "mlp_norm"),
]
POST_NORMS = [
    *_norm("post_attention_layernorm", "attention_post_norm"),
    *_norm("post_feedforward_layernorm", "mlp_post_norm"),
]
HEAD_NORMS = [*_norm("self_attn.q_norm", "q_norm"), *_norm("self_attn.k_norm", "k_norm")]
EMBEDDING = [
    Rule("embed_tokens.weight", ("tokens", "embedding")),
    *_norm("norm", "norm"),
    *_linear("lm_head", "head"),
]
GEMMA_NORMS = [
    *_norm("input_layernorm", "attention_norm"),
    *_norm("post_attention_layernorm", "attention_post_norm"),
    *_norm("pre_feedforward_layernorm", "mlp_norm"),
    *_norm("post_feedforward_layernorm", "mlp_post_norm"),
]


def _table(*layer: list[Rule], gains: bool = False) -> Table:
    """Return a table of rules; with `gains`, the scales of norms are stored minus 1."""

    def stored(rule: Rule) -> Rule:
        return rule._replace(gain=gains and rule.path[1] == "scale")

    return Table("model.", [*map(stored, EMBEDDING)], [*map(stored, itertools.chain(*layer))])


LLAMA = _table(PRE_NORMS, ATTENTION, HEAD_NORMS, MLP)  # of families that TABLES lacks
OLMO = _table(ATTENTION, HEAD_NORMS, POST_NORMS, MLP)
GEMMA = _table(GEMMA_NORMS, ATTENTION, HEAD_NORMS, MLP, gains=True)

TABLES = {
    **dict.fromkeys(("exaone4", "olmo2", "olmo3"), OLMO),
    **dict.fromkeys(("gemma", "nemotron"), _table(PRE_NORMS, ATTENTION, MLP, gains=True)),
    **dict.fromkeys(("gemma2", "gemma3", "vaultgemma"), GEMMA),
    "apertus": _table(
        _norm("attention_layernorm", "attention_norm"),
        _norm("feedforward_layernorm", "mlp_norm"),
        ATTENTION,
        HEAD_NORMS,
        MLP,
        [Rule("mlp.act_fn.alpha_p", ("activation", "positive"))],
        [Rule("mlp.act_fn.alpha_n", ("activation", "negative"))],
    ),
    "glm": _table(PRE_NORMS, ATTENTION, JOINED_MLP),
    "glm4": _table(
        PRE_NORMS,
        _norm("post_self_attn_layernorm", "attention_post_norm"),
        _norm("post_mlp_layernorm", "mlp_post_norm"),
        ATTENTION,
        JOINED_MLP,
    ),
    "hunyuan_v1_dense": _table(
        PRE_NORMS,
        ATTENTION,
        _norm("self_attn.query_layernorm", "q_norm"),
        _norm("self_attn.key_layernorm", "k_norm"),
        MLP,
    ),
    "hyperclovax": _table(
        PRE_NORMS,
        _norm("post_norm1", "attention_post_norm"),
        _norm("post_norm2", "mlp_post_norm"),
        ATTENTION,
        MLP,
    ),
    "phi3": _table(
        PRE_NORMS,
        _linear("self_attn.qkv_proj", "qkv"),
        _linear("self_attn.o_proj", "o"),
        JOINED_MLP,
    ),
    "starcoder2": _table(
        PRE_NORMS, ATTENTION, _linear("mlp.c_fc", "up"), _linear("mlp.c_proj", "down")
    ),
    "opt": Table(
        prefix="model.decoder.",
        embedding=[
            Rule("embed_tokens.weight", ("tokens", "embedding")),
            Rule("embed_positions.weight", ("positions", "embedding")),
            *_norm("final_layer_norm", "norm"),
            *_linear("lm_head", "head"),
        ],
        layer=[
            *_norm("self_attn_layer_norm", "attention_norm"),
            *_linear("self_attn.q_proj", "q"),
            *_linear("self_attn.k_proj", "kv", 0, 2),
            *_linear("self_attn.v_proj", "kv", 1, 2),
            *_linear("self_attn.out_proj", "o"),
            *_norm("final_layer_norm", "mlp_norm"),
            *_linear("fc1", "up"),
            *_linear("fc2", "down"),
        ],
    ),
}


class TensorSpec(NamedTuple):
    """A tensor that a model of this shape must have: its full name and shape in the file."""

    name: str
    shape: tuple[int, ...]
    rule: Rule


class TensorSpecs(NamedTuple):
    """Every tensor of a model, grouped like the parameters."""

    embedding: list[TensorSpec]
    layers: list[list[TensorSpec]]

    def flat(self) -> list[TensorSpec]:
        """Return all tensors, the embedding's first."""
        return [*self.embedding, *(spec for layer in self.layers for spec in layer)]


def expected(blueprint: Blueprint) -> TensorSpecs:
    """List the tensors of a checkpoint of this architecture."""
    table = TABLES.get(blueprint.config.family, LLAMA)
    shapes = blueprint.layer_shapes
    if any(rule.path[0] == "qkv" for rule in table.layer):
        shapes = jax.eval_shape(join, shapes)

    def specs(rules: Sequence[Rule], shapes: Params, prefix: str) -> list[TensorSpec]:
        return [
            TensorSpec(
                _full_name(rule.name, prefix), (leaf.shape[0] // rule.parts, *leaf.shape[1:]), rule
            )
            for rule in rules
            if (leaf := shapes.get(rule.path[0], {}).get(rule.path[1])) is not None
        ]

    layers = [
        specs(table.layer, shapes, f"{table.prefix}layers.{i}.")
        for i in range(blueprint.config.num_layers)
    ]
    return TensorSpecs(specs(table.embedding, blueprint.embedding_shapes, table.prefix), layers)


def match(
    tensors: Mapping[str, TensorSource], blueprint: Blueprint, where: Any
) -> dict[str, TensorSource]:
    """Return the source of each tensor in `expected`, whatever prefix a checkpoint's names have."""
    specs = {_stem(spec.name): spec for spec in expected(blueprint).flat()}
    matches: dict[str, TensorSource] = {}
    doubled, unexpected, problems = [], [], []
    for name, tensor in tensors.items():
        stem = _renamed(_stem(name), blueprint.config.family)
        if stem in matches:
            doubled.append(f"{matches[stem].name} and {name}")
        elif stem in specs:
            matches[stem] = tensor
        elif not _is_harmless(name, stem, tensors, blueprint.config):
            tied = stem == "lm_head.weight" and blueprint.config.tie_embeddings
            why = " which differs from the embeddings it is tied to" if tied else ""
            unexpected.append(f"{name} {tensor.shape}{why}")
    for stem, spec in specs.items():
        if stem in matches and matches[stem].shape != spec.shape:
            problems.append(f"{matches[stem].name} {matches[stem].shape} instead of {spec.shape}")
    integers = [
        f"{matches[s].name} as {matches[s].dtype}"
        for s in matches
        if matches[s].dtype.kind in "iub"
    ]
    missing = [f"{spec.name} {spec.shape}" for stem, spec in specs.items() if stem not in matches]
    errors = {
        "missing": missing,
        "unexpected": unexpected,
        "doubled": doubled,
        "wrong shape": problems,
        "not floating point": integers,
    }
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
) -> Params:
    """Read the parameters of the embedding or of a layer; see `Blueprint.complete`."""
    params: Params = {}
    for path in dict.fromkeys(spec.rule.path for spec in specs):
        chosen = sorted((s for s in specs if s.rule.path == path), key=lambda spec: spec.rule.part)
        parts = [sources[spec.name].read() for spec in chosen]
        params.setdefault(path[0], {})[path[1]] = _parameter(parts, chosen[0].rule.gain, dtype)
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


def _full_name(name: str, prefix: str) -> str:
    return name if name.startswith("lm_head.") else prefix + name


@functools.cache
def _stem(name: str) -> str:
    prefix = next((p for p in PREFIXES if name.startswith(p)), "")
    return name.removeprefix(prefix)


def _renamed(stem: str, family: str) -> str:
    name = f".{stem}"
    for old, new in RENAMED.get(family, {}).items():
        name = name.replace(old, new)
    return name[1:]


def _is_harmless(
    name: str, stem: str, tensors: Mapping[str, TensorSource], config: ModelConfig
) -> bool:
    if name.endswith(HARMLESS) or stem.startswith(UNUSED):
        return True
    if stem != "lm_head.weight" or not config.tie_embeddings:
        return False
    stems = {_renamed(_stem(other), config.family): tensor for other, tensor in tensors.items()}
    twin = stems.get("embed_tokens.weight")
    # Two different matrices under one tied name: one of them would be lost silently.
    return twin is not None and _same(twin, tensors[name])


def _same(first: TensorSource, second: TensorSource) -> bool:
    if first.shape != second.shape:
        return False
    a, b = first.read(), second.read()
    step = 4096  # rows at a time, to bound the temporaries
    return all(np.array_equal(a[i : i + step], b[i : i + step]) for i in range(0, a.shape[0], step))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
