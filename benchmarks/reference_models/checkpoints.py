"""Training state in one file: everything that the rest of the training depends on.

The file is replaced atomically, so a crash leaves the previous one intact.
"""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from infinigen_jax.errors import InputError

DESCRIPTION = "description"


def save(path: Path, tree: Any, description: dict[str, Any]) -> None:
    """Write the arrays of a tree and a JSON object."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    arrays = {f"leaf{i}": np.asarray(leaf) for i, (_, leaf) in enumerate(leaves)}
    text = json.dumps(description | {"leaves": [_name(where) for where, _ in leaves]})
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        np.savez(file, allow_pickle=False, **{DESCRIPTION: np.array(text)}, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def describe(path: Path) -> dict[str, Any]:
    """Return the JSON object of a checkpoint.

    Raises:
        InputError: the file is missing or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return json.loads(str(file[DESCRIPTION]))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; no state was saved, so start anew") from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: not a checkpoint ({error}); delete it and start anew") from None


def restore(path: Path, like: Any) -> Any:
    """Return the tree of a checkpoint; `like` has the same structure, shapes and dtypes.

    Raises:
        InputError: the checkpoint differs from `like`.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    names = describe(path)["leaves"]
    if names != [_name(where) for where, _ in leaves]:
        raise InputError(f"{path}: of another model; give another --out")
    with np.load(path, allow_pickle=False) as file:
        arrays = [file[f"leaf{i}"] for i in range(len(leaves))]
    for (where, leaf), array in zip(leaves, arrays, strict=True):
        if array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise InputError(f"{path}: {_name(where)} is {array.dtype}{list(array.shape)}")
    return jax.tree_util.tree_unflatten(structure, [jax.numpy.asarray(a) for a in arrays])


def _name(where: Any) -> str:
    return jax.tree_util.keystr(where)
