"""Models on the Hugging Face hub, through huggingface_hub: its cache, token and offline mode."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infinigen_jax.checkpoint.hf_folder import (
    SAFETENSORS,
    SIDE_FILES,
    TORCH,
    read_config,
    shard_names,
)
from infinigen_jax.errors import InputError, ParameterError
from infinigen_jax.files.regular import TOKENIZER_FILES, expanded

NAME = r"[\w-][\w.-]*"
HUB_ID = re.compile(rf"({NAME}/{NAME})(/(?:{NAME}/)*{NAME}\.(?i:gguf))?")
NO_MODEL = re.compile(r"-\d{5}-of-\d{5}\.gguf$|/mmproj", re.IGNORECASE)
# Files at the top of a repository. Others repeat the weights (`onnx/`, `consolidated.safetensors`).
SETTINGS = ("config.json", *SIDE_FILES)
SILENT = 1.0  # seconds before a progress bar appears, so that cached files cause none
LOG_IN = "set HF_TOKEN or run `hf auth login`"


def fetched(name: str | Path, revision: str | None = None, weights: bool = True) -> Path:
    """Return the path of a model; one on the hub is downloaded, or found in the hub's cache.

    Args:
        name: a path, else `org/name` or `org/name/file.gguf` on the hub.
        revision: branch, tag or commit on the hub; None for its main branch.
        weights: whether weights are needed, in addition to configuration and tokenizer. A GGUF
            file is downloaded whole.
    """
    matched = HUB_ID.fullmatch(str(name))
    if matched is None or expanded(name).exists():
        if revision is not None:
            raise ParameterError("revision", f"{name} is not a model on the hub, omit it", revision)
        return Path(name)
    model, file = matched.groups()
    if file is not None:
        with _explained(str(name), revision):
            import huggingface_hub

            return Path(huggingface_hub.hf_hub_download(model, file[1:], revision=revision))
    folder = _snapshot(model, revision, *SETTINGS)
    absent = "config.json"
    if (folder / absent).exists():
        if not weights:
            return folder
        # Refuse a model that cannot be used before its weights are downloaded.
        read_config(folder)
        if not any((folder / file).exists() for file in TOKENIZER_FILES):
            names = ", ".join(TOKENIZER_FILES)
            raise InputError(f"{name}: has no tokenizer ({names}) on the hub; choose another")
        absent = f"{SAFETENSORS} or {TORCH}"
        for single in (SAFETENSORS, TORCH):
            index = f"{single}.index.json"
            folder = _snapshot(model, revision, *SETTINGS, single, index)
            if (folder / single).exists():
                return folder
            if (folder / index).exists():
                return _snapshot(model, revision, *SETTINGS, index, *shard_names(folder / index))
    files = _gguf_files(model, revision)
    remedy = f"name a file, such as {' or '.join(files[:3])}" if files else "choose another"
    raise InputError(f"{name}: has no {absent} on the hub; {remedy}")


def _gguf_files(model: str, revision: str | None) -> list[str]:
    """Return the GGUF files of a model with their whole names, except parts and image encoders."""
    with _explained(model, revision):
        from huggingface_hub import list_repo_files

        paths = (f"{model}/{file}" for file in list_repo_files(model, revision=revision))
    return [path for path in paths if HUB_ID.fullmatch(path) and not NO_MODEL.search(path)]


def _snapshot(name: str, revision: str | None, *patterns: str) -> Path:
    with _explained(name, revision):
        from huggingface_hub import snapshot_download, utils

        class Bar(utils.tqdm):
            def __init__(self, *arguments: Any, **settings: Any):
                super().__init__(*arguments, **({"delay": SILENT} | settings))

        folder = snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), tqdm_class=Bar
        )
        return Path(folder)


@contextlib.contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    from huggingface_hub import errors

    incomplete = (
        "no such folder here, not complete in the hub's cache, and the hub cannot be reached (or "
        "HF_HUB_OFFLINE is set)"
    )
    reasons = {
        errors.GatedRepoError: f"access is restricted; accept its terms on the hub, then {LOG_IN}",
        errors.RepositoryNotFoundError: "no such folder here, and no such model on the hub; for a "
        f"private model {LOG_IN}",
        errors.RevisionNotFoundError: f"has no revision {revision!r} on the hub",
        errors.RemoteEntryNotFoundError: "no such file on the hub",
        errors.LocalEntryNotFoundError: incomplete,
        errors.OfflineModeIsEnabled: incomplete,
    }
    try:
        yield
    except Exception as error:  # of the network, the hub, the disk, or a damaged cache
        known = (reason for kind, reason in reasons.items() if isinstance(error, kind))
        raise InputError(f"{name}: {next(known, f'cannot be downloaded ({error})')}") from None
