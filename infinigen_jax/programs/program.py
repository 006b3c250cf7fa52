"""Compiled programs that outlive the process: a second start neither traces nor lowers them.

A `Program` traces, lowers and compiles only if the user's cache has no executable. (JAX's own cache
saves a third of the start-up time.) The file name is a hash of everything that the executable
depends on: the source of this package, the JAX versions, the processor, the XLA flags, the settings
the function closes over, and the shapes, dtypes and shardings of the arguments. Programs with a
policy from another package are not stored, nor those that call LAPACK: to prepare a policy for a
corrected query. The file is a pickle: the folder must be the user's.

On a CPU, XLA maps every part of an executable separately: an engine has hundreds of memory
mappings, and LLVM ends a process that exceeds Linux's limit. A process with many engines therefore
frees the executables that it loaded first, and loads or compiles them again when they are needed.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import os
import pickle
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.experimental import serialize_executable

from infinigen_jax.files.atomic import whole_file
from infinigen_jax.files.user_cache import processor, program_folder, prune_programs
from infinigen_jax.programs.compilations import cache_hits

logger = logging.getLogger(__name__)

SUFFIX = ".program"
PRECISION = "jax_default_matmul_precision"
DIGEST = hashlib.sha256().digest_size  # of the rest of a file, which follows
MOST_MAPPED = 0.5  # share of the memory mappings that Linux allows a process
EVERY = 16  # executables between two counts of the mappings, which take milliseconds
FEWEST = 64  # executables that stay: one engine may need as many


def _source_digest() -> str:
    source, root = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".cu")):
        source.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return source.hexdigest()


# Read as this module is imported: files may change before the first program is compiled.
_SOURCE = _source_digest()


class Program:
    """A jitted function whose executables are stored on disk.

    Keyword arguments of a call are static. `settings` are all values the function closes over;
    their `repr` must identify them. `out` are the shardings of the results.
    """

    def __init__(
        self, function: Callable[..., Any], settings: Any, out: Any = None, **options: Any
    ):
        # A new function: for an equal one JAX would return the executable in its memory, which XLA
        # cannot serialise if it came from JAX's cache.
        new = functools.partial(in_full_precision(function, settings))
        self._jitted: Any = jax.jit(new, out_shardings=out, **options)
        # Both accept arrays or their shapes, and store nothing.
        self.lower, self.trace = self._jitted.lower, self._jitted.trace
        self._name = _name_of(function)
        self._settings, self._options = settings, options
        self._executables: dict[Any, Any] = {}
        self._last: dict[Any, Any] = {}  # by structure and static values: a layer's kind

    def __call__(self, *arguments: Any, **static: Any) -> Any:
        kind = jax.tree.structure(arguments), *static.items()
        if (last := self._last.get(kind)) is not None:
            try:
                return last(*arguments)
            except (TypeError, ValueError):  # shapes differ; nothing has run or been donated
                pass
        self._last[kind] = executable = self._executable(arguments, static)
        return executable(*arguments)

    def _executable(self, arguments: Any, static: dict[str, Any]) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):  # abstract evaluation
            return functools.partial(self._jitted, **static)
        shapes = tuple(map(_signature, leaves))
        key = (structure, shapes, tuple(sorted(static.items())))
        if (known := self._executables.get(key)) is not None:
            return known
        self._executables[key] = executable = self._load_or_compile(key, arguments, static)
        _loaded.append((weakref.ref(self), key))
        if len(_loaded) % EVERY == 0:
            free_old_executables()
        return executable

    def free(self, key: Any) -> None:
        """Forget an executable; the next call loads or compiles it again."""
        self._executables.pop(key, None)
        self._last.clear()
        self._jitted.clear_cache()  # has those that were compiled, not loaded

    def _load_or_compile(self, key: Any, arguments: Any, static: dict[str, Any]) -> Any:
        folder = None if is_foreign(self._settings) else program_folder()
        if folder is None or not stores_programs():
            return self._jitted.lower(*arguments, **static).compile()
        text = repr((self._name, self._settings, self._options, key, environment()))
        path = folder / (hashlib.sha256(text.encode()).hexdigest()[:40] + SUFFIX)
        executable = _load(path)
        if executable is None:
            lowered, hits = self._jitted.lower(*arguments, **static), cache_hits()
            executable = lowered.compile()
            # XLA cannot serialise a deserialised executable. JAX binds LAPACK's functions when it
            # lowers a call of one; a process that only loads the executable would crash.
            if cache_hits() == hits and "lapack_" not in lowered.as_text():
                _save(path, executable)
        return executable


_loaded: list[tuple["weakref.ref[Program]", Any]] = []  # programs and keys, oldest first


def mapped_share() -> float:
    """Return the share of the allowed memory mappings that this process has; 0 if unknown."""
    try:
        mappings = Path("/proc/self/maps").read_bytes().count(b"\n")
        return mappings / int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 0.0


def free_old_executables() -> None:
    """Free the older half of the executables if the process has too many mappings.

    Entries of programs that are gone are dropped, and the newest FEWEST executables stay.
    """
    global _loaded
    loaded, older = [each for each in _loaded if each[0]() is not None], 0
    if len(loaded) > FEWEST and mapped_share() > MOST_MAPPED:
        older = min(len(loaded) // 2, len(loaded) - FEWEST)
    for reference, key in loaded[:older]:
        if (program := reference()) is not None:
            program.free(key)
    _loaded = loaded[older:]


def stores_programs() -> bool:
    """Return whether programs are stored: only on a single CPU device; others are untested."""
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def in_full_precision(function: Callable[..., Any], settings: Any) -> Callable[..., Any]:
    """Let a function of a float32 model multiply in float32: GPUs round factors to TF32.

    Users may set JAX's default precision themselves. `settings` are as for `Program`.
    """
    parts = settings if isinstance(settings, tuple) else (settings,)
    exact = any(getattr(part, "dtype", None) == jnp.float32 for part in parts)
    if not exact or jax.default_backend() == "cpu" or getattr(jax.config, PRECISION) is not None:
        return function

    @functools.wraps(function)
    def traced(*arguments: Any, **static: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*arguments, **static)

    traced.__name__ = getattr(function, "func", function).__name__  # in profiles
    return traced


def _name_of(function: Any) -> str:
    if isinstance(function, functools.partial):
        return f"{_name_of(function.func)}{sorted(function.keywords.items())}"
    return f"{function.__module__}.{function.__qualname__}"


def _signature(leaf: Any) -> tuple[Any, ...]:
    """Return the properties of an argument that the executable depends on."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, str(leaf.dtype), leaf.weak_type, leaf.committed, leaf.sharding
    return getattr(leaf, "shape", ()), str(getattr(leaf, "dtype", type(leaf)))


@functools.cache
def environment() -> str:
    """Describe the package, JAX, the processor and the flags, which all executables depend on."""
    flags = os.environ.get("XLA_FLAGS", "")
    names = ["jax_enable_x64", PRECISION, "jax_threefry_partitionable"]
    names += ["jax_default_prng_impl", "jax_random_seed_offset"]
    numerics = [getattr(jax.config, name) for name in names]
    versions = jax.__version__, importlib.metadata.version("jaxlib")
    # XLA divides loops among the processor's cores.
    cores = len(os.sched_getaffinity(0))
    return repr((_SOURCE, versions, processor(), cores, flags, numerics))


def is_foreign(settings: Any) -> bool:
    """Return whether code of another package, such as a user's policy, is part of the settings.

    That code is compiled into the programs, and may import other modules that change.
    """
    if isinstance(settings, tuple):
        return any(map(is_foreign, settings))
    if not dataclasses.is_dataclass(settings) or isinstance(settings, type):
        return False
    packages = {kind.__module__.partition(".")[0] for kind in type(settings).__mro__}
    if packages - {"infinigen_jax"} - sys.stdlib_module_names:
        return True
    return any(is_foreign(getattr(settings, x.name)) for x in dataclasses.fields(settings))


def _load(path: Path) -> Any:
    """Read an executable from a file; return None if it is missing or unusable."""
    try:
        content = path.read_bytes()
        digest, content = content[:DIGEST], content[DIGEST:]
        if hashlib.sha256(content).digest() != digest:  # XLA may crash on damaged code
            raise ValueError("damaged")
        return serialize_executable.deserialize_and_load(*pickle.loads(content))
    except Exception as error:  # missing, truncated, of another build or machine: compile again
        logger.debug("%s: %s", path, error)
        return None


def _save(path: Path, executable: Any) -> None:
    """Store an executable; a failure is logged and otherwise ignored."""
    try:
        content = pickle.dumps(serialize_executable.serialize(executable))
        prune_programs()
        with whole_file(path, wait=False) as file:
            file.write(hashlib.sha256(content).digest() + content)
    except Exception as error:  # read-only folder, full disk, not serialisable
        logger.debug("%s: %s", path, error)
