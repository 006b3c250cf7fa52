"""Tokenizers of GGUF files: vocabulary, merges and special tokens are settings of the file.

llama.cpp names the kinds of tokenizers "gpt2" (byte-level BPE, with a named rule that splits text
into words), "llama" (SentencePiece BPE, whose merges follow from the scores of tokens) and "gemma4"
(the same with merges of its own).
"""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from infinigen_jax.checkpoint.gguf_file import GgufFile
from infinigen_jax.errors import InputError, UnsupportedModelError
from infinigen_jax.text.tokenizer import Tokenizer, refused, silent_panics, tried

if TYPE_CHECKING:
    import tokenizers

SPACE = "\u2581"
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # kinds of tokens
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",  # Chinese and Japanese
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
UNNAMED = (  # of the first files, which name no rule
    r"[\p{P}$+<=>^~|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    "[0-9][0-9][0-9]",
)
# Rules in which each digit is a word.
SINGLE_DIGITS = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
# Expressions that split words, by `tokenizer.ggml.pre`; none for GPT-2's, which the library has.
WORDS: dict[str, str | tuple[str, ...] | None] = {
    "default": UNNAMED,
    **dict.fromkeys(("gpt-2", "exaone4", "olmo", *SINGLE_DIGITS)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3"), LLAMA3),
    "gpt-4o": GPT4O,  # Phi-4-mini
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "hunyuan"), QWEN2),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O),
    "tekken": TEKKEN,
    **dict.fromkeys(("chatglm-bpe", "glm4"), LLAMA3),
    "seed-coder": SEED,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK3),
}
# Rules whose vocabularies have no words other than merges.
MERGED = ("chatglm-bpe", "dbrx", "glm4", "smaug-bpe")
BEGINS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # rules whose texts begin with BOS
KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3's special tokens
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    settings = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in file.metadata.items()
        if name.startswith("tokenizer.ggml.")
    }
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece}
    build = builders.get(str(settings.get("model")))
    if build is None:
        raise _unsupported(file, "model", builders)
    if build is _byte_level and str(settings.get("pre", "default")) not in WORDS:
        raise _unsupported(file, "pre", WORDS)
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise InputError(f"{file.path}: tokenizer.chat_template is not a text; get the file again")
    settings["architecture"] = str(file.metadata.get("general.architecture"))
    with refused(str(file.path)), silent_panics():
        tokens = settings["tokens"]
        if len(set(tokens)) != len(tokens):
            raise ValueError("two tokens have the same text")
        backend = build(settings)
        _add_special(backend, settings)
        names = {
            name: tokens[settings[key]]
            for name, key in SPECIAL.items()
            if settings.get(key, len(tokens)) < len(tokens)
        }
        return tried(Tokenizer(backend, names, template, str(file.path)))


def _unsupported(file: GgufFile, setting: str, known: Iterable[str]) -> UnsupportedModelError:
    name = f"tokenizer.ggml.{setting}"
    return UnsupportedModelError(
        f"{file.path}: {name} {file.metadata.get(name)!r} is not supported "
        f"(supported: {', '.join(known)})"
    )


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the contents of the files from which `load_tokenizer` reads an equal tokenizer."""
    settings: dict[str, Any] = dict(tokenizer.special_tokens)
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    return {
        "tokenizer.json": tokenizer.backend.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }


def _byte_level(settings: dict[str, Any]) -> "tokenizers.Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(settings["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in settings["merges"]]
    rule = settings.get("pre", "default")
    words = WORDS[rule]
    # Such vocabularies have whole words that no merge produces.
    whole = words in (LLAMA3, TEKKEN) and rule not in MERGED
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] * (rule in SINGLE_DIGITS)
    for expression in (words,) if isinstance(words, str) else words or ():
        steps.append(pre_tokenizers.Split(Regex(expression), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if words is QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    settings.setdefault("add_bos_token", rule in BEGINS)
    return backend


def _sentencepiece(settings: dict[str, Any]) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, gemma = settings["tokens"], settings["architecture"].startswith("gemma")
    # The scores of Gemma's tokens do not follow the order of its merges.
    scores = -np.arange(len(tokens)) if gemma else np.asarray(settings["scores"])
    kinds = np.asarray(settings.get("token_type", ()))
    unknown = tokens[np.flatnonzero(kinds == UNKNOWN)[0]] if UNKNOWN in kinds else None
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if settings["model"] == "gemma4":
        merges = [tuple(merge.split(" ")) for merge in settings["merges"]]
    else:
        merges = _merges(tokens, vocabulary, scores)
    backend = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = settings.get("add_space_prefix", not gemma)
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(SPACE)] * bool(prefix)), normalizers.Replace(" ", SPACE)]
    )
    strip = [decoders.Strip(" ", 1, 0)] * bool(prefix)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    settings.setdefault("add_bos_token", True)
    return backend


def _merges(
    tokens: list[str], vocabulary: dict[str, int], scores: np.ndarray
) -> list[tuple[str, str]]:
    """Return the pairs of tokens whose concatenation is a token, the best token first."""
    merges = []
    for i in np.argsort(-scores, kind="stable"):
        token = tokens[int(i)]
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return merges


def _add_special(backend: "tokenizers.Tokenizer", settings: dict[str, Any]) -> None:
    """Add the tokens that are never split, and those at the beginning and end of a text."""
    from tokenizers import AddedToken, processors

    tokens, kinds = settings["tokens"], settings.get("token_type", ())
    # Phi-3's special tokens absorb the white space after them, which its files do not say.
    strips = settings["architecture"] == "phi3" and settings["model"] == "llama"

    def added(text: str, special: bool) -> AddedToken:
        rstrip = strips and special and text not in KEEP_SPACE
        return AddedToken(text, normalized=False, special=special, rstrip=rstrip)

    for kind, add in ((CONTROL, backend.add_special_tokens), (USER_DEFINED, backend.add_tokens)):
        special = kind == CONTROL
        texts = [text for text, k in zip(tokens, kinds, strict=False) if k == kind and text]
        known = [text for text in texts if backend.token_to_id(text) is not None]
        add([added(text, special) for text in known])
    ends = [
        tokens[settings[f"{name}_token_id"]] if settings.get(f"add_{name}_token") else None
        for name in ("bos", "eos")
    ]
    if any(ends):
        begin, end = ([text] if text else [] for text in ends)
        backend.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            pair=[*begin, "$A", *end, *begin, "$B:1", *end],
            special_tokens=[(text, backend.token_to_id(text)) for text in [*begin, *end]],
        )
