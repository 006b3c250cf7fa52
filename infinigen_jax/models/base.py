"""Interface of the model families: their configuration and their modules.

A family is one file that says how its `config.json` becomes a `ModelConfig` (see `models.hf`). All
share two Flax NNX modules, `Layer` and `Embedding` of `models.llama`, which read it; a family may
derive its own. They are *definitions*: at run time their parameters are plain nested dicts (see
`Blueprint`), because dispatching a jitted function takes 20 us with a dict and about 900 us with
`nnx.jit` on a module.

Letters in shapes, here and in every einsum of the package: b batch, s sequence, h query heads,
k KV heads, g query heads per KV head, d head size, r partial columns, n selected rows, t capacity,
e hidden size, f MLP width, v vocabulary.
"""

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from infinigen_jax.models.linear import Matrix, part_of, split
from infinigen_jax.models.rope import Rope, rotation
from infinigen_jax.models.small_weights import Params, dtype_of, small_form

if TYPE_CHECKING:
    from infinigen_jax.models.llama import Embedding, Layer

HFConfig = dict[str, Any]  # a parsed config.json

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}

PRE_NORMS = ("attention_norm", "mlp_norm")  # of the inputs of attention and MLP
POST_NORMS = ("attention_post_norm", "mlp_post_norm")  # of their outputs
HEAD_NORMS = ("q_norm", "k_norm")  # of queries and keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder, read from a Hugging Face `config.json`.

    Attributes:
        family: file of this package that defines the modules; `models.config_from_hf` sets it.
        max_positions: longest supported sequence, in tokens.
        rope: rotary embedding, or None for learned positions.
        layer_ropes: rotary embedding of each layer, None for no rotation; empty if all have
            `rope`. Their frequencies do not vary.
        output_bias: whether the output projection of attention has a bias if `attention_bias`.
        query_scale: factor on the attention scores; None for the inverse root of the head size.
        query_growth: factor on the logarithm of the number of original contexts before a token,
            with which its query grows.
        attention_softcap, logit_softcap: bounds of the attention scores and of the logits, see
            `ops.attention.soft_capped`; None for none.
        norms: names of the norms of a layer, of PRE_NORMS, POST_NORMS and HEAD_NORMS.
        layer_norms, norm_biases: whether norms are of the kind LayerNorm rather than RMSNorm, and
            whether these have biases.
        window_shape: KV heads and head size of layers with a sliding window, if another head size
            than that of the others, which the sizes of the norms "k_norm" then tell apart. `of` has
            the configuration of such a layer.
        values_from_keys: whether values are the projected keys before their norm, in layers without
            a sliding window.
        value_norms: whether values have a norm, without a scale.
        layer_factors: whether a layer's output has a factor, which is a parameter.
        head_norms: what HEAD_NORMS apply to: "each" head, with the same scale; each with its "own"
            scale; or "all" heads of a token together. Or "bare": each head has a norm without a
            scale, and `norms` lacks HEAD_NORMS.
        norms_minus_one: whether files hold the scales of norms minus 1, see `minus_one`. They are
            float32 then in every dtype of the weights: in two bytes, 1 + scale would lose most of
            its digits.
        plain_final_norm: whether the final norm is an exception to this.
        post_norm_eps: epsilon of POST_NORMS; None for `norm_eps`.
        attention_gates: whether the heads' outputs are multiplied by the sigmoid of a projection of
            attention's input.
        parallel_mlp: whether the MLP reads attention's input instead of its result.
        embedding_scale, residual_scale, logit_divisor: factors on embeddings and on the outputs
            of attention and MLP, and divisor of the logits.
        num_logits: number of tokens that the model can generate, the first of the vocabulary; None
            for all. Needs `tie_embeddings` False.
        sliding_window: number of tokens, itself included, that a token attends to in
            `sliding_layers`.
        eos_ids: tokens that end a generation; may be empty.
    """

    family: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    activation: str
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: Rope | None = None
    layer_ropes: tuple[Rope | None, ...] = ()
    output_bias: bool = True
    gated: bool = True
    query_scale: float | None = None
    query_growth: float = 0.0
    norm_after_rotation: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    norms: tuple[str, ...] = PRE_NORMS
    layer_norms: bool = False
    norm_biases: bool = True
    window_shape: tuple[int, int] | None = None
    values_from_keys: bool = False
    value_norms: bool = False
    layer_factors: bool = False
    head_norms: str = "each"
    norms_minus_one: bool = False
    plain_final_norm: bool = False
    post_norm_eps: float | None = None
    attention_gates: bool = False
    parallel_mlp: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    num_logits: int | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def group_size(self) -> int:
        """Number of query heads per KV head (1 for multi-head attention)."""
        return self.num_heads // self.num_kv_heads

    def minus_one(self, norm: str) -> bool:
        """Return whether files hold the scale of a norm minus 1; the final one is called "norm"."""
        return self.norms_minus_one and not (norm == "norm" and self.plain_final_norm)

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def row_width(self) -> int:
        """Numbers in a token's rows of a layer: keys and values of all KV heads."""
        return 2 * self.num_kv_heads * self.head_dim

    def grouped(self, query: Float[Array, "*b h d"]) -> Float[Array, "*b k g d"]:
        """Group query heads by the KV head that they share."""
        return query.reshape(*query.shape[:-2], self.num_kv_heads, self.group_size, self.head_dim)

    @functools.cached_property
    def windowed(self) -> "ModelConfig":
        """Configuration of the layers with a sliding window, whose heads may have another size."""
        if self.window_shape is None:
            return self
        kv_heads, size = self.window_shape
        shape: Any = {"num_kv_heads": kv_heads, "head_dim": size, "window_shape": None}
        return dataclasses.replace(self, values_from_keys=False, **shape)

    def of(self, layer: int) -> "ModelConfig":
        """Return the configuration of a layer."""
        return self.windowed if layer in self.sliding_layers else self

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a layer, in tokens; None if it attends to all."""
        return self.sliding_window if layer in self.sliding_layers else None

    @property
    def full_attention_layers(self) -> list[int]:
        """Layers without a sliding window; others keep their rows on the device."""
        return [layer for layer in range(self.num_layers) if self.window_of(layer) is None]

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotary embedding of a layer; None if it does not rotate."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    @property
    def longest_short(self) -> int | None:
        """Length of a sequence beyond which the keys of all its tokens differ; None for none."""
        longrope = self.rope is not None and self.rope.kind == "longrope"
        return self.rope.original_positions if self.rope is not None and longrope else None

    def room(self, length: int) -> int:
        """Return the most tokens by which a sequence of `length` cached tokens may grow."""
        short, limit = self.longest_short, self.max_positions
        return min(short + 1, limit) - length if short and length <= short else limit - length

    def fitting(self, most: int, prompts: Sequence[Sequence[int]]) -> int:
        """Return `most`, or fewer new tokens if there is no room after the prompts; at least 1."""
        return max(1, min(most, *(self.room(len(prompt)) for prompt in prompts)))

    @property
    def scale(self) -> float:
        """Factor on the attention scores, which `Layer.query` applies."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale


def family(name: str) -> ModuleType:
    """Return the module of a family, whose tables and function `models.config_from_hf` reads."""
    return importlib.import_module(f"infinigen_jax.models.{name}")


class Blueprint(NamedTuple):
    """A family's modules without their parameters.

    `layer_graph` and `layer_shapes` are of layers without a sliding window; see `of`.
    `layer(params)` and `embedding(params)` insert plain dicts of arrays into a module. Inside jit
    this costs nothing at run time, and one compilation serves every layer.
    """

    config: ModelConfig
    dtype: jnp.dtype
    layer_graph: Any
    layer_shapes: Params
    embedding_graph: Any
    embedding_shapes: Params

    def of(self, layer: int) -> "Blueprint":
        """Return the blueprint of a layer."""
        config = self.config.of(layer)
        if config is self.config:
            return self
        return blueprint(config, self.dtype, *small_form(self.layer_shapes))

    def layer(self, params: Params) -> "Layer":
        """Return the module of a layer; `params` are packed or not, in full or in small weights."""
        config = self.config
        # The only trace of a layer's kind in its parameters.
        if config.window_shape and params["k_norm"]["scale"].shape[-1] != config.head_dim:
            config = config.windowed
        graph = blueprint(config, self.dtype, *small_form(params)).layer_graph
        module: Any = nnx.merge(graph, split(params, config.query_width))
        if "qkv" in params:
            module.q = part_of(params["qkv"], 0, config.query_width)
            module.kv = part_of(params["qkv"], config.query_width, None)
        return module

    def complete(self, number: int, params: Params) -> Params:
        """Return a layer's parameters in the form of its `layer_shapes`.

        A checkpoint's `params` are in either form of `models.linear`, without those that follow
        from the configuration.
        """
        config = self.config.of(number)
        params = split(params, config.query_width)
        if "rotation" not in self.layer_shapes:
            return params
        rope = config.layer_ropes[number]
        return params | {"rotation": rotation(rope, config.head_dim)}

    def embedding(self, params: Params) -> "Embedding":
        fitting = blueprint(self.config, self.dtype, *small_form(params))
        return nnx.merge(fitting.embedding_graph, params)


@functools.cache
def blueprint(
    config: ModelConfig,
    dtype: Any,
    weight_dtype: str | None = None,
    wide: frozenset[str] = frozenset(),
) -> Blueprint:
    """Build a family's modules abstractly: shapes and dtypes, no arrays.

    Args:
        dtype: dtype of parameters and activations; norms, softmax and logits compute in float32.
        weight_dtype: form of the matrices, one of WEIGHT_DTYPES; None for `dtype`.
        wide: names of a layer's matrices that are int8 with int4.
    """
    modules = vars(family("llama")) | vars(family(config.family))
    dtype = jnp.dtype(dtype)

    def made(kind: Any) -> Any:
        module = kind(config, dtype)
        for name, part in vars(module).items():
            if weight_dtype is not None and isinstance(part, Matrix):
                part.shrink(dtype_of(name, weight_dtype, wide))
        return module

    def split(kind: Any) -> tuple[Any, Params]:
        graph, state = nnx.split(nnx.eval_shape(lambda: made(kind)))
        return graph, nnx.to_pure_dict(state)

    return Blueprint(config, dtype, *split(modules["Layer"]), *split(modules["Embedding"]))


def split_layers(config: ModelConfig, layers: Sequence[Params]) -> list[Params]:
    """Return all layers' parameters with projections that are not joined."""
    return [split(layer, config.of(i).query_width) for i, layer in enumerate(layers)]


def random_params(config: ModelConfig, dtype: Any) -> Params:
    """Return random parameters, normal with deviation 1/sqrt(fan in), shaped like `blueprint`'s."""
    architecture = blueprint(config, dtype)

    def fill(path: Any, leaf: jax.ShapeDtypeStruct, key: jax.Array) -> Array:
        name = path[-1].key
        if name in ("scale", "bias", "factor"):
            return jnp.full(leaf.shape, 0 if name == "bias" else 1, leaf.dtype)
        if name == "embedding":
            x = jax.random.normal(key, leaf.shape, jnp.float32) * 0.02
        else:
            x = jax.random.normal(key, leaf.shape[::-1], jnp.float32).T * leaf.shape[-1] ** -0.5
        return x.astype(leaf.dtype)

    def tree(shapes: Params, key: jax.Array) -> Params:
        leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
        keys = jax.random.split(key, len(leaves))
        filled = [fill(path, leaf, keys[i]) for i, (path, leaf) in enumerate(leaves)]
        return jax.tree_util.tree_unflatten(structure, filled)

    keys = jax.random.split(jax.random.key(0), config.num_layers + 1)
    layers = [
        architecture.complete(i, tree(architecture.of(i).layer_shapes, keys[i]))
        for i in range(config.num_layers)
    ]
    return {"embedding": tree(architecture.embedding_shapes, keys[-1]), "layers": layers}
