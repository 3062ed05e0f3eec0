"""Quantized checkpoints of others become floating-point weights, and what is odd about one is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exchange.exchanged import ours
from fourbits.exchange.folder import load_hf, save_hf
from fourbits.exchange.nvfp4_checkpoints import (
    CHECKPOINT_FORMATS,
    COMPRESSED_TENSORS,
    E2M1,
    MODELOPT,
    PackedWeight,
)
from fourbits.exchange.nvfp4_checkpoints import quantization_config as described

OURS = "blocks.0.ffn.down_proj.weight"
NAME = "model.layers.0.mlp.down_proj"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 64], "activation_scheme": "dynamic"}


def folder_with(path: Path, config: Any, tensors: dict[str, torch.Tensor]) -> Path:
    """A Llama whose down_proj of block 0, [48, 96], is replaced by quantized tensors."""
    model = ours("llama")
    save_hf(model.state_dict(), model.config, path, dtype=torch.float32)
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    found = load_file(path / "model.safetensors")
    del found[f"{NAME}.weight"]
    save_file(found | tensors, path / "model.safetensors")
    return path


def packed() -> PackedWeight:
    codes = torch.randint(0, 256, (48, 48), dtype=torch.uint8)
    scale = torch.randint(1, 127, (48, 6), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return PackedWeight(codes, scale, torch.tensor(2.0**-11))


def nvfp4(checkpoint, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    found = checkpoint.tensors(NAME, packed(), torch.tensor(0.5))
    return {name: changes.pop(name.rpartition(".")[2], tensor) for name, tensor in found.items()}


@pytest.mark.parametrize("checkpoint", CHECKPOINT_FORMATS.values(), ids=CHECKPOINT_FORMATS)
def test_nvfp4_is_decoded_element_by_element(checkpoint, tmp_path):
    torch.manual_seed(0)
    weight = packed()
    expected = torch.empty(48, 96)
    for row in range(48):
        for column in range(96):
            byte = int(weight.codes[row, column // 2])
            value = E2M1[byte >> 4 if column % 2 else byte & 15]
            expected[row, column] = value * weight.block_scale[row, column // 16].float() * 2.0**-11
    cache = {f"{NAME}.k_scale": torch.ones(())}  # of a quantized cache: no parameter
    folder = folder_with(
        tmp_path,
        described(checkpoint, ["lm_head"], True),
        checkpoint.tensors(NAME, weight, torch.tensor(0.5)) | cache,
    )
    assert torch.equal(load_hf(folder).state_dict()[OURS], expected)


def test_a_folder_of_modelopt_may_describe_itself_in_a_separate_file(tmp_path):
    folder = folder_with(tmp_path, None, nvfp4(MODELOPT))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert load_hf(folder).state_dict()[OURS].shape == (48, 96)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(ValueError, match=r"config.json: weights must be floating-point, NVFP4 of .* got"):
        load_hf(folder)


def test_e4m3_in_blocks_is_multiplied_by_its_scales(tmp_path):
    """Blocks of 32 x 64 on [48, 96]: the last ones of each axis are partial."""
    codes = torch.randn(48, 96).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2) + 0.5
    tensors = {f"{NAME}.weight": codes, f"{NAME}.weight_scale_inv": scales}
    found = load_hf(folder_with(tmp_path, FP8, tensors)).state_dict()[OURS]
    expected = codes.float()
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
        expected[row * 32 : row * 32 + 32, column * 64 : column * 64 + 64] *= scales[row, column]
    assert torch.equal(found, expected)


HALF = torch.ones(24, 6).to(torch.float8_e4m3fn)
ODD: dict[str, tuple[Any, dict[str, torch.Tensor], str]] = {
    "no scales": (
        described(MODELOPT, [], False),
        {f"{NAME}.weight": packed().codes},
        "down_proj.weight_scale' is missing, without which",
    ),
    "no codes": (
        described(COMPRESSED_TENSORS, [], False),
        {f"{NAME}.weight_scale": packed().block_scale},
        "down_proj.weight_packed' is missing, without which",
    ),
    "scales of other rows": (
        described(MODELOPT, [], False),
        nvfp4(MODELOPT, weight_scale=HALF),
        r"weight_scale' must be torch.float8_e4m3fn, \[48, 6\], got torch.float8_e4m3fn \[24, 6\]",
    ),
    "codes of another width": (
        described(COMPRESSED_TENSORS, [], False),
        nvfp4(
            COMPRESSED_TENSORS,
            weight_packed=torch.zeros(48, 64, dtype=torch.uint8),
            weight_scale=torch.ones(48, 8).to(torch.float8_e4m3fn),
        ),
        r"must have the shape \[48, 96\] by its configuration, got \[48, 128\]",
    ),
    "NaN among scales": (
        described(MODELOPT, [], False),
        nvfp4(MODELOPT, weight_scale_2=torch.tensor(torch.nan)),
        r"down_proj.weight' has 4608 values that are not finite",
    ),
    "another method": ({"quant_method": "gptq", "bits": 4}, {}, "weights must be floating-point, NVFP4 of"),
    "another format": (
        described(COMPRESSED_TENSORS, [], False) | {"format": "pack-quantized"},
        {},
        "weights must be floating-point, NVFP4 of",
    ),
    "fp8 by tensors": ({"quant_method": "fp8"}, {}, "or fp8 with weight_block_size"),
    "fp8 without scales": (
        FP8,
        {f"{NAME}.weight": torch.ones(48, 96).to(torch.float8_e4m3fn)},
        "down_proj.weight_scale_inv' is missing",
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_an_odd_quantized_checkpoint_is_refused_by_name(case, tmp_path):
    config, tensors, message = ODD[case]
    with pytest.raises(ValueError, match=message) as error:
        load_hf(folder_with(tmp_path, config, tensors))
    assert len(str(error.value).splitlines()) == 1
    assert str(tmp_path) in str(error.value)


def test_the_reciprocal_of_a_scale_of_training_is_exact_for_every_mantissa():
    """Scales are reciprocals of fp32; readers divide by the stored divisor or by its reciprocal."""
    encode = torch.arange(2**23, 2**24, dtype=torch.int32).view(torch.float32)  # every mantissa of a binade
    scale = 1.0 / encode
    assert torch.equal(1.0 / (1.0 / scale), scale)


def test_a_scale_whose_reciprocal_is_infinite_is_refused_by_the_format_that_divides():
    weight = PackedWeight(packed().codes, packed().block_scale, torch.tensor(2.0**-128))
    assert MODELOPT.tensors(NAME, weight, None)
    with pytest.raises(ValueError, match=r"must be finite in this format, .* or in the format of modelopt"):
        COMPRESSED_TENSORS.tensors(NAME, weight, None)
