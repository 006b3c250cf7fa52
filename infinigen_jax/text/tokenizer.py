"""Tokenizers of model folders, read without running or asking about code of the folder.

`tokenizer.json` is read by the `tokenizers` library alone. Folders without that file (vocab.json
and merges.txt, or tokenizer.model) go through transformers, which takes seconds to import.
"""

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinigen_jax.checkpoint.hf_folder import read_json
from infinigen_jax.errors import InputError
from infinigen_jax.text.detokenize import checked_text

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
SETTINGS_FILE = "tokenizer_config.json"
AGAIN = "copy the model's files again"
SAMPLE = "A sample, 123 \u00e9\u4e2d\U0001f600.\n"  # what a damaged tokenizer is tried with
NAMED = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


class Tokenizer:
    """The tokenizer of a model folder; gives the tokens and texts that transformers gives.

    Args:
        backend: the compiled tokenizer.
        special_tokens: texts by name, `bos_token` and so on, as chat templates use them.
        chat_template: the folder's, if it has one.
        where: beginning of error messages.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        where: str = "the model",
    ):
        self.backend, self.chat_template = backend, chat_template
        self.special_tokens = dict(special_tokens or {})
        self._where = where

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text; None if the folder names none."""
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text; None if the folder names none."""
        return self._id("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token numbers of a text.

        Raises:
            InputError: if the tokenizer is damaged, or the text has lone surrogates.
        """
        checked_text("the text to tokenise", text)
        with _refused(self._where), _silent_panics():
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token numbers, without any clean-up of spaces."""
        with _refused(self._where):
            return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """Return a token's name in the vocabulary; None outside of the vocabulary."""
        return self.backend.id_to_token(token)

    def _id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder; nothing is downloaded, no code of the folder runs.

    Raises:
        InputError: when the folder has no tokenizer or a damaged one.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        names = ", ".join(TOKENIZER_FILES)
        raise InputError(f"{folder}: has no tokenizer ({names}); copy the model's files there")
    if not (folder / "tokenizer.json").is_file():
        return _from_transformers(folder)
    settings = _settings(folder)
    try:
        special, extra = _special_tokens(settings)
        template = _chat_template(folder, settings)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(
            f"{folder / SETTINGS_FILE}: a setting has a wrong kind ({error}); {AGAIN}"
        ) from None
    with _refused(str(folder)), _silent_panics():
        from tokenizers import Tokenizer as Backend

        data = (folder / "tokenizer.json").read_bytes()
        _check_prefix(data)
        backend = Backend.from_buffer(data)
        # As in transformers, a text is neither cut nor padded; what begins and ends it is up to
        # this file's post-processor, not to the settings `add_bos_token` and `add_eos_token`.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = settings.get("split_special_tokens") is True
        _add_tokens(backend, settings, [*special.values(), *extra])
        names = {name: str(token["content"]) for name, token in special.items()}
        return _tried(Tokenizer(backend, names, template, str(folder)))


def _check_prefix(data: bytes) -> None:
    """Check that merges fit the prefix of subwords, where `tokenizer.json` has one.

    The compiled library cuts the prefix off without a look; inside a character that can end the
    process. Other files, which are large, are not parsed a second time.
    """
    if not re.search(rb'"continuing_subword_prefix"\s*:\s*"[^"]', data):
        return
    model = json.loads(data)["model"]
    for merge in model.get("merges") or ():
        second = merge.split(" ")[1] if isinstance(merge, str) else merge[1]
        if not second.startswith(model["continuing_subword_prefix"]):
            raise ValueError(f"continuing_subword_prefix is not that of the merge {merge!r}")


def _settings(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, with the special tokens of older folders' second file."""
    settings = {}
    for name in (SETTINGS_FILE, "special_tokens_map.json"):
        if "added_tokens_decoder" not in settings and (folder / name).exists():
            settings |= read_json(folder / name, AGAIN)
    return settings


def _special_tokens(
    settings: Mapping[str, Any],
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Special tokens that have a name, and others, as fields of AddedToken."""
    named = {
        name: value
        for name, value in settings.items()
        if (name in NAMED and value is not None)
        or (name.endswith("_token") and isinstance(value, str | dict))
    }
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        named, extra = named | extra, []
    if not isinstance(extra, list):
        raise TypeError("extra_special_tokens is not a list")
    return {n: _token(v) for n, v in named.items()}, [_token(value) for value in extra]


def _token(value: Any) -> dict[str, Any]:
    """Fields of AddedToken, from a text or from such fields."""
    if isinstance(value, str):
        return {"content": value}
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise TypeError(f"{value!r} is not a token")
    return {name: value[name] for name in TOKEN_FIELDS if name in value}


def _add_tokens(
    backend: "tokenizers.Tokenizer", settings: Mapping[str, Any], special: list[dict[str, Any]]
) -> None:
    """Add what the settings name and `tokenizer.json` lacks."""
    from tokenizers import AddedToken

    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder") or {}
    tokens = [AddedToken(**_token(listed[number])) for number in sorted(listed, key=int)]
    backend.add_tokens([token for token in tokens if repr(token) not in known])
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    named = [present.get(fields["content"]) or AddedToken(**fields) for fields in special]
    for token in named:
        token.special = True
    backend.add_special_tokens(named)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The folder's chat template, the default one of several."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise InputError(f"{path}: cannot be read as UTF-8 text; {AGAIN}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise TypeError("chat_template is not a text")
    return template


def _from_transformers(folder: Path) -> Tokenizer:
    """The tokenizer of a folder without `tokenizer.json`."""
    if "auto_map" in _settings(folder):
        raise InputError(
            f"{folder / SETTINGS_FILE}: auto_map names code of the folder, which is not run; "
            "add a tokenizer.json"
        )
    # The library otherwise remarks on stderr that it has no torch to run models with.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    with _refused(str(folder)), _silent_panics():
        # Without an explicit refusal transformers asks on stdin whether to run a folder's code.
        made: Any = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        backend = getattr(made, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("only tokenizers with a tokenizer.json are supported")
        template = made.get_chat_template() if made.chat_template else None
        special = {name: str(token) for name, token in made.special_tokens_map.items()}
        return _tried(Tokenizer(backend, special, template, str(folder)))


def _tried(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, after a try of what it does."""
    for special in (True, False):
        ids = tokenizer.encode(SAMPLE, special)
        tokenizer.decode(ids, skip_special_tokens=special)
    number = min(tokenizer.backend.get_vocab_size(), 1 << 16)
    tokenizer.decode(list(range(number)))
    return tokenizer


@contextlib.contextmanager
def _refused(where: str) -> Iterator[None]:
    """Report every error of a tokenizer's library as bad input."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except BaseException as error:
        # A panic of the compiled library is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{where}: the tokenizer cannot be used ({error}); {AGAIN}") from None


@contextlib.contextmanager
def _silent_panics() -> Iterator[None]:
    """Keep what the compiled library prints about a panic from stderr.

    In the main thread alone: the file descriptor belongs to all threads, and two of them that
    exchange it could leave it closed to everyone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        before = os.dup(2)
    except OSError:  # closed by the caller
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
