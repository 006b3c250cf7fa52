"""Which Hugging Face tensor is which parameter: one table a family, used in both directions.

A row says: the tensor `name`, through `transform`, is part `part` of `parts` of the parameter at
`path`, parts being joined on the last (output) axis. Matching is strict: everything missing,
unexpected, doubled or mis-shaped is collected and reported at once.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from infinigen_jax.checkpoint.hf_folder import TensorSource
from infinigen_jax.errors import InputError
from infinigen_jax.models import Blueprint, Params

PREFIXES = ("model.decoder.", "decoder.", "model.")
HARMLESS = ("rotary_emb.inv_freq", "decoder.version")  # recomputed, or of no meaning
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


class Table(NamedTuple):
    """A family's rows, and the prefix that its tensors carry when written."""

    prefix: str
    embedding: list[Row]
    layer: list[Row]


LLAMA = Table(
    prefix="model.",
    embedding=[
        Row("embed_tokens.weight", ("tokens", "embedding"), "keep"),
        *_norm("norm", "norm"),
        *_linear("lm_head", "head"),
    ],
    layer=[
        *_norm("input_layernorm", "attention_norm"),
        *_linear("self_attn.q_proj", "q"),
        *_linear("self_attn.k_proj", "kv", 0, 2),
        *_linear("self_attn.v_proj", "kv", 1, 2),
        *_linear("self_attn.o_proj", "o"),
        *_norm("post_attention_layernorm", "mlp_norm"),
        *_linear("mlp.gate_proj", "gate_up", 0, 2),
        *_linear("mlp.up_proj", "gate_up", 1, 2),
        *_linear("mlp.down_proj", "down"),
    ],
)

TABLES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "ministral": LLAMA,
    "qwen2": LLAMA,
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

# Both are their own inverse, which is what lets one table serve reading and writing.
TRANSFORMS: dict[str, Callable[[Any], Any]] = {"keep": lambda x: x, "transpose": lambda x: x.T}


class Slot(NamedTuple):
    """A tensor that a model of this shape must have: its full name and shape in the file."""

    name: str
    shape: tuple[int, ...]
    row: Row


class Slots(NamedTuple):
    """Every tensor of a model, by the part of the parameters it belongs to."""

    embedding: list[Slot]
    layers: list[list[Slot]]

    def flat(self) -> list[Slot]:
        return [*self.embedding, *(slot for layer in self.layers for slot in layer)]


def expected(blueprint: Blueprint) -> Slots:
    """The tensors that a checkpoint of this architecture consists of."""
    table = TABLES[blueprint.config.family]

    def slots(rows: Sequence[Row], shapes: Params, prefix: str) -> list[Slot]:
        return [
            Slot(_full_name(row.name, prefix), _file_shape(row, leaf.shape), row)
            for row in rows
            if (leaf := shapes.get(row.path[0], {}).get(row.path[1])) is not None
        ]

    layers = [
        slots(table.layer, blueprint.layer_shapes, f"{table.prefix}layers.{i}.")
        for i in range(blueprint.config.num_layers)
    ]
    return Slots(slots(table.embedding, blueprint.embedding_shapes, table.prefix), layers)


def match(
    tensors: Mapping[str, TensorSource], blueprint: Blueprint, where: Any
) -> dict[str, TensorSource]:
    """Find every expected tensor, whatever prefix it carries.

    Args:
        tensors: what the checkpoint holds.
        blueprint: what it should hold.
        where: the folder, for the error message.

    Returns:
        The source of each tensor, by its name in `expected`.

    Raises:
        InputError: one line with all missing, unexpected, doubled and mis-shaped tensors.
    """
    slots = {_stem(slot.name): slot for slot in expected(blueprint).flat()}
    found: dict[str, TensorSource] = {}
    doubled, unexpected, problems = [], [], []
    for name, tensor in tensors.items():
        stem = _stem(name)
        if stem in found:
            doubled.append(f"{found[stem].name} and {name}")
        elif stem in slots:
            found[stem] = tensor
        elif not _is_harmless(name, stem, tensors, blueprint.config.tie_embeddings):
            tied = stem == "lm_head.weight" and blueprint.config.tie_embeddings
            why = " which differs from the embeddings it is tied to" if tied else ""
            unexpected.append(f"{name} {tensor.shape}{why}")
    for stem, slot in slots.items():
        if stem in found and found[stem].shape != slot.shape:
            problems.append(f"{found[stem].name} {found[stem].shape} instead of {slot.shape}")
    kinds = [f"{found[s].name} as {found[s].dtype}" for s in found if found[s].dtype.kind in "iub"]
    missing = [f"{slot.name} {slot.shape}" for stem, slot in slots.items() if stem not in found]
    errors = {
        "missing": missing,
        "unexpected": unexpected,
        "doubled": doubled,
        "wrong shape": problems,
        "not floating point": kinds,
    }
    report = "; ".join(f"{kind}: {_listed(names)}" for kind, names in errors.items() if names)
    if report:
        raise InputError(
            f"{where}: the weights do not fit config.json: {report}; get the folder again"
        )
    return {slot.name: found[stem] for stem, slot in slots.items()}


def read_tree(
    slots: Sequence[Slot],
    sources: Mapping[str, TensorSource],
    join: Callable[[list[np.ndarray], str], Any],
) -> Params:
    """Read the parameters of a layer (or of the embedding).

    Args:
        slots: which tensors.
        sources: where they are, from `match`.
        join: makes one parameter of its parts, given the name of their transform.
    """
    params: Params = {}
    for path in dict.fromkeys(slot.row.path for slot in slots):
        rows = sorted((s for s in slots if s.row.path == path), key=lambda slot: slot.row.part)
        parts = [sources[slot.name].read() for slot in rows]
        params.setdefault(path[0], {})[path[1]] = join(parts, rows[0].row.transform)
    return params


def write_tree(slots: Sequence[Slot], params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """The other direction: parameters of a layer as named tensors in the file's layout."""
    for slot in slots:
        whole = np.asarray(params[slot.row.path[0]][slot.row.path[1]])
        part = np.split(whole, slot.row.parts, axis=-1)[slot.row.part]
        yield slot.name, TRANSFORMS[slot.row.transform](part)


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
    if name.endswith(HARMLESS):
        return True
    if stem != "lm_head.weight" or not tied:
        return False
    twins = [t for other, t in tensors.items() if _stem(other) == "embed_tokens.weight"]
    # Two different matrices under one tied name would silently lose one of them.
    return bool(twins) and _same(twins[0], tensors[name])


def _same(first: TensorSource, second: TensorSource) -> bool:
    if first.shape != second.shape:
        return False
    a, b = first.read(), second.read()
    step = 4096  # rows at a time: comparing makes temporaries
    return all(np.array_equal(a[i : i + step], b[i : i + step]) for i in range(0, a.shape[0], step))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
