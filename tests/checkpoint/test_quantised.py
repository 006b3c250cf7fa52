"""Quantised folders: their matrices are those that the codes and scales stand for."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from quantised_matrices import (
    BITSANDBYTES,
    FLOAT4,
    FORMS,
    STATE,
    bitsandbytes,
    json_bytes,
    packed,
    settings_of,
    with_state,
)
from safetensors.numpy import load_file
from safetensors.torch import save_file
from tiny import TinyModel, logits_of, refuses, take_tensors

from infinigen_jax import load
from infinigen_jax.checkpoint import codebook, quantised
from infinigen_jax.checkpoint.hf_folder import open_tensors
from infinigen_jax.checkpoint.manifest import read_manifest
from infinigen_jax.checkpoint.tensor_source import TensorSource
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.models.small_weights import rows_of, small_form

TOKENS = np.arange(6)[None]


def quantise(made: TinyModel, form: str, bits: int, whole: str = "") -> dict[str, torch.Tensor]:
    """Replace a model's matrices by random packed ones, except those with `whole` in their names.

    Return the stored tensors.
    """
    tensors, values = take_tensors(made.folder), {}
    for name in [name for name in tensors if "_proj" in name and not (whole and whole in name)]:
        parts, values[name] = packed(form, bits, tensors.pop(name).shape)
        tensors |= {name.replace("weight", part): tensor for part, tensor in parts.items()}
    made.model.load_state_dict(values, strict=False)
    save(made, tensors, settings_of(form))
    return tensors


def save(made: TinyModel, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    save_file(tensors, made.folder / "model.safetensors")
    hf = json.loads((made.folder / "config.json").read_text())
    (made.folder / "config.json").write_text(json.dumps(hf | {"quantization_config": settings}))


def check_conversions(made: TinyModel, out: Path) -> None:
    """Check that conversions that link and that write weights give the logits of the numbers."""
    linked = convert(made.folder, out / "linked", skew="none")
    whole = convert(made.folder, out / "whole", skew="none", dtype="float32")
    assert (linked / "model.safetensors").samefile(made.folder / "model.safetensors")
    assert "quantization_config" not in json.loads((whole / "config.json").read_text())
    assert {x.dtype.name for x in load_file(whole / "model.safetensors").values()} == {"float32"}
    for folder in (linked, whole):
        logits = logits_of(load(folder), TOKENS)
        np.testing.assert_allclose(logits, made.logits(TOKENS), atol=2e-5)


@pytest.mark.parametrize(
    ("form", "bits"),
    [
        *((form, 4) for form in (*FORMS, *FLOAT4, *BITSANDBYTES)),
        *(("compressed", 8), ("gptq", 8)),
    ],
)
def test_matrices_are_the_numbers_that_codes_and_scales_stand_for(
    form, bits, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(quantised, "AT_ONCE", 1000)
    monkeypatch.setattr(codebook, "AT_ONCE", 1000)
    made = tiny("llama", hidden_size=64, intermediate_size=96)
    quantise(made, form, bits)
    check_conversions(made, tmp_path)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "reordered"])
def test_int4_holds_packed_matrices_exactly_and_others_in_int8(form, tiny, tmp_path):
    made = tiny("llama", hidden_size=64, intermediate_size=96)
    quantise(made, form, 4, "layers.1.mlp.down_proj")
    expected = open_tensors(made.folder)
    for dtype in None, "float32":
        out = convert(made.folder, tmp_path / str(dtype), skew="none", dtype=dtype)
        model = load(out, "bfloat16", weight_dtype="int4")
        assert model.params["layers"][0]["attention_norm"]["scale"].dtype == "bfloat16"
        for number, layer in enumerate(model.params["layers"]):
            assert small_form(layer) == ("int4", {"down"})
            matrix = expected[f"model.layers.{number}.self_attn.o_proj.weight"].read()
            np.testing.assert_allclose(rows_of(layer["o"], 64), matrix, rtol=0, atol=1e-6)


def test_a_folder_in_four_bits_alone_has_no_matrix_in_more(tiny, tmp_path):
    made = tiny("llama", hidden_size=64, intermediate_size=96)
    quantise(made, "gptq", 4)
    assert read_manifest(convert(made.folder, tmp_path / "out", skew="none")).wide == []


def matrix_of(**parts: np.ndarray) -> np.ndarray:
    sources = {
        f"a.{part}": TensorSource(f"a.{part}", Path("x"), x.shape, x.dtype, x.copy)
        for part, x in parts.items()
    }
    return quantised.dequantised(sources)["a.weight"].read()


def test_words_of_known_codes():
    """Codes 0 to 7, less 8: of eight outputs with one input, and of outputs with eight inputs."""
    scales = np.ones((1, 8), np.float16)
    awq, zeros = np.array([[0x75316420]], np.int32), np.array([[-0x77777778]], np.int32)
    codes = np.arange(8)[:, None] - 8
    np.testing.assert_array_equal(matrix_of(qweight=awq, scales=scales, qzeros=zeros), codes)
    word, zeros = np.array([[0x76543210]], np.int32), np.array([[0x77777777]], np.int32)
    made = matrix_of(qweight=np.tile(word, 8), scales=scales, qzeros=zeros)
    np.testing.assert_array_equal(made, np.tile(codes.T, (8, 1)))
    size, scale = np.array([1, 8]), np.ones((1, 1), np.float16)
    made = matrix_of(weight_packed=word, weight_scale=scale, weight_shape=size)
    np.testing.assert_array_equal(made, codes.T)


def test_bytes_of_known_codes():
    """Codes 1 and 2, 15 and 7, then 8: the first of a pair in the low bits, or in the high bits."""
    data, one = np.array([[0x21, 0x7F]], np.uint8), np.ones((1, 1), np.float32)
    scale = np.array([[1, 2]], ml_dtypes.float8_e4m3fn)
    made = matrix_of(weight=data, weight_scale=scale, weight_scale_2=one * 2)
    np.testing.assert_array_equal(made, [[1, 2, -24, 24]])
    made = matrix_of(weight_packed=data, weight_scale=scale, weight_global_scale=one * 2)
    np.testing.assert_array_equal(made, [[0.25, 0.5, -6, 6]])
    exponents = np.array([[126, 129]], np.uint8)
    made = matrix_of(weight_packed=data, weight_scale=exponents)
    np.testing.assert_array_equal(made, [[0.25, 0.5, -24, 24]])
    state = json_bytes({"blocksize": 2, "shape": [1, 5]}).numpy()
    parts = {
        "weight": np.array([[0x12], [0xF7], [0x80]], np.uint8),
        "weight.absmax": np.array([1, 2, 3], np.float32),
        "weight.quant_map": np.arange(16, dtype=np.float32),
        "weight.quant_state.bitsandbytes__fp4": state,
    }
    np.testing.assert_array_equal(matrix_of(**parts), [[1, 2, 30, 14, 24]])


def test_bytes_in_words_and_a_block_of_all_scales():
    """FSDP needs the bytes of a matrix as numbers of its dtype."""
    parts, values = bitsandbytes("nested", (64, 96))
    state = with_state(nested_blocksize=1 << 70)(parts[STATE])
    parts |= {STATE: state, "weight.nested_absmax": parts["weight.nested_absmax"][:1]}
    arrays = {name: x.numpy() for name, x in parts.items()}
    plain = matrix_of(**arrays)
    np.testing.assert_allclose(plain[0, :64], values[0, :64], rtol=1e-6)
    arrays["weight"] = arrays["weight"].reshape(-1).view(np.float32)[:, None]
    np.testing.assert_array_equal(matrix_of(**arrays), plain)


@pytest.mark.parametrize("form", ["compressed", "gptq"])
def test_sizes_that_are_no_multiples(form):
    """Words hold padding; the last of GPTQ's groups is shorter."""
    parts, values = packed(form, 4, (16, 96))
    arrays = {name: x.numpy() for name, x in parts.items() if name != "bias"}
    if form == "gptq":
        arrays["qweight"], arrays["g_idx"] = arrays["qweight"][:10], arrays["g_idx"][:80]
        values = values[:, :80]
    else:
        arrays["weight_scale"], values = arrays["weight_scale"][:13], values[:13]
        arrays["weight_packed"] = arrays["weight_packed"][:13]
        arrays["weight_shape"] = np.array([13, 96])
    np.testing.assert_array_equal(matrix_of(**arrays), values)


DAMAGED = "damaged, or not one of the supported formats"
DAMAGE: list[tuple[str, str, Any, str]] = [
    ("gptq", "scales", None, DAMAGED),
    ("gptq", "qzeros", None, DAMAGED),
    ("gptq", "qzeros", lambda x: x[:1], DAMAGED),
    ("gptq", "qweight", lambda x: x[None], DAMAGED),
    ("gptq", "qweight", lambda x: x[:, :16].contiguous(), DAMAGED),
    ("gptq", "qweight", lambda x: x.long(), "damaged, .*int64"),
    ("gptq", "scales", lambda x: x.int(), DAMAGED),
    ("gptq", "g_idx", lambda x: x[1:], DAMAGED),
    ("gptq", "g_idx", lambda x: x - 1, "groups other than 0 to"),
    ("gptq", "g_idx", lambda x: x + 1, "groups other than 0 to"),
    ("gptq", "qzeros", lambda x: x.repeat(1, 4), DAMAGED),
    ("gptq", "bias", lambda x: x + 1, r"unexpected: .*\.bias"),
    ("awq", "scales", lambda x: x.T.contiguous(), DAMAGED),
    ("awq", "qzeros", lambda x: x.long(), DAMAGED),
    ("awq", "scales", lambda x: x[:0], DAMAGED),
    ("gptq", "g_idx", lambda x: x.float(), DAMAGED),
    ("compressed", "weight_shape", lambda x: x.float() * torch.inf, DAMAGED),
    ("compressed", "weight_shape", None, DAMAGED),
    ("compressed", "weight_shape", lambda x: x[:1], DAMAGED),
    ("compressed", "weight_shape", lambda x: -x, DAMAGED),
    ("compressed", "weight_shape", lambda x: x + 8, DAMAGED),
    ("compressed", "weight_scale", lambda x: x.repeat(1, 3), DAMAGED),
    ("symmetric", "weight_scale", lambda x: x[:, :1].repeat(1, 5), DAMAGED),
    ("symmetric", "weight_packed", None, "weight_scale without a matrix"),
    ("nvfp4", "weight_packed", lambda x: x.int(), DAMAGED),
    ("nvfp4", "weight_packed", lambda x: x[1:].contiguous(), DAMAGED),
    ("nvfp4", "weight_scale", None, DAMAGED),
    ("nvfp4", "weight_scale", lambda x: x[:, :5].contiguous(), DAMAGED),
    ("nvfp4", "weight_global_scale", None, DAMAGED),
    ("nvfp4", "weight_global_scale", lambda x: x.repeat(2), DAMAGED),
    ("compressed", "weight_global_scale", torch.ones(1), DAMAGED),
    ("nvfp4", "weight_shape", torch.tensor([64, 96]), DAMAGED),
    ("int8", "weight_format", lambda x: x + 1, DAMAGED),
    ("int8", "weight", None, DAMAGED),
    ("int8", "weight", lambda x: x.int(), DAMAGED),
    ("int8", "SCB", lambda x: x[1:], DAMAGED),
    ("int8", "SCB", lambda x: x.int(), DAMAGED),
    ("mxfp4", "weight_scale", lambda x: x.int(), DAMAGED),
    ("modelopt", "weight", None, DAMAGED),
    ("modelopt", "weight_scale_2", None, r"down_proj.weight \(64, 48\)"),
    ("nf4", "weight", lambda x: x[1:], DAMAGED),
    ("nf4", "weight.absmax", None, DAMAGED),
    ("nf4", "weight.absmax", lambda x: x.repeat(2), DAMAGED),
    ("nf4", "weight.quant_map", lambda x: x[:8].contiguous(), DAMAGED),
    ("nf4", "weight.quant_map", None, "unexpected: .*absmax"),
    ("nf4", STATE, None, DAMAGED),
    ("nf4", STATE, lambda x: x[1:].contiguous(), DAMAGED),
    ("nf4", STATE, lambda x: json_bytes([1]), DAMAGED),
    ("nf4", STATE, with_state(shape=[1 << 62, 1 << 62]), DAMAGED),
    ("nf4", STATE, with_state(shape=[6144]), DAMAGED),
    ("nf4", STATE, with_state(blocksize=0), DAMAGED),
    ("nf4", STATE, with_state(blocksize=1 << 60), DAMAGED),
    ("nf4", STATE, lambda x: torch.nn.functional.pad(x, (0, 4096), value=32), DAMAGED),
    ("nf4", STATE, lambda x: x.int(), DAMAGED),
    ("nested", STATE, with_state(nested_blocksize=0), DAMAGED),
    ("nested", STATE, with_state(nested_offset=float("nan")), DAMAGED),
    ("nested", "weight.nested_absmax", None, DAMAGED),
    ("nested", "weight.nested_quant_map", lambda x: x[:16].contiguous(), DAMAGED),
]


@pytest.mark.parametrize(("form", "part", "change", "message"), DAMAGE)
def test_damaged_parts_are_refused(form, part, change, message, tiny, tmp_path):
    made = tiny("llama", hidden_size=64, intermediate_size=96)
    tensors = quantise(made, form, 4)
    name = f"model.layers.1.mlp.down_proj.{part}"
    given = tensors.pop(name, None)
    if change is not None:
        tensors[name] = change if isinstance(change, torch.Tensor) else change(given)
    save(made, tensors, settings_of(form))
    line = refuses(message, convert, made.folder, tmp_path / "out", skew="none", dtype="float32")
    assert "model.layers.1.mlp.down_proj" in line and str(made.folder) in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("block", "dtype", "ending", "settings"),
    [
        ((128, 128), torch.float8_e4m3fn, "_inv", {"quant_method": "fp8"}),
        ((1, 512), torch.float8_e4m3fn, "", {"quant_method": "fbgemm_fp8"}),
        ((512, 512), torch.float8_e4m3fn, "", {"quant_method": "modelopt", "quant_algo": "FP8"}),
        ((512, 512), torch.int8, "", {"quant_method": "compressed", "format": "int-quantized"}),
    ],
    ids=["blocks", "rows", "whole", "int8"],
)
def test_quantised_matrices_are_multiplied_by_their_scales(
    block, dtype, ending, settings, tiny, tmp_path
):
    made = tiny("llama", hidden_size=160, intermediate_size=300)
    tensors, values = take_tensors(made.folder), {}
    for name in [name for name in tensors if "_proj" in name]:
        rows, columns = tensors[name].shape
        parts = (-(-rows // block[0]), -(-columns // block[1]))
        scales = ((torch.rand(parts) + 0.5) / 100).to(torch.bfloat16)
        tensors[name] = (tensors[name] * 100).to(dtype)
        spread = torch.kron(scales.float(), torch.ones(block))[:rows, :columns]
        values[name] = tensors[name].float() * spread
        one = parts == (1, 1)
        tensors[f"{name}_scale{ending}"] = scales.reshape(()) if one else scales
        tensors[name.replace("weight", "input_scale")] = torch.ones(())
    save(made, tensors, settings)
    made.model.load_state_dict(values, strict=False)
    check_conversions(made, tmp_path)

    weights = made.folder / "model.safetensors"

    def refused(message: str, changed: dict[str, torch.Tensor], named: Path = weights) -> None:
        save(made, changed, settings)
        assert str(named) in refuses(message, convert, made.folder, tmp_path / "out", skew="none")
        assert not (tmp_path / "out").exists()

    scale, exponents = f"{name}_scale{ending}", torch.zeros(parts, dtype=torch.uint8)
    refused(r"_scale.* is \[7, 1\] for a matrix of \[", tensors | {scale: torch.ones(7, 1)})
    more = {"model.norm.weight_scale": torch.ones(())}
    refused("model.norm.weight_scale without a matrix", tensors | more)
    refused("scales in uint8 are not supported", tensors | {scale: exponents})
    refused("_zero_point: matrices with zero points", tensors | {f"{name}_zero_point": exponents})
    doubled = {f"{name.removesuffix('weight')}qweight": torch.ones(8, 8, dtype=torch.int32)}
    refused(r"qweight next to .*\.weight", tensors | doubled)
    tensors.pop(scale)
    if dtype == torch.int8:
        refused("not floating point", tensors, made.folder)
    else:
        refused("in FP8 without a scale", tensors)
