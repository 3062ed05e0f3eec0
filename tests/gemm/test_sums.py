"""GEMMs with the sums of tensor cores: the chain of instructions, the shortcut, and the exact sums."""

import math

import pytest
import torch
from torch import Tensor

import fourbits as fb
from fourbits.gemm.reference import tensor_core_sums
from fourbits.gemm.reference.matmul import balanced
from fourbits.gemm.reference.tensor_core import TENSOR_CORES, TensorCore, tensor_core_dot
from fourbits.gemm.reference.tensor_core_sums import Rows, chained_sum, truncates_nothing
from support.assertions import assert_same_bytes
from support.tensor_core_cases import E4M3, E8M0, SPECS, SUPPORTED


def fp4_rows(rows: int, length: int, codes: range, dtype: torch.dtype = E4M3, block: int = 16) -> Rows:
    scales = torch.randint(codes.start, codes.stop, (rows, length // block), dtype=torch.uint8)
    return Rows(torch.randint(0, 16, (rows, length), dtype=torch.uint8), scales.view(dtype))


def heavy(rows: int, length: int, dtype: torch.dtype) -> Rows:
    return Rows((torch.randn(rows, length) * torch.randn(rows, length).exp() ** 3).to(dtype), None)


def with_zeros(rows: Rows) -> Rows:
    rows.elements[3] = 0
    rows.elements[:, 16:48] = 0
    return rows


CASES = {
    "like data": ("sm_100-fp4", lambda n: fp4_rows(n, 208, range(0x38, 0x48))),
    "all scale bytes": ("sm_100-fp4", lambda n: fp4_rows(n, 208, range(256))),
    "zeros": ("sm_100-fp4", lambda n: with_zeros(fp4_rows(n, 208, range(0x20, 0x60)))),
    "96 wide": ("sm_103-fp4", lambda n: fp4_rows(n, 208, range(256))),
    "mxfp4": ("sm_100-fp4", lambda n: fp4_rows(n, 160, range(110, 140), E8M0, 32)),
    "mxfp4 to the ends": ("sm_100-fp4", lambda n: fp4_rows(n, 160, range(255), E8M0, 32)),
    "bf16": ("sm_90-bf16", lambda n: Rows(torch.randn(n, 72).to(torch.bfloat16), None)),
    "heavy bf16": ("sm_90-bf16", lambda n: heavy(n, 72, torch.bfloat16)),
    "hopper fp8": ("sm_90-fp8", lambda n: heavy(n, 80, E4M3)),
    "blackwell fp8": ("sm_100-fp8", lambda n: heavy(n, 80, torch.float8_e5m2)),
}


def one_by_one(a: Rows, b: Rows, core: TensorCore) -> Tensor:
    """Every output by itself, one instruction after the other."""
    total = torch.zeros(a.elements.shape[0], b.elements.shape[0])
    for first in range(0, a.elements.shape[1], core.products):
        left, right = a.part(first, core.products), b.part(first, core.products)
        scales = [
            None if x.scales is None else x.scales.unsqueeze(axis) for x, axis in ((left, 1), (right, 0))
        ]
        total = tensor_core_dot(left.elements[:, None], right.elements[None], total, core, *scales)
    return total


@pytest.mark.parametrize("name", CASES)
def test_a_gemm_is_a_chain_of_instructions(name):
    core, rows = TENSOR_CORES[CASES[name][0]], CASES[name][1]
    a, b = rows(21), rows(17)
    assert_same_bytes(chained_sum(a, b, core), one_by_one(a, b, core))


def test_ordinary_scales_prove_that_nothing_is_truncated_and_wide_ones_do_not():
    core = TENSOR_CORES["sm_100-fp4"]
    a, b = (fp4_rows(9, 4096, range(0x38, 0x48)) for _ in range(2))
    assert bool(truncates_nothing(a, b, core).all())
    a, b = (fp4_rows(9, 4096, range(256)) for _ in range(2))
    assert not bool(truncates_nothing(a, b, core).any())


def test_outputs_of_one_wide_row_alone_take_every_term(monkeypatch):
    """A row with a block far below the others; its sums are those of the instructions."""
    core = TENSOR_CORES["sm_100-fp4"]
    a, b = fp4_rows(40, 256, range(0x38, 0x48)), fp4_rows(24, 256, range(0x38, 0x48))
    for rows, row in ((a, 7), (b, 5)):
        assert rows.scales is not None
        rows.scales[row, 3], rows.scales[row, 4] = 2.0**-9, 448.0
    taken = []
    terms = tensor_core_sums._all_terms
    monkeypatch.setattr(
        tensor_core_sums, "_all_terms", lambda a, b, core: taken.append(a.elements.shape) or terms(a, b, core)
    )
    assert_same_bytes(chained_sum(a, b, core), one_by_one(a, b, core))
    assert taken == [(1, 256)]


PAIRS = [(name, sums) for name in SPECS for sums in ("exact", "sm_100", "sm_103", "sm_90", "sm_90_fp8")]


@pytest.mark.parametrize(("name", "sums"), PAIRS)
@pytest.mark.parametrize("axis", [0, 1])
def test_every_sum_is_within_its_bound_of_the_exact_one_or_refused(name, sums, axis):
    """Each of 33 terms loses at most a unit of the last bit that a step keeps, relative to the magnitudes."""
    shape = (19, 300) if axis else (300, 19)
    a, b = (fb.quantize(torch.randn(shape), spec, axis) for spec in SPECS[name])
    if sums not in SUPPORTED[name]:
        with pytest.raises(ValueError, match=f"sums: {sums} has no instruction for .* Use sums='fp32'"):
            fb.matmul(a, b, torch.float32, sums=sums)
        return
    exact = fb.matmul(a, b, torch.float32, sums="exact").double()
    left, right = ((q.block_values() * q.global_scale).abs().double() for q in (a, b))
    magnitudes = left @ right.t()
    bits = 13 if sums == "sm_90_fp8" else 23
    found = fb.matmul(a, b, torch.float32, sums=sums)
    assert bool(((found.double() - exact).abs() <= 33 * math.ceil(304 / 16) * 2.0**-bits * magnitudes).all())
    assert_same_bytes(fb.matmul(a, b, torch.bfloat16, sums=sums), found.to(torch.bfloat16))


def test_hopper_fp8_errs_as_measured():
    """2^-12.9 of the result, root mean square, promoted every 128 (docs/nvfp4.md, section 12.5)."""
    a = fb.quantize(torch.randn(96, 640), fb.OperandSpec(format="fp8", block=(1, 128)))
    b = fb.quantize(torch.randn(96, 640), fb.OperandSpec(format="fp8", block=(128, 128)))
    exact, found = (fb.matmul(a, b, torch.float32, sums=sums) for sums in ("exact", "sm_90_fp8"))
    assert -13.1 < math.log2(float((found - exact).norm() / exact.norm())) < -12.7


def test_epilogues():
    """One scale after the other, their product, and TransformerEngine's alpha from both amaxes."""
    x, w = torch.randn(16, 256) * 3, torch.randn(16, 256) / 7
    a, b = fb.quantize(x, fb.OperandSpec()), fb.quantize(w, fb.OperandSpec())
    one = torch.ones((), dtype=torch.float32)
    total = fb.matmul(a, b, torch.float32, sums="sm_100", alpha=one)
    first, second = balanced(a.global_scale, b.global_scale)
    assert_same_bytes(fb.matmul(a, b, torch.float32, sums="sm_100"), (total * first) * second)
    product = fb.matmul(a, b, torch.float32, sums="sm_100", epilogue="product")
    assert_same_bytes(product, total * (a.global_scale * b.global_scale))
    alpha = (x.abs().max() * w.abs().max()) * torch.tensor(1 / (36 * 448 * 448), dtype=torch.float32)
    assert_same_bytes(fb.matmul(a, b, torch.float32, sums="sm_100", alpha=alpha), total * alpha)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sums": "sm_80"}, "sums: must be one of fp32, exact, sm_100.* got 'sm_80'"),
        ({"epilogue": "product"}, "epilogue needs sums other than fp32"),
        ({"alpha": torch.ones(())}, "alpha needs sums other than fp32"),
        ({"sums": "exact", "epilogue": "both"}, "epilogue must be separate or product, got 'both'"),
        (
            {"sums": "exact", "alpha": torch.ones(2)},
            r"alpha must be one float32 number, got torch.float32 \[2\]",
        ),
        ({"sums": "exact", "alpha": 2.0}, r"alpha must be a tensor, got 2.0. Use torch.tensor\(2.0\)"),
        ({"bias": 1}, "bias must be a tensor, got 1"),
        (
            {"sums": "exact", "alpha": torch.ones(()), "epilogue": "product"},
            "alpha replaces both global scales, and takes no epilogue",
        ),
    ],
)
def test_wrong_settings_are_refused(given, message):
    a = fb.quantize(torch.randn(16, 64), fb.OperandSpec())
    with pytest.raises(ValueError, match=message):
        fb.matmul(a, a, torch.float32, **given)


@pytest.mark.parametrize("sums", ["sm_100", "sm_103"])
def test_fp4_with_scales_of_two_formats_has_no_instruction(sums):
    """An instruction takes E4M3 scales for both operands or E8M0 scales for both."""
    a, b = (fb.quantize(torch.randn(16, 64), fb.OperandSpec(format=name)) for name in ("nvfp4", "mxfp4"))
    with pytest.raises(ValueError, match=f"{sums} has no instruction for nvfp4 1x16 by mxfp4 1x32"):
        fb.matmul(a, b, torch.float32, sums=sums)


@pytest.mark.parametrize(("name", "sums"), [(name, sums) for name in SPECS for sums in SUPPORTED[name]])
def test_an_empty_contraction_gives_the_bias(name, sums):
    bias = torch.randn(5)
    for rows in (3, 0):
        a, b = (fb.quantize(torch.empty(n, 0), spec) for n, spec in zip((rows, 5), SPECS[name], strict=True))
        assert_same_bytes(fb.matmul(a, b, torch.float32, bias, sums=sums), bias.expand(rows, 5))


@pytest.mark.parametrize(("name", "sums"), [(name, sums) for name in SPECS for sums in SUPPORTED[name]])
def test_operands_without_data_multiply_to_a_shape(name, sums):
    """As layers do on the meta device, where a model is planned before it has memory."""
    a, b = (
        fb.quantize(torch.empty(n, 48, device="meta"), spec)
        for n, spec in zip((32, 16), SPECS[name], strict=True)
    )
    found = fb.matmul(a, b, torch.float32, sums=sums)
    assert (found.shape, found.dtype, found.device.type) == ((32, 16), torch.float32, "meta")


def test_a_bias_is_added_in_fp32():
    a, bias = fb.quantize(torch.randn(16, 64), fb.OperandSpec()), torch.randn(16)
    with_bias = fb.matmul(a, a, torch.float32, bias, sums="sm_100")
    assert_same_bytes(with_bias, fb.matmul(a, a, torch.float32, sums="sm_100") + bias)


def test_caller_settings_do_not_leak_in():
    a = fb.quantize(torch.randn(16, 64), fb.OperandSpec())
    expected = fb.matmul(a, a, torch.float32, sums="sm_100")
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bytes(fb.matmul(a, a, torch.float32, sums="sm_100"), expected)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same_bytes(fb.matmul(a, a, torch.float32, sums="sm_100"), expected)
    finally:
        torch.set_default_dtype(torch.float32)
