"""Tokenizers and chat templates of model folders, used without running code of the folder.

The `tokenizers` library reads `tokenizer.json`. Folders without that file (vocab.json and
merges.txt, or tokenizer.model) need transformers, which takes seconds to import.
"""

import contextlib
import datetime
import functools
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinigen_jax.errors import InputError, ParameterError
from infinigen_jax.files.regular import TOKENIZER_FILES, read_json, read_text
from infinigen_jax.text.detokenize import checked_text

if TYPE_CHECKING:
    import jinja2  # its import takes a tenth of a second
    import tokenizers

SETTINGS_FILE = "tokenizer_config.json"
AGAIN = "copy the model's files again"
SAMPLE = "A sample, 123 \u00e9\u4e2d\U0001f600.\n"  # text that reveals a damaged tokenizer
NAMED = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Tokens that end a turn, in the templates of common families.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>")
TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


class Tokenizer:
    """Tokenizer of a model folder, defined by its `tokenizer.json`.

    It equals that of transformers, except where transformers 5 replaces the normalizer of LLaMA 2's
    file: texts that begin with a space or follow a special token then have one token more here, as
    in training. `special_tokens` are texts by name, such as `bos_token`; errors begin with `where`.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        where: str = "the model",
    ):
        self.backend, self.chat_template = backend, chat_template or None
        self.special_tokens = dict(special_tokens or {})
        self._where = where
        # Tokens that begin and end a text; None if the folder names none.
        self.bos_token_id, self.eos_token_id = (
            backend.token_to_id(self.special_tokens[name]) if name in self.special_tokens else None
            for name in ("bos_token", "eos_token")
        )

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end a text or a turn of a chat."""
        ids = (self.backend.token_to_id(name) for name in TURN_ENDS)
        return [i for i in (self.eos_token_id, *ids) if i is not None]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        checked_text("the text to tokenise", text)
        with refused(self._where), silent_panics():
            # Unlike `encode`, this lets other threads run: a server has streams to send.
            texts = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return texts[0].ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, without clean-up of spaces."""
        with refused(self._where):
            return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """Return a token's name in the vocabulary; None for ids outside of it."""
        return self.backend.id_to_token(token)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder, without downloads."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        names = ", ".join(TOKENIZER_FILES)
        raise InputError(f"{folder}: has no tokenizer ({names}); copy the model's files into it")
    if not (folder / "tokenizer.json").is_file():
        return _from_transformers(folder)
    settings = _settings(folder)
    try:
        special, extra = _special_tokens(settings)
        template = _chat_template(folder, settings)
    except InputError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(
            f"{folder / SETTINGS_FILE}: a setting has the wrong type ({error}); {AGAIN}"
        ) from None
    with refused(str(folder)), silent_panics():
        from tokenizers import Tokenizer as Backend

        data = (folder / "tokenizer.json").read_bytes()
        _check_prefix(data)
        backend = Backend.from_buffer(data)
        # Like transformers, neither truncate nor pad. The post-processor in this file decides about
        # tokens at the beginning and end, not `add_bos_token` and `add_eos_token`.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = settings.get("split_special_tokens") is True
        _add_tokens(backend, settings, [*special.values(), *extra])
        names = {name: str(token["content"]) for name, token in special.items()}
        return tried(Tokenizer(backend, names, template, str(folder)))


def encode_further(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text that continues another, without special tokens.

    Some tokenizers put a space before a text: it is encoded after a line or a word, whose tokens
    are dropped.
    """
    for before in ("\n", "a"):
        front = tokenizer.encode(before, add_special_tokens=False)
        tokens = tokenizer.encode(before + text, add_special_tokens=False)
        if tokens[: len(front)] == front:
            return tokens[len(front) :]
    return tokenizer.encode(text, add_special_tokens=False)


def check_vocabulary(parameter: str, tokens: Iterable[int], vocabulary: int) -> None:
    """Refuse tokens that a model of `vocabulary` tokens does not have."""
    unknown = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if unknown is not None:
        raise ParameterError(
            parameter,
            f"token {unknown} is not among the model's {vocabulary} tokens; use its own tokenizer",
        )


def _check_prefix(data: bytes) -> None:
    """Check that all merges have the subword prefix, if `tokenizer.json` has one.

    The compiled library cuts it off unchecked; a cut inside a character can end the process.
    """
    # Files are large, and those without a prefix are not parsed a second time.
    if not re.search(rb'"continuing_subword_prefix"\s*:\s*"[^"]', data):
        return
    model = json.loads(data)["model"]
    for merge in model.get("merges") or ():
        second = merge.split(" ")[1] if isinstance(merge, str) else merge[1]
        if not second.startswith(model["continuing_subword_prefix"]):
            raise ValueError(f"continuing_subword_prefix is not that of the merge {merge!r}")


def _settings(folder: Path) -> dict[str, Any]:
    """Read `tokenizer_config.json`, and the special tokens in the second file of older folders."""
    settings = {}
    for name in (SETTINGS_FILE, "special_tokens_map.json"):
        if "added_tokens_decoder" not in settings and (folder / name).exists():
            settings |= read_json(folder / name, AGAIN)
    return settings


def _special_tokens(
    settings: Mapping[str, Any],
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return named special tokens and other special tokens, as fields of AddedToken."""
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
    """Return the fields of AddedToken from a text or from such fields."""
    if isinstance(value, str):
        return {"content": value}
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise TypeError(f"{value!r} is not a token")
    return {name: value[name] for name in TOKEN_FIELDS if name in value}


def _add_tokens(
    backend: "tokenizers.Tokenizer", settings: Mapping[str, Any], special: list[dict[str, Any]]
) -> None:
    """Add the tokens that the settings name and `tokenizer.json` lacks."""
    from tokenizers import AddedToken

    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder") or {}
    tokens = [AddedToken(**_token(listed[token_id])) for token_id in sorted(listed, key=int)]
    backend.add_tokens([token for token in tokens if repr(token) not in known])
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    named = [present.get(fields["content"]) or AddedToken(**fields) for fields in special]
    for token in named:
        token.special = True
    backend.add_special_tokens(named)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Read the folder's chat template, the default one of several."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise InputError(f"{path}: cannot be read as UTF-8 text; {AGAIN}") from None
    template, of_processor = settings.get("chat_template"), folder / "chat_template.json"
    if template is None and of_processor.is_file():
        template = read_json(of_processor, AGAIN).get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise TypeError("chat_template is not a text")
    return template


def read_template(path: str | Path) -> str:
    """Read the file of a chat template; an empty one is refused."""
    template = read_text("chat_template", path)
    if not template.strip():
        raise ParameterError("chat_template", "the file is empty; give another", path)
    return template


def _from_transformers(folder: Path) -> Tokenizer:
    # transformers reads SentencePiece files itself.
    if "auto_map" in _settings(folder) and not (folder / "tokenizer.model").is_file():
        raise InputError(
            f"{folder / SETTINGS_FILE}: auto_map names code of the folder, which is not run; "
            "add a tokenizer.json"
        )
    # Otherwise the library warns on stderr that torch is not installed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    with refused(str(folder), "add a tokenizer.json"), silent_panics():
        # Without an explicit refusal transformers asks on stdin whether to run code of the folder.
        loaded: Any = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        backend = getattr(loaded, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("only tokenizers with a tokenizer.json are supported")
        template = loaded.get_chat_template() if loaded.chat_template else None
        special = {name: str(token) for name, token in loaded.special_tokens_map.items()}
        return tried(Tokenizer(backend, special, template, str(folder)))


def tried(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer after trying to encode and decode."""
    for special in (True, False):
        ids = tokenizer.encode(SAMPLE, special)
        tokenizer.decode(ids, skip_special_tokens=special)
    count = min(tokenizer.backend.get_vocab_size(), 1 << 16)
    tokenizer.decode(list(range(count)))
    return tokenizer


@contextlib.contextmanager
def refused(where: str, remedy: str = AGAIN) -> Iterator[None]:
    """Report every error of a tokenizer library as bad input."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except BaseException as error:
        # A panic of the compiled library is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{where}: the tokenizer cannot be used ({error}); {remedy}") from None


@contextlib.contextmanager
def silent_panics() -> Iterator[None]:
    """Suppress panic messages of the compiled library on stderr.

    Only in the main thread: two threads that exchange the file descriptor could leave it closed.
    """
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(OSError):  # closed by the caller
                before = os.dup(2)
                stack.callback(os.close, before)
                stack.callback(os.dup2, before, 2)
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), 2)
        yield


def render_chat(
    template: str,
    messages: list[dict[str, Any]],
    special_tokens: dict[str, str],
    tools: list[dict[str, Any]] | None = None,
    variables: dict[str, Any] | None = None,
) -> str:
    """Render a chat template as `transformers` does, with a prompt for the next answer.

    `tools` are functions that the model may call, in OpenAI's format; `variables`, such as
    `enable_thinking`, may replace all but the messages and the tools. Raise InputError if the
    template is invalid or refuses the messages.
    """
    others = {"documents": None, "add_generation_prompt": True, **special_tokens}
    inputs = others | (variables or {}) | {"messages": messages, "tools": tools}
    try:
        return _compiled(template).render(inputs)
    except Exception as error:  # a template may raise anything
        reason = (str(error) or type(error).__name__)[:1000]
        raise InputError(
            f"the chat template refuses this ({reason}); give another as `chat_template`"
        ) from None


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> "jinja2.Template":
    """Compile a template, with the functions and blocks that transformers' templates use."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Block `{% generation %}`, which marks an answer for training and changes nothing here."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return sandbox.from_string(template)
