"""Table of Hugging Face tensor names and parameter paths for each family.

A row says: the tensor `name`, through `transform`, is part `part` of `parts` of the parameter at
`path`. Parts are joined on the last (output) axis. Matching is strict: one error lists all missing,
unexpected, duplicate and mis-shaped tensors.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from infinigen_jax.checkpoint.hf_folder import TensorSource
from infinigen_jax.errors import InputError
from infinigen_jax.models import Blueprint, Params
from infinigen_jax.models.packed import join

# The longest first. Language models within models of text and images have the first three.
PREFIXES = (
    *("model.language_model.", "language_model.model.", "language_model."),
    *("model.decoder.", "decoder.", "model."),
)
HARMLESS = ("rotary_emb.inv_freq", "decoder.version")  # recomputed or unused
IMAGES = ("vision_tower.", "multi_modal_projector.")  # unused parts of such models
LISTED = 20  # tensors named per kind of error


class Row(NamedTuple):
    """One line of a table; names are relative to the layer, or to the model."""

    name: str
    path: tuple[str, str]
    transform: str
    part: int = 0
    parts: int = 1


def _linear(name: str, module: str, part: int = 0, parts: int = 1) -> list[Row]:
    return [
        Row(f"{name}.weight", (module, "kernel"), "transpose", part, parts),
        Row(f"{name}.bias", (module, "bias"), "keep", part, parts),
    ]


def _norm(name: str, module: str) -> list[Row]:
    return [
        Row(f"{name}.weight", (module, "scale"), "keep"),
        Row(f"{name}.bias", (module, "bias"), "keep"),
    ]


def _gain(name: str, module: str) -> list[Row]:
    """Return the row of a norm whose scale is stored minus 1."""
    return [Row(f"{name}.weight", (module, "scale"), "add one")]


class Table(NamedTuple):
    """A family's rows, and the prefix of its tensors in written files."""

    prefix: str
    embedding: list[Row]
    layer: list[Row]


PROJECTIONS = [
    *_linear("self_attn.q_proj", "q"),
    *_linear("self_attn.k_proj", "kv", 0, 2),
    *_linear("self_attn.v_proj", "kv", 1, 2),
    *_linear("self_attn.o_proj", "o"),
    *_linear("mlp.gate_proj", "gate_up", 0, 2),
    *_linear("mlp.up_proj", "gate_up", 1, 2),
    *_linear("mlp.down_proj", "down"),
]
LLAMA = Table(
    prefix="model.",
    embedding=[
        Row("embed_tokens.weight", ("tokens", "embedding"), "keep"),
        *_norm("norm", "norm"),
        *_linear("lm_head", "head"),
    ],
    layer=[
        *_norm("input_layernorm", "attention_norm"),
        *_norm("post_attention_layernorm", "mlp_norm"),
        *PROJECTIONS,
    ],
)
GEMMA2 = LLAMA._replace(
    embedding=[LLAMA.embedding[0], *_gain("norm", "norm"), *_linear("lm_head", "head")],
    layer=[
        *_gain("input_layernorm", "attention_norm"),
        *_gain("post_attention_layernorm", "attention_post_norm"),
        *_gain("pre_feedforward_layernorm", "mlp_norm"),
        *_gain("post_feedforward_layernorm", "mlp_post_norm"),
        *PROJECTIONS,
    ],
)

TABLES = {
    "gemma2": GEMMA2,
    "gemma3": GEMMA2._replace(
        layer=[
            *GEMMA2.layer,
            *_gain("self_attn.q_norm", "q_norm"),
            *_gain("self_attn.k_norm", "k_norm"),
        ]
    ),
    "llama": LLAMA,
    "mistral": LLAMA,
    "ministral": LLAMA,
    "qwen2": LLAMA,
    "smollm3": LLAMA,
    "phi3": LLAMA._replace(
        layer=[
            *_norm("input_layernorm", "attention_norm"),
            *_linear("self_attn.qkv_proj", "qkv"),
            *_linear("self_attn.o_proj", "o"),
            *_norm("post_attention_layernorm", "mlp_norm"),
            *_linear("mlp.gate_up_proj", "gate_up"),
            *_linear("mlp.down_proj", "down"),
        ]
    ),
    "qwen3": LLAMA._replace(
        layer=[
            *LLAMA.layer,
            *_norm("self_attn.q_norm", "q_norm"),
            *_norm("self_attn.k_norm", "k_norm"),
        ]
    ),
    "opt": Table(
        prefix="model.decoder.",
        embedding=[
            Row("embed_tokens.weight", ("tokens", "embedding"), "keep"),
            Row("embed_positions.weight", ("positions", "embedding"), "keep"),
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

# From the file to the parameter.
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "keep": lambda x: x,
    "transpose": lambda x: x.T,
    "add one": lambda x: x.astype("float32") + 1,
}


class Slot(NamedTuple):
    """A tensor that a model of this shape must have: its full name and shape in the file."""

    name: str
    shape: tuple[int, ...]
    row: Row


class Slots(NamedTuple):
    """Every tensor of a model, grouped like the parameters."""

    embedding: list[Slot]
    layers: list[list[Slot]]

    def flat(self) -> list[Slot]:
        """Return all tensors, the embedding's first."""
        return [*self.embedding, *(slot for layer in self.layers for slot in layer)]


def expected(blueprint: Blueprint) -> Slots:
    """List the tensors of a checkpoint of this architecture."""
    table = TABLES[blueprint.config.family]
    shapes = blueprint.layer_shapes
    if any(row.path[0] == "qkv" for row in table.layer):
        shapes = jax.eval_shape(join, shapes)

    def slots(rows: Sequence[Row], shapes: Params, prefix: str) -> list[Slot]:
        return [
            Slot(_full_name(row.name, prefix), _file_shape(row, leaf.shape), row)
            for row in rows
            if (leaf := shapes.get(row.path[0], {}).get(row.path[1])) is not None
        ]

    layers = [
        slots(table.layer, shapes, f"{table.prefix}layers.{i}.")
        for i in range(blueprint.config.num_layers)
    ]
    return Slots(slots(table.embedding, blueprint.embedding_shapes, table.prefix), layers)


def match(
    tensors: Mapping[str, TensorSource], blueprint: Blueprint, where: Any
) -> dict[str, TensorSource]:
    """Match every expected tensor with one in the checkpoint, whatever prefix it carries.

    Returns:
        The source of each tensor, by its name in `expected`.
    """
    slots = {_stem(slot.name): slot for slot in expected(blueprint).flat()}
    matches: dict[str, TensorSource] = {}
    doubled, unexpected, problems = [], [], []
    for name, tensor in tensors.items():
        stem = _stem(name)
        if stem in matches:
            doubled.append(f"{matches[stem].name} and {name}")
        elif stem in slots:
            matches[stem] = tensor
        elif not _is_harmless(name, stem, tensors, blueprint.config.tie_embeddings):
            tied = stem == "lm_head.weight" and blueprint.config.tie_embeddings
            why = " which differs from the embeddings it is tied to" if tied else ""
            unexpected.append(f"{name} {tensor.shape}{why}")
    for stem, slot in slots.items():
        if stem in matches and matches[stem].shape != slot.shape:
            problems.append(f"{matches[stem].name} {matches[stem].shape} instead of {slot.shape}")
    integers = [
        f"{matches[s].name} as {matches[s].dtype}"
        for s in matches
        if matches[s].dtype.kind in "iub"
    ]
    missing = [f"{slot.name} {slot.shape}" for stem, slot in slots.items() if stem not in matches]
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
    return {slot.name: matches[stem] for stem, slot in slots.items()}


def read_tree(
    slots: Sequence[Slot],
    sources: Mapping[str, TensorSource],
    join: Callable[[list[np.ndarray], str], Any],
) -> Params:
    """Read the parameters of the embedding or of a layer; see `Blueprint.complete`.

    Args:
        join: makes one parameter from its parts and the name of their transform.
    """
    params: Params = {}
    for path in dict.fromkeys(slot.row.path for slot in slots):
        rows = sorted((s for s in slots if s.row.path == path), key=lambda slot: slot.row.part)
        parts = [sources[slot.name].read() for slot in rows]
        params.setdefault(path[0], {})[path[1]] = join(parts, rows[0].row.transform)
    return params


def _full_name(name: str, prefix: str) -> str:
    return name if name.startswith("lm_head.") else prefix + name


def _file_shape(row: Row, shape: Sequence[int]) -> tuple[int, ...]:
    part = (*shape[:-1], shape[-1] // row.parts)
    return part[::-1] if row.transform == "transpose" else part


@functools.cache
def _stem(name: str) -> str:
    prefix = next((p for p in PREFIXES if name.startswith(p)), "")
    return name.removeprefix(prefix)


def _is_harmless(name: str, stem: str, tensors: Mapping[str, TensorSource], tied: bool) -> bool:
    if name.endswith(HARMLESS) or stem.startswith(IMAGES):
        return True
    if stem != "lm_head.weight" or not tied:
        return False
    twins = [t for other, t in tensors.items() if _stem(other) == "embed_tokens.weight"]
    # Two different matrices under one tied name: one of them would be lost silently.
    return bool(twins) and _same(twins[0], tensors[name])


def _same(first: TensorSource, second: TensorSource) -> bool:
    if first.shape != second.shape:
        return False
    a, b = first.read(), second.read()
    step = 4096  # rows at a time, to bound the temporaries
    return all(np.array_equal(a[i : i + step], b[i : i + step]) for i in range(0, a.shape[0], step))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
