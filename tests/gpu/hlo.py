"""The text of an HLO module, read into instructions."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

HOST_SPACE = 5  # memory space of pinned host buffers in HLO layouts: "{1,0:S(5)}"


class Buffer(NamedTuple):
    """Array of an instruction's result."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    on_host: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Line of a computation.

    `results` are the arrays it produces, without the operands that the text of an asynchronous
    start repeats in its result type.
    """

    computation: str
    name: str
    opcode: str
    operands: tuple[str, ...]
    results: tuple[Buffer, ...]
    inlines: str | None  # the computation that is part of this kernel: a fusion's, a reduction's
    target: str | None  # custom_call_target
    op_name: str  # where it comes from: "jit(step)/layer2/mlp/dot_general", by jax.named_scope
    text: str

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.results)


_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*->.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "token": 0}  # others carry their width in their name


@functools.lru_cache(maxsize=8)
def computations(hlo: str) -> dict[str, list[Instruction]]:
    """Return all computations by name, each a list of instructions in scheduled order."""
    bodies, current = {}, None
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            current = header.group(1)
            bodies[current] = []
        elif current and (match := _LINE.match(line)):
            bodies[current].append(_instruction(current, *match.groups()))
    return bodies


def products(work: Iterable[Instruction], scope: str) -> list[Instruction]:
    """Return the launches that stem from matrix products in a named scope."""
    return [i for i in work if f"/{scope}/" in i.op_name and "dot_general" in i.op_name]


def _instruction(computation, name, rest):
    result_type, rest = _split_type(rest)
    opcode, _, rest = rest.partition("(")
    inside, attributes = _until_closing(rest)
    called = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", attributes)
    if opcode.startswith(("call", "async")):
        called = None  # a computation with a separate schedule
    target = re.search(r'custom_call_target="([^"]*)"', attributes)
    op_name = re.search(r'metadata=\{[^}]*op_name="([^"]*)"', attributes)
    attributes = re.sub(r", metadata=\{[^}]*\}", "", attributes)
    return Instruction(
        computation=computation,
        name=name,
        opcode=opcode,
        operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
        results=tuple(map(_buffer, _ARRAY.findall(_instruction_results(opcode, result_type)))),
        inlines=called and called.group(1),
        target=target and target.group(1),
        op_name=op_name.group(1) if op_name else "",
        text=f"{name} = {result_type} {opcode}({inside}){attributes}",
    )


def _split_type(text):
    if text.startswith("("):
        inside, rest = _until_closing(text[1:])
        return f"({inside})", rest.strip()
    result_type, _, rest = text.partition(" ")
    return result_type, rest


def _until_closing(text):
    """Split at the parenthesis that closes one opened just before `text`."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:position], text[position + 1 :]
    raise ValueError(f"unbalanced parentheses in {text[:200]!r}")


def _instruction_results(opcode, result_type):
    """Return the part of a result type that an operation produces.

    Asynchronous starts repeat their operands: a copy-start has the type (destination, source,
    context), a fusion-start or call-start ((operands), results, context), an all-gather-start
    (operand, result), an all-reduce-start none.
    """
    if not opcode.endswith("-start") or not result_type.startswith("("):
        return result_type
    if result_type.startswith("(("):
        return _until_closing(result_type[2:])[1]
    arrays = [match.group() for match in _ARRAY.finditer(result_type)]
    return arrays[0] if opcode == "copy-start" else " ".join(arrays[1:])


def _buffer(match):
    dtype, dimensions, layout = match
    shape = tuple(int(d) for d in dimensions.split(",") if d)
    bits = _BITS[dtype] if dtype in _BITS else int(re.findall(r"\d+", dtype)[0])
    return Buffer(dtype, shape, math.prod(shape) * bits // 8, f"S({HOST_SPACE})" in layout)
