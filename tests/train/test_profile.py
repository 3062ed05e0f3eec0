"""A step's profile: the kinds of kernels, and the statement about them."""

import re
from pathlib import Path

import pytest
import torch

import fourbits
from fourbits.train.profile import KINDS, StepProfile, kind_of, step_profile
from fourbits.train.recording import Recording


@pytest.mark.parametrize(
    ("kernel", "region", "kind"),
    [
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT", None, "GEMM"),
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT", "mamba_core", "GEMM"),
        ("tma_kernel", None, "GEMM"),
        ("fp8_gemm_kernel", None, "GEMM"),
        ("fp8_kernel", None, "quantization"),
        ("operands_kernel", None, "quantization"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", None, "attention"),
        ("triton_poi_fused_cat_cos_sin_0", "attention_core", "attention"),
        ("triton_red_fused_exp_sum_1", "mamba_core", "SSD"),
        ("void at::native::multi_tensor_apply_kernel<>", "Optimizer.step", "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", None, "communication"),
        ("triton_poi_fused_mul_silu_0", None, "rest"),
    ],
)
def test_a_kernel_is_classified_by_its_name_or_else_by_the_region_that_launched_it(kernel, region, kind):
    assert kind_of(kernel, region) == kind


def test_the_statement_is_amdahls_law():
    profile = StepProfile({**dict.fromkeys(KINDS, 0.0), "GEMM": 0.06, "rest": 0.04})
    # 1 / (0.4 + 0.6 / 4) and 1 / 0.4
    assert "GEMMs take 60% of the step's device time" in profile.statement()
    assert "would be 1.82 times faster" in profile.statement()
    assert "no time, 2.50 times" in profile.statement()
    assert profile.to_dict()["total"] == pytest.approx(0.1)


@pytest.mark.gpu
def test_every_kind_of_kernel_of_a_step_is_found():
    from fourbits import convert, set_step
    from fourbits.model.lm import LanguageModel
    from fourbits.model.regions import compile_regions
    from model.shapes import small_config

    model = LanguageModel(small_config("M-*-"), seed=0).cuda()
    convert(model, "nvfp4")
    compile_regions(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    samples = torch.randint(64, (2, 33), device="cuda")

    def step():
        set_step(model, 0)
        model.loss(samples[:, :-1], samples[:, 1:])[0].backward()
        optimizer.step()

    step()
    recording = Recording(torch.device("cuda"))
    recording.start()
    step()
    recording.stop()
    found = step_profile(recording.events)
    assert all(found.seconds[kind] > 0 for kind in KINDS if kind != "communication"), found
    assert found.seconds["communication"] == 0


SOURCES = Path(fourbits.__file__).parent


@pytest.mark.parametrize(
    ("layer", "kind"), [("quant", "quantization"), ("linear", "quantization"), ("gemm", "GEMM")]
)
def test_every_kernel_of_this_package_is_classified_by_its_name(layer, kind):
    text = "".join(path.read_text() for path in (SOURCES / layer).rglob("*.py"))
    kernels = re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE)
    assert kernels
    assert {name: kind_of(name, None) for name in kernels} == dict.fromkeys(kernels, kind)
