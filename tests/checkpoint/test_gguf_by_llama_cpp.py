"""Tiny GGUF files as llama.cpp itself reads them, if its wheel `xllamacpp` is installed."""

import json
import urllib.request
from typing import Any

import numpy as np
import pytest
from gguf_files import SMALL, sentencepiece, write_gguf
from test_gguf import EPSILON, FAMILIES, SIZES, tiny_gguf
from tiny import make_tiny

from benchmarks.llama_cpp import start_server
from infinigen_jax.checkpoint.gguf_file import GgufFile
from infinigen_jax.text.gguf_tokenizer import WORDS, gguf_tokenizer

pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
pytestmark = pytest.mark.slow

# llama.cpp needs even numbers of pairs, and derives EXAONE 4's windows from the number of layers.
CHANGES: dict[str, dict[str, Any]] = {
    "cohere": EPSILON,
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "granite": {},
    "llama": {"attention_bias": True},
    "phi3": {},
    "qwen3": {"head_dim": 16},
}
MODELS = [(name, CHANGES.get(name, settings)) for name, settings in dict(FAMILIES).items()]
MERGES = ["t h", "q u", "\u2581 th", "\u2581th e", "c k", "o w", "ow n", "\u2581 \u2581"]
GEMMA4_WORDS = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": MERGES}
GEMMA4_WORDS |= {"tokenizer.ggml.add_space_prefix": False}
TEXTS = (
    "The quick  brown fox's 12345 ran,\n\n and   I'LL see—you!! \t\r\n ok... (a)b #tag x_y 3.14",
    "  two  spaces\n\nand 12345 digits, don't",
    "日本語のテキストと漢字 and ひらがな 123",
    "the theatre there's nothing\n\n\n  indented code(){return 1;}\n",
)


@pytest.mark.parametrize(("family", "settings"), MODELS, ids=[name for name, _ in MODELS])
def test_the_files_are_those_that_llama_cpp_reads(family, settings, tmp_path):
    """Its log-probabilities, computed in part with two bytes, are transformers'."""
    import torch

    made, path = tiny_gguf(tmp_path, family, **settings)
    server = start_server(path, "llama.cpp-f32", 1, 64, tmp_path)
    prompt = [int(i) for i in np.random.default_rng(8).integers(3, 1000, 21)]
    request = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 5}
    answer = server.handle_completions(request)
    answer = json.loads(answer) if isinstance(answer, str) else answer
    likeliest = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    with torch.no_grad():
        expected = torch.log_softmax(made.model(torch.tensor([prompt])).logits[0, -1], -1)
    assert len(likeliest) == 5
    for token in likeliest:
        assert token["logprob"] == pytest.approx(float(expected[token["id"]]), abs=0.02)


@pytest.mark.parametrize("pre", [*WORDS, "gemma4"])
def test_words_are_those_of_llama_cpp(pre, tmp_path):
    changes: Any = {"tokenizer.ggml.pre": pre}
    sizes: Any = SIZES
    if pre == "gemma4":
        changes = sentencepiece() | GEMMA4_WORDS
        sizes = SMALL | {"vocab_size": len(changes["tokenizer.ggml.tokens"])}
    made = make_tiny(tmp_path / "hf", "llama", **sizes)
    path = write_gguf(tmp_path / "a.gguf", made, **changes)
    server = start_server(path, "llama.cpp-f32", 1, 64, tmp_path)
    tokenizer = gguf_tokenizer(GgufFile(path))
    for text in TEXTS:
        body = json.dumps({"content": text, "add_special": False}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
        with urllib.request.urlopen(request) as answer:
            assert tokenizer.encode(text, False) == json.loads(answer.read())["tokens"]
