"""The native product without its GPU: a model of the tensor cores reads the operands; the self-check."""

import pytest
import torch

from fourbits.gemm.native import matmul as matmul_native
from fourbits.gemm.native import self_check as matmul_check
from fourbits.gemm.native.self_check import share_of_bound
from fourbits.linear.native_gemms import GEMMS
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from support.native_model import model_of_scaled_mm

BLOCK_2D = OperandSpec(block=(16, 16), source="bf16")


@pytest.fixture(autouse=True)
def tensor_cores(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", model_of_scaled_mm)


@pytest.mark.parametrize("shape", [(48, 32, 64), (17, 33, 50), (130, 16, 80)])
@pytest.mark.parametrize(
    ("a_axis", "b_axis", "b_spec"), [(1, 1, BLOCK_2D), (1, 0, BLOCK_2D), (0, 0, OperandSpec())]
)
def test_tensor_cores_read_the_codes_and_scales_that_were_meant(shape, a_axis, b_axis, b_spec):
    M, N, K = shape
    x, w = (torch.randn((rows, K) if axis == 1 else (K, rows)) for rows, axis in ((M, a_axis), (N, b_axis)))
    a, b = quantize(x, OperandSpec(), a_axis), quantize(w, b_spec, b_axis)
    bias = torch.randn(N)
    for out_dtype, added in ((torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, bias)):
        out = matmul_native.matmul(a, b, out_dtype, added)
        assert out.shape == (M, N)
        assert share_of_bound(out, a, b, added) <= 1


def test_the_transpose_of_a_square_weight_is_read_as_such():
    w = torch.randn(48, 80)
    forward, transposed = quantize(w, BLOCK_2D, 1), quantize(w, BLOCK_2D, 0)
    x = quantize(torch.randn(16, 48), OperandSpec(), 1)
    assert torch.equal(
        matmul_native.matmul(x, forward.t(), torch.float32, None),
        matmul_native.matmul(x, transposed, torch.float32, None),
    )


def test_other_formats_are_refused_by_name():
    q = quantize(torch.randn(32, 64), OperandSpec(format="mxfp4"), 1)
    with pytest.raises(ValueError, match="needs nvfp4 in blocks of 16 along the contraction, got mxfp4"):
        matmul_native.native_operand(q)


def test_the_self_check_passes_where_the_arithmetic_is_right():
    findings = matmul_check.check_native(torch.device("cpu"))
    assert len(findings) == 8
    assert all(finding.passed for finding in findings), findings
    assert findings[-1].detail.endswith(
        "16384 of 16384 random sums with the bits of exact"
    )  # as the model sums


def failed(findings):
    return [finding.what for finding in findings if not finding.passed]


def test_the_self_check_sees_gradients_that_are_zero():
    zero = lambda a, b, dtype, bias: torch.zeros(a.rows, b.rows, dtype=dtype)  # noqa: E731
    assert failed(matmul_check.check_native(torch.device("cpu"), zero)) == [
        "fprop: GEMM",
        "dgrad: GEMM",
        "wgrad: GEMM",
    ]


def test_the_self_check_sees_rounding_that_is_not_stochastic(monkeypatch):
    def nearest(device, x, spec, axis, amax=None, sr_key=None):
        return quantize(x, OperandSpec(rht=spec.rht), axis, amax)

    monkeypatch.setattr(matmul_check, "quantized_on", nearest)
    assert "stochastic rounding" in failed(matmul_check.check_native(torch.device("cpu")))


def test_the_self_check_sees_a_sum_in_half_precision():
    def coarse(a, b, dtype, bias):
        product = (a.block_values().to(torch.bfloat16) @ b.block_values().to(torch.bfloat16).t()).half()
        return (product.float() * a.global_scale * b.global_scale * 1.02).to(dtype)

    assert "fprop: GEMM" in failed(matmul_check.check_native(torch.device("cpu"), coarse))


def test_an_error_of_a_gpu_or_a_library_is_a_finding(monkeypatch):
    """Libraries have refused products on new GPUs; a run that may emulate must not end with that."""

    def unsupported(a, b, dtype, bias):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`\nmore")

    def no_image(*args, **kwargs):
        raise ValueError

    monkeypatch.setattr(matmul_check, "_SHAPE", (16, 16, 16))
    fprop, *_, rounding, sums = matmul_check.check_native(torch.device("cpu"), unsupported)
    error = "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`"
    assert fprop == ("fprop", False, error)
    assert rounding.passed
    assert not sums.passed
    monkeypatch.setattr(matmul_check, "quantized_on", no_image)
    wrong = matmul_check.unsupported_arithmetic.__wrapped__(torch.device("cpu"))
    assert wrong == "; ".join(f"{what} (ValueError: no message)" for what in (*GEMMS, "stochastic rounding"))
