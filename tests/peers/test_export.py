"""Exports as other programs read them: modelopt's and compressed-tensors' code, and transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fourbits.cli.main import main
from fourbits.exchange.folder import load_hf
from fourbits.exchange.nvfp4_checkpoints import COMPRESSED_TENSORS, MODELOPT, CheckpointFormat
from fourbits.recipe.presets import get_recipe
from fourbits.train.forward_weights import ForwardWeight, forward_weights, packed_weight
from fourbits.train.load_run import StoredModel, open_trained
from support.peer_inputs import peer
from support.small_runs import trained

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
RECIPES = ["nvfp4", "nvfp4-46", "quartet2", "quartet2-46", "nvfp4-naive"]


@pytest.fixture(scope="module", params=RECIPES)
def stored(request, tmp_path_factory) -> StoredModel:
    folder = tmp_path_factory.mktemp("trained")
    return open_trained(trained(folder, request.param, pattern="TTTT", width=64))


def export(
    stored: StoredModel, checkpoint: CheckpointFormat, out: Path, *more: str
) -> dict[str, torch.Tensor]:
    words = [
        "export",
        str(stored.folder),
        "--format",
        checkpoint.name,
        "--scales",
        "separate",
        "--out",
        str(out),
    ]
    assert main([*words, *more]) == 0
    return load_file(out / "model.safetensors")


def modules(stored: StoredModel):
    """(their name, master, weight) of every quantized layer."""
    for name, weight in forward_weights(stored.converted("meta")).items():
        theirs = name.replace("blocks", "model.layers").replace(".attention.", ".self_attn.")
        yield theirs.replace(".ffn.", ".mlp.").removesuffix(".weight"), stored.state[name], weight


def values(weight: ForwardWeight, master: torch.Tensor) -> torch.Tensor:
    return torch.cat([q.dequantize(torch.float32) for q in weight.quantized(master)])


def by_modelopt(module: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """A weight in BF16, by modelopt's own code."""
    kind = peer("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    codes = tensors[f"{module}.weight"]
    shape = torch.Size((codes.shape[0], 2 * codes.shape[1]))
    return kind(shape, torch.bfloat16, codes).dequantize(
        scale=tensors[f"{module}.weight_scale"],
        double_scale=tensors[f"{module}.weight_scale_2"],
        block_sizes={-1: 16},
    )


def by_compressed_tensors(module: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """A weight in BF16, by compressed-tensors' own code."""
    scheme = peer("compressed_tensors.quantization").preset_name_to_scheme("NVFP4", ["Linear"])
    start = f"{module}."
    state = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
    return peer("compressed_tensors.compressors.nvfp4.base").NVFP4PackedCompressor.decompress(state, scheme)[
        "weight"
    ]


def assert_one_rounding_apart(theirs: torch.Tensor, own: torch.Tensor) -> None:
    """theirs: BF16, of a product whose two FP32 roundings are placed otherwise than in own, FP32."""
    low, high = (own * (1 - sign * 2**-22) for sign in (1, -1))
    bounds = torch.stack((low.bfloat16().float(), high.bfloat16().float()))
    assert (theirs.float() >= bounds.amin(0)).all()
    assert (theirs.float() <= bounds.amax(0)).all()


def test_modelopt_decodes_an_export_to_our_codes_times_our_scales(stored, tmp_path):
    """It multiplies the scales first: bit for bit code * (block scale * global scale), with +0 for -0.

    Training multiplies code and block scale first, so values are one FP32 rounding apart.
    """
    tensors, count = export(stored, MODELOPT, tmp_path), 0
    for module, master, weight in modules(stored):
        theirs, packed = by_modelopt(module, tensors), packed_weight(weight, master)
        exact = replace(packed, block_scale=torch.ones_like(packed.block_scale), global_scale=torch.ones(()))
        scales = (packed.block_scale.float() * packed.global_scale).repeat_interleave(16, 1)
        assert torch.equal(theirs, (exact.dequantize() * scales).bfloat16())
        assert_one_rounding_apart(theirs, values(weight, master))
        count += 1
    assert count >= 3 * 7


def test_compressed_tensors_has_our_codes_and_scales_and_values_one_rounding_apart(stored, tmp_path):
    """It divides the block scale by the divisor first, and gives BF16."""
    tensors = export(stored, COMPRESSED_TENSORS, tmp_path)
    for module, master, weight in modules(stored):
        packed = packed_weight(weight, master)
        assert torch.equal(tensors[f"{module}.weight_packed"], packed.codes)
        stored_scale = tensors[f"{module}.weight_scale"].view(torch.uint8)
        assert torch.equal(stored_scale, packed.block_scale.view(torch.uint8))
        assert_one_rounding_apart(by_compressed_tensors(module, tensors), values(weight, master))


@pytest.mark.parametrize("scale", [0.02, 0.0313, 1.7])
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-46"])
def test_on_a_million_weights_bf16_values_differ_only_next_to_ties(recipe, scale):
    """Where an FP32 step decides a BF16 rounding: at most a few of the thousand products of a tensor.

    A product may occur often: the largest block scale of 4/6 is one number, that of a tenth of its blocks.
    """
    weight = ForwardWeight(get_recipe(recipe).table)
    master = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)) * scale
    own, packed = values(weight, master), packed_weight(weight, master)
    for checkpoint, decode in ((MODELOPT, by_modelopt), (COMPRESSED_TENSORS, by_compressed_tensors)):
        theirs = decode("m", checkpoint.tensors("m", packed, None))
        differing = theirs != own.bfloat16()
        print(f"{recipe} {scale} {checkpoint.name}: {int(differing.sum())} of {own.numel()} differ in BF16")
        if recipe == "nvfp4":
            assert not differing.any()
        assert len(own[differing].abs().unique()) <= 4
        assert_one_rounding_apart(theirs, own)


def test_the_config_is_what_each_package_writes_itself(stored, tmp_path):
    """modelopt converts its own description, and compressed-tensors accepts ours without loss."""
    export(stored, MODELOPT, tmp_path / "modelopt")
    read = json.loads
    separate = read((tmp_path / "modelopt" / "hf_quant_config.json").read_text())
    config = read((tmp_path / "modelopt" / "config.json").read_text())["quantization_config"]
    converted = peer("modelopt.torch.export.convert_hf_config").convert_hf_quant_config_format(separate)
    assert config == converted
    export(stored, COMPRESSED_TENSORS, tmp_path / "ct")
    config = read((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    parsed = peer("compressed_tensors.quantization").QuantizationConfig.model_validate(config)
    scheme = peer("compressed_tensors.quantization").preset_name_to_scheme("NVFP4", ["Linear"])
    found = parsed.config_groups["group_0"]
    assert found.weights.model_dump(exclude={"observer"}) == scheme.weights.model_dump(exclude={"observer"})
    of_input = found.input_activations.model_dump(exclude={"observer"})
    assert of_input == scheme.input_activations.model_dump(exclude={"observer"})
    assert parsed.quantization_status == "compressed"
    assert parsed.ignore == config["ignore"]


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(tokens)
    return getattr(found, "logits", found).float()


def test_transformers_gives_the_logits_of_the_masters_from_a_bf16_export(stored, tmp_path):
    """Our masters rounded to BF16, in a model without quantization: one BF16 computation against another."""
    assert main(["export", str(stored.folder), "--out", str(tmp_path)]) == 0
    tokens = torch.arange(40).reshape(2, 20) % stored.tokenizer.size
    theirs = logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), tokens)
    own = logits(load_hf(tmp_path, compute_dtype=torch.float32), tokens)
    assert (theirs - own).norm() <= 1e-5 * own.norm()


def test_transformers_gives_our_logits_from_a_compressed_tensors_export(stored, tmp_path):
    """W4A16: the logits of the decoded weights, in BF16 through four blocks. W4A4: inputs are quantized, too.

    An NVFP4 operand's error is a tenth of it, which the residual stream dampens.
    """
    tokens = torch.arange(40).reshape(2, 20) % stored.tokenizer.size
    difference = {}
    for calibration in ("0", "2"):
        folder = tmp_path / calibration
        export(stored, COMPRESSED_TENSORS, folder, "--calibration", calibration)
        own = logits(load_hf(folder, compute_dtype=torch.float32), tokens)
        found = logits(AutoModelForCausalLM.from_pretrained(folder), tokens)
        difference[calibration] = float((found - own).norm() / own.norm())
    assert difference["0"] <= 2**-6
    assert 2**-6 < difference["2"] <= 0.1
