"""Loading a tokenizer; transformers takes seconds to import and is imported only here."""

from pathlib import Path
from typing import Any

from infinigen_jax.errors import InputError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer of a model folder; nothing is downloaded.

    Raises:
        InputError: when the folder has no tokenizer or a damaged one.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        names = ", ".join(TOKENIZER_FILES)
        raise InputError(f"{folder}: has no tokenizer ({names}); copy the model's files there")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise many kinds, even bare ones
        reason = " ".join(str(error).split())
        raise InputError(
            f"{folder}: the tokenizer cannot be read ({reason}); copy the model's files again"
        ) from None
