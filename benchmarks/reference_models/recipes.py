"""Recipes of three model sizes: architecture, and everything that the training depends on."""

import dataclasses
from typing import Any

BOS, PAD, EOS, UNK = range(4)
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the training.

    Attributes:
        until: progress at its end; 1 is the end of the training.
        context: tokens per sequence.
        batch: sequences per step.
        copies: share of sequences that repeat a run of random tokens.
        rate: learning rate of the stage, after a warm-up; None: the training's schedule, which
            starts after the last stage with its own rate.
    """

    until: float
    context: int
    batch: int
    copies: float = 0.0
    rate: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A model's size and its training.

    Attributes:
        vocabulary: size of the trained tokenizer's vocabulary.
        stages: short sequences first, because their tokens cost less; the last stage has the
            model's whole context.
        tokens: training tokens, if no time is given.
        learning_rate: peak learning rate.
        warmup: share of the training in which the learning rate rises.
        synthetic: share of sequences that are retrieval tasks, among those that are not copies.
        answer_weight: weight of an answer's tokens in the loss; tokens of a book have 1.
        broken_lines: share of the training's books with broken lines, like old text files.
        characters_per_book: characters from the beginning of each training book; None: all.
        tokenizer_characters: characters that the tokenizer is trained on.
        dtype: dtype of the exported weights.
        remat: recompute a layer in the backward pass instead of keeping its activations.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    stages: tuple[Stage, ...]
    tokens: int
    learning_rate: float
    warmup: float
    synthetic: float
    answer_weight: float
    broken_lines: float
    characters_per_book: int | None
    tokenizer_characters: int
    dtype: str
    remat: bool = False
    weight_decay: float = 0.1

    @property
    def context(self) -> int:
        """Number of the model's positions."""
        return self.stages[-1].context

    @property
    def rises_from(self) -> float:
        """Progress at which the training's own learning rate begins."""
        return max((s.until for s in self.stages if s.rate is not None), default=0.0)

    def stage(self, progress: float) -> Stage:
        """Return the stage at `progress`, which runs from 0 to 1."""
        return next((s for s in self.stages if progress < s.until), self.stages[-1])


SIZES = {
    "smoke": Size(
        hidden=32,
        layers=2,
        heads=4,
        kv_heads=2,
        mlp=64,
        vocabulary=320,
        stages=(
            Stage(until=0.25, context=64, batch=4, copies=1.0, rate=1e-3),
            Stage(until=0.5, context=64, batch=4, copies=0.1),
            Stage(until=1, context=128, batch=2),
        ),
        tokens=6 * 256,
        learning_rate=3e-3,
        warmup=0.1,
        synthetic=0.25,
        answer_weight=2.0,
        broken_lines=0.5,
        characters_per_book=20_000,
        tokenizer_characters=100_000,
        dtype="float32",
    ),
    "cpu": Size(
        hidden=192,
        layers=6,
        heads=6,
        kv_heads=3,
        mlp=512,
        vocabulary=1024,
        stages=(
            Stage(until=0.1, context=256, batch=8, copies=1.0, rate=1e-3),
            Stage(until=0.6, context=256, batch=12, copies=0.05),
            Stage(until=1, context=1024, batch=4, copies=0.05),
        ),
        tokens=12_000_000,
        learning_rate=1.5e-3,
        warmup=0.06,
        synthetic=0.3,
        answer_weight=2.0,
        broken_lines=0.5,
        characters_per_book=120_000,
        tokenizer_characters=20_000_000,
        dtype="float32",
    ),
    "gpu": Size(
        hidden=512,
        layers=8,
        heads=8,
        kv_heads=4,
        mlp=1408,
        vocabulary=4096,
        stages=(
            Stage(until=0.03, context=1024, batch=64, copies=1.0, rate=5e-4),
            Stage(until=0.4, context=1024, batch=64, copies=0.03),
            Stage(until=1, context=4096, batch=16, copies=0.03),
        ),
        tokens=200_000_000,
        learning_rate=1.5e-3,
        warmup=0.02,
        synthetic=0.3,
        answer_weight=6.0,
        broken_lines=0.5,
        characters_per_book=None,
        tokenizer_characters=40_000_000,
        dtype="bfloat16",
    ),
}


def hf_config(size: Size, vocabulary: int) -> dict[str, Any]:
    """Return the model's `config.json`."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "max_position_embeddings": size.context,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": True,
        "dtype": size.dtype,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.hidden // size.heads,
        "intermediate_size": size.mlp,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "attention_bias": False,
        "mlp_bias": False,
    }
