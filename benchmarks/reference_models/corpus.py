"""Tokenised books, in memory-mapped files.

    DATA/tokenizer.json      byte-level BPE
    DATA/train.bin, val.bin  uint16 tokens; each book is <s> ... </s>
    DATA/corpus.json         start of each book, and the sources of all files

Books of the validation split are truncated to 200,000 characters, so that each counts alike.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from benchmarks.files import note
from benchmarks.reference_models.books import Book, archives, read_books, with_broken_lines
from benchmarks.reference_models.recipes import BOS, EOS, SPECIAL, Size
from infinigen_jax.errors import InputError
from infinigen_jax.files.atomic import staged, write_text

VALIDATION_CHARACTERS = 200_000
BOOKS_AT_ONCE = 16
FORMAT = 2
WIDTHS = range(62, 78)  # widths of broken lines, one per book


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens of a split, with all books concatenated.

    Attributes:
        tokens: [n] uint16, memory-mapped.
        starts: start of each book, and end of the last one.
        characters: characters of all books.
    """

    tokens: np.ndarray
    starts: np.ndarray
    characters: int


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Both splits, and their tokenizer."""

    train: Tokens
    val: Tokens
    tokenizer: Tokenizer
    tokenizer_json: str
    fingerprint: str
    folder: Path


def prepare(books: Path, destination: Path, size: Size, tokenizer: Path | None) -> None:
    """Tokenise the archives of `books` into the folder `destination`, whole or not at all.

    Args:
        tokenizer: folder with the `tokenizer.json` to use; None: train one.
    """
    train, val = archives(books, "train"), archives(books, "val")
    bpe = read_tokenizer(tokenizer) if tokenizer else train_tokenizer(train, size)
    with staged(destination.resolve()) as folder:
        write_text(folder / "tokenizer.json", bpe.to_str())
        splits = {}
        sources = {
            "train": _some_broken(read_books(train, size.characters_per_book), size.broken_lines),
            "val": read_books(val, VALIDATION_CHARACTERS),
        }
        for split, books_of_split in sources.items():
            with open(folder / f"{split}.bin", "wb") as file:
                splits[split] = _write_tokens(file, books_of_split, bpe)
            note(f"{split}: {splits[split]['starts'][-1]:,} tokens")
        contents = {
            "format": FORMAT,
            "archives": [path.name for path in (*train, *val)],
            "characters_per_book": size.characters_per_book,
            "broken_lines": size.broken_lines,
            "splits": splits,
        }
        write_text(folder / "corpus.json", json.dumps(contents) + "\n")


def open_corpus(folder: Path) -> Corpus:
    """Map the files that `prepare` wrote.

    Raises:
        InputError: they are missing, or another version wrote them.
    """
    try:
        text = (folder / "corpus.json").read_text()
        contents = json.loads(text)
        tokenizer_json = (folder / "tokenizer.json").read_text()
        splits = {name: _map(folder, name, contents["splits"][name]) for name in ("train", "val")}
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder}: not a prepared corpus ({error}); delete it") from None
    if contents.get("format") != FORMAT:
        raise InputError(f"{folder}: prepared by another version; delete it")
    fingerprint = hashlib.sha256((text + tokenizer_json).encode()).hexdigest()
    tokenizer = Tokenizer.from_str(tokenizer_json)
    return Corpus(splits["train"], splits["val"], tokenizer, tokenizer_json, fingerprint, folder)


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a model folder and check the special tokens of the recipe.

    Raises:
        InputError: it is missing or incompatible.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_str(path.read_text())
    except Exception as error:  # tokenizers raises bare exceptions
        raise InputError(f"{path}: cannot be read ({error}); give a folder that has one") from None
    if [tokenizer.token_to_id(name) for name in SPECIAL] != list(range(len(SPECIAL))):
        raise InputError(f"{path}: its first tokens are not {', '.join(SPECIAL)}")
    if tokenizer.get_vocab_size() > 1 << 16:
        raise InputError(f"{path}: more than 65,536 tokens; give a smaller one")
    return tokenizer


def train_tokenizer(paths: list[Path], size: Size) -> Tokenizer:
    """Train a byte-level BPE with `size.vocabulary` tokens on the beginnings of all books."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size.vocabulary,
        special_tokens=[AddedToken(name, special=True) for name in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    most = max(1000, size.tokenizer_characters // 500)  # characters of each book
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        for book in read_books(paths, most):
            read += len(book.text)
            yield book.text
            if read >= size.tokenizer_characters:
                return

    tokenizer.train_from_iterator(texts(), trainer)
    note(f"tokenizer: {tokenizer.get_vocab_size():,} tokens from {read:,} characters")
    return tokenizer


def _some_broken(books: Iterator[Book], share: float) -> Iterator[Book]:
    """Yield the books, a fixed share of them with broken lines."""
    rng = np.random.default_rng(0)
    for book in books:
        broken, width = rng.random() < share, int(rng.choice(WIDTHS))
        yield book._replace(text=with_broken_lines(book.text, width)) if broken else book


def encode_book(ids: Iterable[int]) -> np.ndarray:
    """Return a book's tokens between beginning-of-sequence and end-of-sequence."""
    return np.array([BOS, *ids, EOS], np.uint16)


def _write_tokens(file: IO[bytes], books: Iterator[Book], tokenizer: Tokenizer) -> dict[str, Any]:
    starts, names, characters = [0], [], 0
    while some := list(itertools.islice(books, BOOKS_AT_ONCE)):
        encoded = tokenizer.encode_batch_fast([b.text for b in some], add_special_tokens=False)
        for book, encoding in zip(some, encoded, strict=True):
            tokens = encode_book(encoding.ids)
            file.write(tokens.tobytes())
            starts.append(starts[-1] + len(tokens))
            names.append(book.name)
            characters += len(book.text)
    return {"starts": starts, "characters": characters, "books": names}


def _map(folder: Path, name: str, split: dict[str, Any]) -> Tokens:
    tokens = np.memmap(folder / f"{name}.bin", np.uint16, "r")
    if len(tokens) != split["starts"][-1]:
        raise ValueError(f"{name}.bin has {len(tokens)} tokens")
    return Tokens(tokens, np.array(split["starts"]), split["characters"])
