"""Functions of a decoder, compiled once for all equal decoders."""

import functools
from collections.abc import Callable
from typing import Any

from infinigen_jax.cache.host_array import Placement
from infinigen_jax.programs.program import Program


class Compiled:
    """Function whose first argument is a decoder, with one `Program` per decoder."""

    __name__: str
    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], out: Any, options: Any, jit: dict[str, Any]):
        functools.update_wrapper(self, function)
        self._function, self._out, self._options, self._jit = function, out, options, jit
        self.of = functools.lru_cache(maxsize=64)(self.compile)

    def __call__(self, decoder: Any, *arguments: Any, **static: Any) -> Any:
        return self.of(decoder)(*arguments, **static)

    def compile(self, decoder: Any) -> Program:
        """Return a new program; `of` returns the decoder's own."""
        options = {"compiler_options": self._options(decoder)} if self._options else {}
        out = self._out(Placement(decoder.mesh))
        function = functools.partial(self._function, decoder)
        return Program(function, decoder, out, **options, **self._jit)


def compiled(
    out: Callable[[Any], Any], options: Callable[[Any], Any] | None = None, **jit: Any
) -> Callable[[Callable[..., Any]], Compiled]:
    """Compile a function for each decoder, its first argument.

    Args:
        out: maps the decoder's `Placement` to the shardings of the results.
        options: maps the decoder to XLA's options.
        jit: options of `jax.jit`. Numbers of arguments do not count the decoder.
    """
    return lambda function: Compiled(function, out, options, jit)
