"""Killing a program at each of its file operations: `python tests/kills.py WHAT FOLDER`.

The program is forked before each run, so that imports are paid once; each child is killed with
SIGKILL at its n-th operation on a file below the folder, until one of them ends by itself. Prints
one JSON line a kill: the operation, and what `check` found afterwards. No JAX backend may start in
the parent.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "shutil.rmtree")


def kill_at(number: int, folder: Path) -> None:
    """Make this process kill itself before its n-th operation, counted from 1."""
    left = number

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        # The swap of two folders is a call into libc, announced by the look-up of its name.
        inside = event in EVENTS and str(arguments[0]).startswith(str(folder))
        if inside or (event == "ctypes.dlsym" and arguments[1] == "renameat2"):
            left -= 1
            if left == 0:
                sys.stdout.write(json.dumps({"at": event}) + "\n")
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill_everywhere(
    work: Callable[[], None], check: Callable[[], str], folder: Path, most: int = 300
) -> None:
    """Run `work` until it ends, with a kill at each operation before."""
    for number in range(1, most):
        child = os.fork()
        if child == 0:
            kill_at(number, folder)
            try:
                work()
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"found": check(), "status": status}), flush=True)
        if not os.WIFSIGNALED(status):
            return


def conversion(folder: Path) -> tuple[Callable[[], None], Callable[[], str]]:
    """Converting FOLDER/llama over the conversion that is in FOLDER/out."""
    from infinigen_jax.checkpoint.manifest import read_manifest
    from infinigen_jax.convert.pipeline import convert
    from infinigen_jax.loading.conversion_cache import verify_files

    out = folder / "out"

    def work() -> None:
        convert(folder / "llama", out, skew="none", dtype="float16", force=True)

    def check() -> str:
        manifest = read_manifest(out)
        verify_files(out, manifest)
        return manifest.dtype

    return work, check


def folder(place: Path) -> tuple[Callable[[], None], Callable[[], str]]:
    """Replacing the folder FOLDER/folder."""
    from infinigen_jax.files.atomic import staged, write_text

    (place / "folder").mkdir()
    (place / "folder" / "a").write_text("old")

    def work() -> None:
        with staged(place / "folder") as out:
            for name in "ab":
                write_text(out / name, "new")

    def check() -> str:
        texts = {file.read_text() for file in (place / "folder").iterdir()}
        return texts.pop() if len(texts) == 1 else "mixed"

    return work, check


def file(folder: Path) -> tuple[Callable[[], None], Callable[[], str]]:
    """Replacing a file."""
    from infinigen_jax.files.atomic import whole_file

    (folder / "file").write_text("old")

    def work() -> None:
        with whole_file(folder / "file") as out:
            for _ in range(3):
                out.write(b"new" * 50_000)

    def check() -> str:
        text = (folder / "file").read_bytes()
        return {b"old": "old", b"new" * 150_000: "new"}.get(text, "damaged")

    return work, check


def parts(folder: Path) -> tuple[Callable[[], None], Callable[[], str]]:
    """Saving measurements of an evaluation."""
    import numpy as np

    from infinigen_jax.evaluation.session import Measurement, Parts

    kept = Parts(folder / "result.json", {"key": 1})

    def work() -> None:
        kept.save({"a": 1}, Measurement({"x": np.arange(9000.0)}, {"is": "new"}))

    def check() -> str:
        names = [path.suffix for path in (folder / "result.json.parts").glob("[!.]*")]
        assert names in ([], [".npz"])
        found = kept.load({"a": 1})
        assert found is None or found.arrays["x"].sum() == 9000 * 8999 / 2
        if found is None and names:
            return "damaged"
        return "old" if found is None else found.values["is"]

    return work, check


def saved(folder: Path) -> tuple[Callable[[], None], Callable[[], str]]:
    """Saving a conversation over the one that is in FOLDER/talk."""
    import numpy as np

    from infinigen_jax.engine.saved_file import SavedFile, write_saved

    shape = (3, 5000, 7)

    def write(name: str, number: float) -> None:
        rows = np.full(shape, number, np.float32)
        layout = {"rows": (rows.dtype, shape)}
        write_saved(folder / "talk", {"is": name}, layout, [("rows", rows)])

    def check() -> str:
        file = SavedFile(folder / "talk")
        rows = file.read("rows", np.float32, shape)
        assert rows.min() == rows.max() == {"old": 1, "new": 2}[file.record["is"]]
        return file.record["is"]

    write("old", 1)
    return lambda: write("new", 2), check


if __name__ == "__main__":
    kinds = (conversion, folder, file, parts, saved)
    what = {made.__name__: made for made in kinds}
    chosen = Path(sys.argv[2])
    kill_everywhere(*what[sys.argv[1]](chosen), chosen)
