"""Compiled programs that outlive the process: a second start neither traces nor lowers them.

A `Program` is a jitted function. Its first call with arguments of some shapes looks for an
executable in the user's cache, and traces, lowers and compiles only where there is none. JAX's own
compilation cache saves the compilation alone, a third of a start.

An executable's file is named by everything that it depends on: the source of this package, the
versions of JAX, the processor, XLA's flags, the settings that the function closes over, and the
shapes, dtypes and places of its arguments. It is a pickle, so the folder must be the user's.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.experimental import serialize_executable

from infinigen_jax.files.atomic import whole_file
from infinigen_jax.files.user_cache import processor, program_folder, prune_programs

logger = logging.getLogger(__name__)

SUFFIX = ".program"


class Program:
    """A jitted function whose executables are kept on disk.

    Args:
        function: to compile. Keyword arguments of a call are static.
        settings: everything that it closes over; its `repr` must tell all of it.
        options: of `jax.jit`.
    """

    def __init__(self, function: Callable[..., Any], settings: Any, **options: Any):
        self._jitted = jax.jit(function, **options)
        self._name = _name_of(function)
        self._settings = settings
        self._options = {name: options[name] for name in options if name != "out_shardings"}
        self._executables: dict[Any, Any] = {}
        self._last: tuple[dict[str, Any], Any] = ({}, None)

    def __call__(self, *arguments: Any, **static: Any) -> Any:
        last_static, last = self._last
        if last is not None and static == last_static:
            try:
                return last(*arguments)
            except (TypeError, ValueError):  # of other shapes; nothing has run or been donated
                pass
        executable = self._executable(arguments, static)
        self._last = (static, executable)
        return executable(*arguments)

    def lower(self, *arguments: Any, **static: Any) -> Any:
        """Lower for arguments or their shapes, as `jax.jit` does; nothing is kept."""
        return self._jitted.lower(*arguments, **static)

    def trace(self, *arguments: Any, **static: Any) -> Any:
        """Trace for arguments or their shapes, as `jax.jit` does; nothing is kept."""
        return self._jitted.trace(*arguments, **static)

    def _executable(self, arguments: Any, static: dict[str, Any]) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):  # a plan, without arrays
            return functools.partial(self._jitted, **static)
        shapes = tuple(map(_kind_of, leaves))
        key = (structure, shapes, tuple(sorted(static.items(), key=lambda item: item[0])))
        if key not in self._executables:
            self._executables[key] = self._load_or_compile(key, arguments, static)
        return self._executables[key]

    def _load_or_compile(self, key: Any, arguments: Any, static: dict[str, Any]) -> Any:
        folder = program_folder()
        if folder is None or jax.default_backend() != "cpu":  # elsewhere not tried
            return self._jitted.lower(*arguments, **static).compile()
        sources = outside_sources(self._settings)
        text = repr((self._name, self._settings, sources, self._options, key, environment()))
        path = folder / (hashlib.sha256(text.encode()).hexdigest()[:40] + SUFFIX)
        executable = _load(path)
        if executable is None:
            lowered, hits = self._jitted.lower(*arguments, **static), cache_hits()
            executable = lowered.compile()
            if cache_hits() == hits:  # XLA cannot serialise an executable that was deserialised
                _save(path, executable, "lapack_" in lowered.as_text())
        return executable


def _name_of(function: Any) -> str:
    """A name that no other function of the package has with the same settings."""
    if isinstance(function, functools.partial):
        return f"{_name_of(function.func)}{sorted(function.keywords.items())}"
    return f"{function.__module__}.{function.__qualname__}"


def _kind_of(leaf: Any) -> tuple[Any, ...]:
    """What of an argument decides about the executable."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, str(leaf.dtype), leaf.weak_type, leaf.committed, leaf.sharding
    return getattr(leaf, "shape", ()), str(getattr(leaf, "dtype", type(leaf)))


_hits = 0


@functools.cache
def _listen() -> None:
    def heard(event: str, **kwargs: str | int) -> None:
        global _hits
        _hits += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_listener(heard)


def cache_hits() -> int:
    """Executables that JAX's compilation cache has given since the first call of this function."""
    _listen()
    return _hits


@functools.cache
def environment() -> str:
    """Everything outside of a function that its executable depends on."""
    source = hashlib.sha256()
    root = Path(__file__).parents[1]
    for file in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".cu")):
        source.update(str(file.relative_to(root)).encode() + file.read_bytes())
    flags = os.environ.get("XLA_FLAGS", "")
    names = "jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable"
    numerics = [getattr(jax.config, name) for name in names]
    versions = jax.__version__, importlib.metadata.version("jaxlib")
    return repr((source.hexdigest(), versions, processor(), flags, numerics))


def outside_sources(settings: Any) -> list[str]:
    """Hashes of the modules outside of this package that define a part of the settings.

    A policy may be the user's own: its code is compiled into the programs.
    """
    parts, hashes = [settings], set()
    while parts:
        part = parts.pop()
        if isinstance(part, tuple):
            parts += part
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            parts += [getattr(part, field.name) for field in dataclasses.fields(part)]
            for kind in type(part).__mro__:
                if not kind.__module__.startswith(("infinigen_jax.", "builtins")):
                    hashes.add(_source_hash(kind.__module__))
    return sorted(hashes)


def _source_hash(module: str) -> str:
    """Hash of a module's file, or its name if it has none (a notebook: a new one each time)."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return f"{module} {time.time_ns()}"
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _load(path: Path) -> Any:
    """The executable in a file; None if it cannot be had."""
    try:
        with open(path, "rb") as file:
            uses_lapack, *serialised = pickle.load(file)
        if uses_lapack:
            _initialise_lapack()
        return serialize_executable.deserialize_and_load(*serialised)
    except FileNotFoundError:
        return None
    except Exception as error:  # truncated, of another build, of another machine: compile again
        logger.debug("%s: %s", path, error)
        return None


@functools.cache
def _initialise_lapack() -> None:
    """Bind LAPACK's functions, which JAX does only when it lowers one; unbound, a call crashes."""
    jax.jit(jnp.linalg.inv).lower(jax.ShapeDtypeStruct((1, 1), jnp.float32))


def _save(path: Path, executable: Any, uses_lapack: bool) -> None:
    """Keep an executable, if it can be kept; a start goes on without."""
    try:
        content = pickle.dumps((uses_lapack, *serialize_executable.serialize(executable)))
        prune_programs()
        with whole_file(path) as file:
            file.write(content)
    except Exception as error:  # read-only folder, full disk, what cannot be serialised
        logger.debug("%s: %s", path, error)
