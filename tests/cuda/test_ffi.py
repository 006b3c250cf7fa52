"""XLA's structures as `ffi` mirrors them, against the header that jaxlib ships."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import jaxlib
import pytest

from infinigen_jax.cuda import ffi

INCLUDE = Path(jaxlib.__file__).parent / "include"
HEADER = "xla/ffi/api/c_api.h"
# Each structure's name in C, and names of fields that differ.
MIRRORED: list[tuple[type[ctypes.Structure], str, dict[str, str]]] = [
    (ffi.ApiVersion, "Api_Version", {}),
    (ffi.Extension, "Extension_Base", {}),
    (ffi.Metadata, "Metadata", {}),
    (ffi.MetadataExtension, "Metadata_Extension", {}),
    (ffi.Buffer, "Buffer", {}),
    (ffi.Array, "Array", {}),
    (ffi.Values, "Args", {"values": "args"}),
    (ffi.Values, "Rets", {"values": "rets"}),
    (ffi.Attributes, "Attrs", {}),
    (ffi.CallFrame, "CallFrame", {}),
    (ffi.ErrorCreate, "Error_Create_Args", {}),
    (ffi.StreamGet, "Stream_Get_Args", {}),
    (
        ffi.Api,
        "Api",
        {
            "error_create": "XLA_FFI_Error_Create",
            "error_get_message": "XLA_FFI_Error_GetMessage",
            "error_destroy": "XLA_FFI_Error_Destroy",
            "handler_register": "XLA_FFI_Handler_Register",
            "stream_get": "XLA_FFI_Stream_Get",
        },
    ),
]
# Mirrored without their last fields, which newer interfaces add to.
IN_PART = (ffi.Metadata, ffi.CallFrame, ffi.Api)


def field_names(structure: type[ctypes.Structure]) -> list[str]:
    kinds = reversed(structure.__mro__)
    return [field[0] for kind in kinds for field in vars(kind).get("_fields_", ())]


def expressions() -> list[str]:
    """C expressions whose values `expected` gives."""
    found = ["XLA_FFI_Extension_Metadata", "XLA_FFI_Error_Code_INTERNAL", "XLA_FFI_API_MAJOR"]
    for structure, name, renamed in MIRRORED:
        for field in field_names(structure):
            member = renamed.get(field, field)
            found.append(f"offsetof(XLA_FFI_{name}, {member})")
            found.append(f"sizeof(((XLA_FFI_{name}*)0)->{member})")
        if structure not in IN_PART:
            found.append(f"sizeof(XLA_FFI_{name})")
    return found


def expected() -> list[int]:
    found = [ffi.METADATA, ffi.INTERNAL, ffi.VERSION[0]]
    for structure, _, _ in MIRRORED:
        for field in field_names(structure):
            descriptor = getattr(structure, field)
            found += [descriptor.offset, descriptor.size]
        if structure not in IN_PART:
            found.append(ctypes.sizeof(structure))
    return found


def test_structures_are_laid_out_as_in_the_header_of_jaxlib(tmp_path):
    compiler = shutil.which("cc")
    if not (INCLUDE / HEADER).is_file():
        pytest.skip(f"jaxlib ships no {HEADER}")
    if compiler is None:
        pytest.skip("no C compiler")
    asked = expressions()
    lines = "".join(f'    printf("%zu\\n", (size_t)({each}));\n' for each in asked)
    source = tmp_path / "layout.c"
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{HEADER}"\n'
        f"int main(void) {{\n{lines}    return 0;\n}}\n"
    )
    program = tmp_path / "layout"
    subprocess.run([compiler, "-I", INCLUDE, "-o", program, source], check=True)
    values = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    got = dict(zip(asked, map(int, values), strict=True))
    assert got == dict(zip(asked, expected(), strict=True))
