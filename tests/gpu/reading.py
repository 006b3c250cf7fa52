"""Launches, copies, allocations and overlap of a compiled program.

assert_no_copy_larger_than(program, 1 << 20)
assert_updated_in_place(program, cache_bytes)
for pair in async_pairs(program):
    print(pair.start.name, [i.name for i in pair.between])
"""

from typing import NamedTuple

from compile_for_gpu import Program
from hlo import Instruction, computations

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
    """Return all launches that fill a new buffer of at least min_bytes, copies or not.

    It finds operations that a search for copies misses: the cache converted, transposed, sliced or
    gathered as a whole. Operations that only pass buffers on are left out, and so are updates: one
    that is not in place has a copy before it, or temporaries in `memory`.
    """
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
    """Return asynchronous operations, with the work scheduled between start and done.

    An empty `between` means that nothing overlaps with it.
    """
    pairs = []
    for body in schedule(program).values():
        for position, start in enumerate(body):
            if not start.opcode.endswith("-start"):
                continue
            for end in range(position + 1, len(body)):
                if body[end].opcode.endswith("-done") and start.name in body[end].operands:
                    pairs.append(AsyncPair(start, body[end], tuple(body[position + 1 : end])))
    return pairs


def independent(program: Program, work: Instruction) -> list[Instruction]:
    """Return launches of the same computation that neither lead to `work` nor need its results.

    They can run concurrently, regardless of their order in the program.
    """
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
    """Check that a donated host cache of this size is returned in its own buffer.

    Raise AssertionError otherwise, or if a pinned temporary of that size exists.
    """
    alias, temp = program.memory["host_alias"], program.memory["host_temp"]
    assert alias >= cache_bytes, f"only {alias} bytes of host memory are aliased, not {cache_bytes}"
    assert temp < cache_bytes, f"{temp} bytes of pinned temporaries, the cache has {cache_bytes}"
