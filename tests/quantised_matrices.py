"""Random quantised matrices of Hugging Face folders, with the numbers that they stand for."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

GROUP = 32  # inputs with a scale of their own
FORMS = ("compressed", "symmetric", "gptq", "reordered", "awq")
FLOAT4, BITSANDBYTES = ("nvfp4", "mxfp4", "modelopt"), ("nf4", "nested", "int8")
STATE = "weight.quant_state.bitsandbytes__nf4"


def settings_of(form: str) -> dict[str, Any]:
    """Return the quantization_config that says how matrices are packed."""
    if form in ("compressed", "symmetric"):
        return {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    if form in ("nvfp4", "mxfp4"):
        return {"quant_method": "compressed-tensors", "format": f"{form}-pack-quantized"}
    if form == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if form in BITSANDBYTES:
        bits = 8 if form == "int8" else 4
        return {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True}
    if form == "awq":
        return {"quant_method": "awq", "version": "gemm"}
    return {"quant_method": "gptq", "checkpoint_format": "gptq"}


def words(codes: torch.Tensor, bits: int, axis: int, order: Sequence[int] = ()) -> torch.Tensor:
    """Pack neighbours on an axis into words, the first of `order` in the lowest bits."""
    places = order or range(32 // bits)
    neighbours = codes.long().movedim(axis, -1).unflatten(-1, (-1, len(places)))
    packed = sum(neighbours[..., place] << bits * i for i, place in enumerate(places))
    return torch.as_tensor(packed).to(torch.int32).movedim(-1, axis).contiguous()


def packed(form: str, bits: int, shape: Sequence[int]) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the tensors of a random matrix, by the ends of their names, and its numbers."""
    if form in FLOAT4:
        return float4(form, shape)
    if form in BITSANDBYTES:
        return bitsandbytes(form, shape)
    outputs, inputs = shape
    codes = torch.randint(1 << bits, (outputs, inputs))
    zeros = torch.randint(1 << bits, (outputs, inputs // GROUP))
    scales = ((torch.rand(zeros.shape) + 0.5) / (2 << bits)).half()
    groups = torch.arange(inputs) // GROUP
    if form == "symmetric":
        zeros[:] = 1 << bits - 1
    if form == "reordered":
        groups = groups[torch.randperm(inputs)]
    values = (codes - zeros[:, groups]) * scales[:, groups].float()
    if form in ("compressed", "symmetric"):
        parts = {"weight_packed": words(codes, bits, 1), "weight_scale": scales}
        parts["weight_shape"] = torch.tensor(list(shape))
        return parts | (
            {"weight_zero_point": words(zeros, bits, 0)} if form == FORMS[0] else {}
        ), values
    if form == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {
            "qweight": words(codes.T, bits, 1, order),
            "qzeros": words(zeros.T, bits, 1, order),
        }
    else:
        one_less = (zeros.T - 1) % (1 << bits)
        parts = {"qweight": words(codes.T, bits, 0), "qzeros": words(one_less, bits, 1)}
        parts |= {"g_idx": groups.int(), "bias": torch.zeros(outputs).half()}
    return parts | {"scales": scales.T.contiguous()}, values


def float4(form: str, shape: Sequence[int]) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the tensors of a random matrix of floats in 4 bits, and its numbers."""
    outputs, inputs = shape
    codes, group = torch.randint(16, (outputs, inputs)), 32 if form == "mxfp4" else 16
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    parts = {"weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)}
    if form == "mxfp4":
        exponents = torch.randint(120, 126, (outputs, inputs // group))
        parts["weight_scale"], scales = exponents.to(torch.uint8), 2.0 ** (exponents - 127)
    else:
        small = (torch.rand(outputs, inputs // group) * 400).to(torch.float8_e4m3fn)
        scales = small.float() / 4096
        parts["weight_scale"] = small
        parts["weight_global_scale"] = torch.tensor([4096.0])
    if form == "modelopt":
        parts["weight"] = parts.pop("weight_packed")
        parts["weight_scale_2"] = 1 / parts.pop("weight_global_scale")[0]
        parts["input_scale"] = torch.ones(())
    values = sizes[codes & 7] * (1 - 2 * (codes >> 3)) * scales.repeat_interleave(group, 1)
    return parts, values


def bitsandbytes(form: str, shape: Sequence[int]) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the tensors of a random matrix of bitsandbytes, and its numbers."""
    if form == "int8":
        numbers, scales = torch.randint(-127, 128, tuple(shape)), torch.rand(shape[0])
        parts = {"weight": numbers.to(torch.int8), "SCB": scales}
        parts["weight_format"] = torch.tensor(0, dtype=torch.uint8)
        return parts, numbers * scales[:, None] / 127
    codes, book = torch.randint(16, tuple(shape)), torch.randn(16).sort().values
    high, low = codes.reshape(-1, 2).T
    block, outer = (64, 16) if form == "nested" else (4096, 1)  # of 64 numbers, across rows of 96
    blocks = torch.arange(codes.numel()) // block
    parts = {"weight": (high << 4 | low).to(torch.uint8)[:, None], "weight.quant_map": book}
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float16", "shape": list(shape)}
    scales = torch.rand(int(blocks[-1]) + 1) / 10
    if form == "nested":
        parts["weight.absmax"] = small = torch.randint(256, scales.shape, dtype=torch.uint8)
        parts["weight.nested_quant_map"] = nested_book = torch.rand(256) - 0.5
        parts["weight.nested_absmax"] = factors = torch.rand(-(-len(scales) // outer)) / 10
        scales = nested_book[small.long()] * factors.repeat_interleave(outer)[: len(scales)] + 0.07
        state |= {"nested_blocksize": outer, "nested_dtype": "float32", "nested_offset": 0.07}
    else:
        parts["weight.absmax"] = scales
    parts[STATE] = json_bytes(state)
    return parts, (book[codes].reshape(-1) * scales[blocks]).reshape(codes.shape)


def json_bytes(value: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def with_state(**changes: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: json_bytes(json.loads(bytes(x.tolist())) | changes)
