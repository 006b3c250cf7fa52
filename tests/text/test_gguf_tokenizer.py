"""Tokenizers of GGUF files against those that transformers builds from the same file."""

import re
from pathlib import Path

import pytest
from gguf import GGUFWriter
from gguf_files import add_setting, byte_level, sentencepiece, written

from infinigen_jax.checkpoint.gguf_file import GgufFile
from infinigen_jax.loading.load import embedded
from infinigen_jax.text.gguf_tokenizer import gguf_tokenizer
from infinigen_jax.text.tokenizer import encode_further, load_tokenizer

TEXTS = ("The quick brown fox", "  two  spaces\n\nand 12345 digits, don't", "é😀 the", "")


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_tokenizers(pre, tmp_path):
    """Words are split as transformers does; of "smollm", which it ignores, digits as well."""
    tokenizer = tokenizer_of(tmp_path, byte_level(pre) | {"tokenizer.ggml.add_bos_token": True})
    reference = reference_tokenizer(tmp_path) if pre != "smollm" else load_tokenizer(embedded())
    for text in TEXTS:
        expected = reference.encode(text, add_special_tokens=False)
        if pre == "smollm":
            expected = [
                i for part in re.split(r"(\d)", text) for i in reference.encode(part, False)
            ]
        assert tokenizer.encode(text) == [0, *expected]
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert tokenizer.encode("a</s>b", False)[1] == 2 == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("default", ["ab", "123", "45", " c", "!!", "\n\n", " x"]),
        ("command-r", ["ab", *"12345", " c", "!!", "\n\n", " x"]),
        ("seed-coder", ["ab", *"12345", " c", "!!", "\n\n", " x"]),
        ("hunyuan-dense", ["ab", "123", "45", " c", "!!\n\n", " x"]),
    ],
)
def test_words_of_byte_level_tokenizers(pre, words, tmp_path):
    """llama.cpp splits them likewise, see `test_gguf_by_llama_cpp`."""
    splitter = tokenizer_of(tmp_path, byte_level(pre)).backend.pre_tokenizer
    assert splitter is not None
    found = [word for word, _ in splitter.pre_tokenize_str("ab12345 c!!\n\n x")]
    assert [word.replace("Ġ", " ").replace("Ċ", "\n") for word in found] == words


def test_text_that_goes_on_begins_without_the_space_of_a_text(tmp_path):
    tokenizer = tokenizer_of(tmp_path, sentencepiece())
    for text in ("the fox", " the fox", "\n the", "\n\n\u00e9", "</s>the", "  the"):
        whole = tokenizer.encode(f"quick{text}", False)
        assert tokenizer.encode("quick", False) + encode_further(tokenizer, text) == whole
    assert tokenizer.encode("\nthe", False) != encode_further(tokenizer, "\nthe")
    byte_level_one = load_tokenizer(embedded())
    for text in (*TEXTS, "\nthe", "the", "</s>\nthe"):
        assert encode_further(byte_level_one, text) == byte_level_one.encode(text, False)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_sentencepiece_tokenizers(architecture, tmp_path):
    tokenizer = tokenizer_of(tmp_path, sentencepiece(), architecture)
    reference = reference_tokenizer(tmp_path)
    for text in (text.strip() for text in TEXTS if text):
        assert tokenizer.encode(text, False) == reference.encode(text, add_special_tokens=False)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert tokenizer.encode("the")[0] == 1 == tokenizer.bos_token_id


def test_runs_of_spaces_of_gemma_are_taken_from_the_left(tmp_path):
    """SentencePiece takes the longest first; merges would give two spaces, then three."""
    tokenizer = tokenizer_of(tmp_path, with_tokens(sentencepiece(), 4, "  ", "   "), "gemma3")
    text = "the     fox"
    tokens = [tokenizer.decode([token]) for token in tokenizer.encode(text, False)]
    assert "".join(tokens) == text == tokenizer.decode(tokenizer.encode(text, False))
    assert [token for token in tokens if not token.strip()] == ["   ", "  "]


def test_special_tokens_of_phi_3_take_the_space_after_them(tmp_path):
    settings = with_tokens(sentencepiece(), 3, "<|user|>")
    plain, phi = (
        tokenizer_of(tmp_path, settings, architecture) for architecture in ("llama", "phi3")
    )
    assert phi.encode("<|user|>\nthe", False) == plain.encode("<|user|>the", False)
    assert phi.encode("<s>\nthe", False) == plain.encode("<s>\nthe", False)


def with_tokens(settings: dict, kind: int, *texts: str) -> dict:
    """Return a vocabulary with further tokens of a kind."""
    added = {"tokens": texts, "token_type": [kind] * len(texts), "scores": [0.0] * len(texts)}
    names = {f"tokenizer.ggml.{name}": values for name, values in added.items()}
    return settings | {name: [*settings[name], *values] for name, values in names.items()}


def tokenizer_of(folder: Path, settings: dict, architecture: str = "llama"):
    writer = GGUFWriter(folder / "a.gguf", architecture)
    for key, value in settings.items():
        add_setting(writer, key, value)
    written(writer)
    return gguf_tokenizer(GgufFile(folder / "a.gguf"))


def reference_tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, gguf_file="a.gguf")
