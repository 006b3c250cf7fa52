"""The text of an HLO module, its instructions, and what they launch, copy and allocate."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from compile_for_gpu import Program

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


_NO_NEW_BUFFER = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call opt-barrier "
    "after-all add-dependency".split()
)
_BOOKKEEPING = _NO_NEW_BUFFER - {"while", "conditional", "call"}


class AsyncPair(NamedTuple):
    """Start, the work that is launched while it runs, and the done that waits for it."""

    start: Instruction
    done: Instruction
    between: tuple[Instruction, ...]


def schedule(program: Program) -> dict[str, list[Instruction]]:
    """Return the launches by computation, without fused bodies and bookkeeping."""
    everything = computations(program.hlo)
    inlined = {i.inlines for body in everything.values() for i in body}
    return {
        name: [i for i in body if i.opcode not in _BOOKKEEPING]
        for name, body in everything.items()
        if name not in inlined
    }


def launched(program: Program) -> list[Instruction]:
    """Return every launch, one computation after the other."""
    return [i for body in schedule(program).values() for i in body]


def copies(program: Program, min_bytes: int = 0) -> list[Instruction]:
    """Return every copy of at least min_bytes, inside fusions too."""
    return [
        i
        for body in computations(program.hlo).values()
        for i in body
        if i.opcode in ("copy", "copy-start") and i.nbytes >= min_bytes
    ]


def host_copies(program: Program, min_bytes: int = 0) -> list[Instruction]:
    """Return copies that read or write pinned host memory: transfers, and host-to-host copies."""
    bodies = computations(program.hlo)

    def touches_host(copy):
        defined = {i.name: i for i in bodies[copy.computation]}
        involved = [copy] + [defined[name] for name in copy.operands if name in defined]
        return any(buffer.on_host for i in involved for buffer in i.results)

    return [copy for copy in copies(program, min_bytes) if touches_host(copy)]


def large_results(program: Program, min_bytes: int) -> list[Instruction]:
    """Return all launches that fill a new buffer of at least min_bytes, copies or not."""
    bodies = computations(program.hlo)

    def fills_buffer(i):
        parts = [i, *bodies.get(i.inlines, [])]
        in_place = any(
            part.opcode in ("dynamic-update-slice", "scatter") and part.nbytes >= min_bytes
            for part in parts
        )
        return not (
            in_place
            or i.opcode in _NO_NEW_BUFFER
            or i.opcode.endswith(("-done", "-update"))
            or "output_to_operand_aliasing" in i.text
            or i.target == "AllocateBuffer"
        )

    return [i for i in launched(program) if i.nbytes >= min_bytes and fills_buffer(i)]


def async_pairs(program: Program) -> list[AsyncPair]:
    """Return asynchronous operations, with the work scheduled between start and done."""
    pairs = []
    for body in schedule(program).values():
        for position, start in enumerate(body):
            if not start.opcode.endswith("-start"):
                continue
            for end in range(position + 1, len(body)):
                if body[end].opcode.endswith("-done") and start.name in body[end].operands:
                    pairs.append(AsyncPair(start, body[end], tuple(body[position + 1 : end])))
    return pairs


def assert_overlaps(program: Program, pair: AsyncPair, layer: str, before: int = 1) -> None:
    """Check that a layer's attention and MLP run during a copy.

    The first `before` products of attention may precede it: the projection to q, k and v is one
    product with the speculated query.
    """
    work = launched(program)
    attention, mlp = (products(work, f"{layer}{part}") for part in ("attention", "mlp"))
    assert len(attention) >= 3 and len(mlp) >= 2
    assert {*attention[before:], *mlp} <= {*pair.between}


def independent(program: Program, work: Instruction) -> list[Instruction]:
    """Return launches of the same computation that neither lead to `work` nor need its results."""
    body = computations(program.hlo)[work.computation]
    by_name = {i.name: i for i in body}

    def resolve(name: str) -> str:
        """The operation that makes a value which tuples only pass on."""
        one = by_name.get(name)
        if one is None or one.opcode not in ("get-tuple-element", "bitcast"):
            return name
        source = by_name.get(resolve(one.operands[0]))
        if one.opcode == "get-tuple-element" and source is not None and source.opcode == "tuple":
            return resolve(source.operands[int(one.text.rpartition("index=")[2].split(",")[0])])
        return one.operands[0] if source is None else source.name

    needs = {i.name: {resolve(name) for name in i.operands} for i in body if i.opcode != "tuple"}
    before, after, pending = set(), {work.name}, [work.name]
    while pending:
        name = pending.pop()
        if name not in before:
            before.add(name)
            pending += needs.get(name, ())
    for i in body:
        if needs.get(i.name, set()) & after:
            after.add(i.name)
    return [i for i in schedule(program)[work.computation] if i.name not in before | after]


def assert_no_copy_larger_than(program: Program, limit_bytes: int) -> None:
    """Raise AssertionError, naming the instructions, if anything above the limit is copied."""
    offenders = copies(program, limit_bytes + 1)
    listing = "\n".join(f"  {i.computation}: {i.text[:200]}" for i in offenders)
    assert not offenders, f"copies of more than {limit_bytes} bytes:\n{listing}"


def assert_updated_in_place(program: Program, cache_bytes: int) -> None:
    """Check that a donated host cache of this size is returned in its own buffer."""
    alias, temp = program.memory["host_alias"], program.memory["host_temp"]
    assert alias >= cache_bytes, f"only {alias} bytes of host memory are aliased, not {cache_bytes}"
    assert temp < cache_bytes, f"{temp} bytes of pinned temporaries, the cache has {cache_bytes}"
