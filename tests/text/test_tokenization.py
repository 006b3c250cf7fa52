"""Tokenizers of folders and GGUF files: the tokens of transformers, no code, and one error."""

import functools
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from gguf_files import add_setting, byte_level, sentencepiece, written
from tiny import add_tokenizer, python, refuses

from infinigen_jax import InputError, embedded
from infinigen_jax.checkpoint.gguf_file import GgufFile
from infinigen_jax.loading.load import EMBEDDED_FOLDER
from infinigen_jax.text.gguf_tokenizer import gguf_tokenizer
from infinigen_jax.text.tokenizer import SETTINGS_FILE, encode_further, load_tokenizer

FOLDERS = [path for path in EMBEDDED_FOLDER.iterdir() if path.is_dir()]
TEXTS = ["", "a", "The king said", "  two\n\n x ", "é中😀 <s>inside</s> <pad>x <unk>", "<s>front"]


def transformers_tokenizer(folder: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, **options)


def check_like_transformers(folder: Path) -> None:
    expected, actual = transformers_tokenizer(folder), load_tokenizer(folder)
    assert actual.special_tokens == expected.special_tokens_map
    assert actual.bos_token_id == expected.bos_token_id
    assert actual.eos_token_id == expected.eos_token_id
    draw = random.Random(0)
    letters = [chr(draw.choice([draw.randrange(32, 127), draw.randrange(0x80, 0x3000)]))
               for _ in range(600)]  # fmt: skip
    tokens = [[draw.randrange(len(expected)) for _ in range(20)] for _ in range(30)]
    for text in [*TEXTS, *("".join(letters[i : i + 30]) for i in range(0, 600, 30))]:
        for special in (True, False):
            ids = expected.encode(text, add_special_tokens=special)
            assert actual.encode(text, add_special_tokens=special) == ids
            tokens.append(ids)
    for ids in tokens:
        for skip in (True, False):
            text = expected.decode(ids, skip_special_tokens=skip)
            assert actual.decode(ids, skip_special_tokens=skip) == text
        assert [actual.convert_ids_to_tokens(i) for i in ids] == expected.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_tokens_and_texts_are_those_of_transformers(folder):
    check_like_transformers(folder)


SETTINGS = {
    "first and last token": {"add_bos_token": True, "add_eos_token": True},
    "neither": {"add_bos_token": False},
    "new special tokens": {
        "bos_token": {"__type": "AddedToken", "content": "<begin>", "lstrip": False},
        "add_bos_token": True,
        "additional_special_tokens": ["<turn>", "said"],
    },
    "added tokens": {
        "added_tokens_decoder": {
            "1024": {"content": "king", "lstrip": True, "rstrip": False, "single_word": False,
                     "normalized": False, "special": False},
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("change", SETTINGS.values(), ids=SETTINGS)
def test_settings_are_applied_as_in_transformers(change, tmp_path):
    folder = copied(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | change))
    check_like_transformers(folder)


def test_tokens_with_a_name_are_special(tmp_path):
    """Also where tokenizer.json says otherwise."""
    folder = copied(tmp_path)
    whole = json.loads((folder / "tokenizer.json").read_text())
    for token in whole["added_tokens"]:
        token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    check_like_transformers(folder)


def test_a_folder_of_vocabulary_and_merges(tmp_path):
    model = json.loads((embedded() / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = ["#version: 0.2", *map(" ".join, model["merges"])]
    (tmp_path / "merges.txt").write_text("\n".join(merges))
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    check_like_transformers(tmp_path)


def test_a_folder_of_a_sentencepiece_model(tmp_path):
    """Also where the settings name code of the folder, which transformers' own class replaces."""
    import sentencepiece

    (tmp_path / "text").write_text("The king said that the old house was his. " * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    settings = {"tokenizer_class": "LlamaTokenizer"}
    (tmp_path / SETTINGS_FILE).write_text(json.dumps(settings))
    check_like_transformers(tmp_path)
    expected = load_tokenizer(tmp_path).encode("The king")
    (tmp_path / SETTINGS_FILE).write_text(json.dumps(settings | {"auto_map": AUTO_MAP}))
    (tmp_path / "tokenizer_evil.py").write_text(EVIL.format(str(tmp_path / "code has run")))
    assert load_tokenizer(tmp_path).encode("The king") == expected
    assert not (tmp_path / "code has run").exists()


def test_a_template_of_a_processor(tmp_path):
    """Folders of models for images and text may have no other."""
    folder = copied(tmp_path)
    (folder / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    assert load_tokenizer(folder).chat_template == "{{ messages }}"
    (folder / "chat_template.json").write_text("{bad")
    refuses("^[^ ]*/chat_template.json: ", load_tokenizer, folder)


def copied(folder: Path) -> Path:
    """A folder with an embedded model's tokenizer."""
    folder.mkdir(exist_ok=True)
    return add_tokenizer(folder)


EVIL = "import pathlib\npathlib.Path({!r}).touch()\nclass Tok: pass\n"
AUTO_MAP = {"AutoTokenizer": ["tokenizer_evil.Tok", "tokenizer_evil.Tok"]}


@pytest.mark.parametrize("files", [("tokenizer.json",), ("vocab.json", "merges.txt")])
def test_no_code_of_a_folder_runs_and_nothing_asks(files, tmp_path, capfd, monkeypatch):
    """Whether the class that the folder defines is ignored or refused."""
    folder, mark = copied(tmp_path / "evil"), tmp_path / "code has run"
    if files != ("tokenizer.json",):
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
        (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    settings = {"tokenizer_class": "Tok", "auto_map": AUTO_MAP}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer_evil.py").write_text(EVIL.format(str(mark)))
    (folder / "config.json").write_text('{"model_type": "opt"}')
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("asked"))
    try:
        load_tokenizer(folder).encode("ab")
    except InputError as error:
        assert "auto_map names code" in str(error) and files != ("tokenizer.json",)
    assert not mark.exists() and capfd.readouterr() == ("", "")


DAMAGED = {
    "panic when read": {"model": {"continuing_subword_prefix": "Metaspace"}},
    "panic when used": {"post_processor": {"special_tokens": {}}},
    "unknown model": {"model": {"type": "Nonsense"}},
    "no vocabulary": {"model": {"vocab": None}},
}


@pytest.mark.parametrize("change", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_tokenizer_is_one_error_and_silent(change, tmp_path, capfd):
    folder = copied(tmp_path)
    whole = json.loads((folder / "tokenizer.json").read_text())
    damaged = whole | {name: whole[name] | part for name, part in change.items()}
    (folder / "tokenizer.json").write_text(json.dumps(damaged))
    refuses("tokenizer cannot be used", load_tokenizer, folder)
    assert capfd.readouterr() == ("", "")


WRONG = [
    {"bos_token": ["<s>"]},
    {"eos_token": {"content": 1}},
    {"extra_special_tokens": "<x>"},
    {"additional_special_tokens": [{}]},
    {"added_tokens_decoder": [1]},
    {"chat_template": {"default": "x"}},
]


@pytest.mark.parametrize("settings", WRONG, ids=json.dumps)
def test_settings_of_a_wrong_kind(settings, tmp_path):
    folder = copied(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    refuses(str(folder), load_tokenizer, folder)


def test_lone_surrogates_are_refused():
    refuses("not UTF-8", load_tokenizer(embedded()).encode, "a \udcff")


def test_folders_whose_name_is_not_utf8(tmp_path):
    folder = copied(tmp_path / os.fsdecode(b"m\xff"))
    assert load_tokenizer(folder).encode("a") == load_tokenizer(embedded()).encode("a")
    (folder / "tokenizer.json").write_text("{")
    refuses("cannot be used", load_tokenizer, folder).encode()


def test_transformers_is_not_imported_for_a_tokenizer():
    """It takes seconds."""
    program = (
        "import sys; from infinigen_jax.text.tokenizer import load_tokenizer; from pathlib import "
        "Path; load_tokenizer(Path(sys.argv[1])); sys.exit('transformers' in sys.modules)"
    )
    assert python("-c", program, embedded()).returncode == 0


SPACED = ("The quick brown fox", "  two  spaces\n\nand 12345 digits, don't", "é😀 the", "")


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_tokenizers(pre, tmp_path):
    """Words are split as transformers does; of "smollm", which it ignores, digits as well."""
    tokenizer = tokenizer_of(tmp_path, byte_level(pre) | {"tokenizer.ggml.add_bos_token": True})
    of_file = functools.partial(transformers_tokenizer, tmp_path, gguf_file="a.gguf")
    reference = load_tokenizer(embedded()) if pre == "smollm" else of_file()
    for text in SPACED:
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
    found = [word for word, _ in splitter.pre_tokenize_str("ab12345 c!!\n\n x")]
    assert [word.replace("Ġ", " ").replace("Ċ", "\n") for word in found] == words


def test_text_that_goes_on_begins_without_the_space_of_a_text(tmp_path):
    tokenizer = tokenizer_of(tmp_path, sentencepiece())
    for text in ("the fox", " the fox", "\n the", "\n\n\u00e9", "</s>the", "  the"):
        whole = tokenizer.encode(f"quick{text}", False)
        assert tokenizer.encode("quick", False) + encode_further(tokenizer, text) == whole
    assert tokenizer.encode("\nthe", False) != encode_further(tokenizer, "\nthe")
    byte_level_one = load_tokenizer(embedded())
    for text in (*SPACED, "\nthe", "the", "</s>\nthe"):
        assert encode_further(byte_level_one, text) == byte_level_one.encode(text, False)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_sentencepiece_tokenizers(architecture, tmp_path):
    tokenizer = tokenizer_of(tmp_path, sentencepiece(), architecture)
    reference = transformers_tokenizer(tmp_path, gguf_file="a.gguf")
    for text in (text.strip() for text in SPACED if text):
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


def test_merges_of_gemma_4(tmp_path):
    """llama.cpp's tokens are the same, see `test_gguf_by_llama_cpp`."""
    merges = ["t h", "\u2581 th", "\u2581th e"]
    settings = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}
    tokenizer = tokenizer_of(tmp_path, sentencepiece() | settings, "gemma4")
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("the the\u00e9", False)]
    assert pieces[:3] == ["th", "e", " the"] and len(pieces) == 5  # the last is two bytes


def test_special_tokens_of_phi_3_take_the_space_after_them(tmp_path):
    settings = with_tokens(sentencepiece(), 3, "<|user|>")
    plain, phi = (tokenizer_of(tmp_path, settings, name) for name in ("llama", "phi3"))
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
