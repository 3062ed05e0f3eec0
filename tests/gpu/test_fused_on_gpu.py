"""The fused kernels on a GPU: the reference's bytes, products within the bound, noise as its bits say."""

import pytest
import torch

from fourbits import fake_quantize, quantize
from fourbits.gemm.cpu import matmul as matmul_emulated
from fourbits.gemm.matmul import matmul, multiply
from fourbits.gemm.native.self_check import check_native
from fourbits.quant.cpu import compiled
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import exact_operand
from fourbits.quant.request import OperandInputs, OperandRequest
from fourbits.quant.tensor import ExactOperand, dequantized, transposed
from support.fused_cases import (
    AMAXES,
    DTYPES,
    PAIRS,
    POLICIES,
    SMALL,
    Case,
    amax_differences,
    by_kernels,
    differences,
    policy_differences,
)
from support.matmul_cases import LAYOUTS, GemmCase, excess
from support.matmul_cases import SMALL as SMALL_GEMMS

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
LARGE = [
    *(Case(pair, (304, 1072)) for pair in PAIRS),
    *(Case(pair, (1024, 2048)) for pair in ("nearest", "stochastic", "weight")),
    *(Case("stochastic", (304, 1072), dtype) for dtype in (torch.float32, torch.float16)),
    Case("weight", (304, 1072), torch.float32),
]
LARGE_PRODUCTS = [
    *(GemmCase(layout, (520, 264, 1040)) for layout in LAYOUTS),
    GemmCase("wgrad", (264, 520, 1040), torch.float32),
    GemmCase("fprop", (264, 520, 1040), torch.float16, bias=True),
]


@pytest.fixture(autouse=True)
def references_are_eager_and_unwritten_memory_is_nan(monkeypatch):
    monkeypatch.setattr(compiled, "COMPILE_FROM", 1 << 60)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=lambda case: case.name)
def test_bytes_are_the_references(case):
    assert differences(case, GPU) == []


@pytest.mark.parametrize(("pair", "values"), AMAXES)
def test_amaxes_found_before_quantization_are_the_references(pair, values):
    assert amax_differences(PAIRS[pair], values, GPU) == []


@pytest.mark.parametrize(("stored", "name"), POLICIES, ids=str)
def test_amax_policies_use_and_observe_what_the_reference_does(stored, name):
    assert policy_differences(stored, GPU, name) == []


@pytest.mark.parametrize("product", [*SMALL_GEMMS, *LARGE_PRODUCTS], ids=lambda product: product.name)
def test_products_stay_within_the_bound(product):
    assert excess(product, GPU) <= 1


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("fp8")])
@pytest.mark.parametrize("shape", [(256, 192, 4096), (250, 130, 4096)], ids=["cuBLAS", "own kernel"])
def test_fp8_sums_are_promoted_before_their_few_bits_add_up(layout, shape):
    """Section 12.5's second promise, which unpromoted sums of 4096 terms miss by a factor of about four."""
    (M, N, K), (spec_a, axis_a, spec_b, axis_b) = shape, LAYOUTS[layout]
    x, w = torch.randn(M, K, device=GPU), torch.randn(N, K, device=GPU)
    kept = [(t if axis == 1 else t.t().contiguous(), axis) for t, axis in ((x, axis_a), (w, axis_b))]
    a, b = (exact_operand(t, spec, axis) for (t, axis), spec in zip(kept, (spec_a, spec_b), strict=True))
    true = matmul_emulated.matmul(a, b, torch.float32, None).double()
    error = multiply(a, b, torch.float32).double() - true
    assert error.square().mean().sqrt() <= 2.0**-12 * true.square().mean().sqrt()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("spec", [OperandSpec(), OperandSpec(block=(16, 16)), OperandSpec(format="mxfp4")])
def test_public_functions_give_the_bytes_of_the_reference(spec, axis, dtype):
    x = torch.randn(300, 1048, device=GPU).to(dtype)
    q = quantize(x, spec, axis)
    assert torch.equal(q.dequantize(dtype), dequantized(q, dtype))
    assert torch.equal(fake_quantize(x, spec, axis), dequantized(q, dtype))
    if spec.block == (16, 16):
        assert torch.equal(q.t().codes, transposed(q).codes)
        assert torch.equal(q.t().dequantize(), dequantized(transposed(q), torch.float32))


@pytest.mark.parametrize("axis", [0, 1])
def test_fake_quantize_compiles_whole_with_the_same_bytes(axis):
    x = torch.randn(96, 160, device=GPU, requires_grad=True)
    made = torch.compile(lambda x: fake_quantize(x, OperandSpec(), axis), fullgraph=True)(x)
    assert torch.equal(made, fake_quantize(x, OperandSpec(), axis))
    made.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


def test_the_self_check_passes_with_the_emulated_product():
    findings = check_native(GPU, matmul)
    assert all(finding.passed for finding in findings), findings


def test_tiles_and_offsets_do_not_move_random_bits():
    """A tensor quantized in two halves, with its coordinates in the key, has the bytes of the whole."""
    x = torch.randn(256, 512, device=GPU)
    amax = x.abs().amax()
    # seed, step, zero, zero, first token of the second half, the same / 16
    clock = torch.tensor([7, 3, 0, 0, 128, 8], device=GPU)
    row, column = OperandSpec(rounding="sr"), OperandSpec(rounding="sr", rht=16)
    column_amax = torch.tensor(9.0, device=GPU)

    def made(part, token, token_block):
        requests = [
            OperandRequest(row, 1, amax="given", key_fields=(0, 2, 1, token, 2)),
            OperandRequest(column, 0, amax="given", key_fields=(0, 2, 1, 2, token_block)),
        ]
        inputs = [OperandInputs(clock, 36, amax), OperandInputs(clock, 38, column_amax)]
        operands = by_kernels(part, requests, inputs)
        return [operand.values for operand in operands if isinstance(operand, ExactOperand)]

    whole, halves = made(x, 2, 2), [made(x[:128], 2, 2), made(x[128:], 4, 5)]
    assert len(whole) == 2
    for i in range(2):
        assert torch.equal(whole[i], torch.cat([half[i] for half in halves]))


def test_stochastic_rounding_goes_up_as_often_as_its_bits_say():
    """Over many keys each element's mean is that of floor(256 f) / 256, within six standard errors."""
    x = torch.randn(64, 256, device=GPU).to(torch.bfloat16)
    amax, keys = torch.tensor(8.0, device=GPU), 2048
    total = torch.zeros_like(x, dtype=torch.float64)
    for step in range(keys):
        key = torch.tensor([1, 44, step, 0, 0], device=GPU)
        made = exact_operand(x, OperandSpec(rounding="sr"), 1, amax, key)
        total += (made.values.float() * made.scale).double()
    q = quantize(x, OperandSpec(), 1, amax)
    scale = (q.block_scale.float() * q.global_scale).double().repeat_interleave(16, 1)
    magnitude = (x.double().abs() / scale).clamp_max(6.0)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 8], dtype=torch.float64, device=GPU)
    below = torch.bucketize(magnitude, grid, right=True) - 1
    low, step_size = grid[below], grid[below + 1] - grid[below]
    share = torch.floor(256 * (magnitude - low) / step_size) / 256
    mean = (total / keys).abs() / scale
    sigma = step_size * (share.clamp_min(1 / 256) * (1 - share) / keys).sqrt()
    assert bool(((mean - (low + share * step_size)).abs() <= 6 * sigma + step_size / 256).all())


def test_a_captured_graph_replays_with_new_noise():
    x = torch.randn(64, 256, device=GPU)
    clock = torch.tensor([1, 44, 0, 0, 0], device=GPU)
    spec = OperandSpec(rounding="sr")
    exact_operand(x, spec, 1, sr_key=clock)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = exact_operand(x, spec, 1, sr_key=clock)
    for step in (0, 5):
        clock[2] = step
        graph.replay()
        eager = exact_operand(x, spec, 1, sr_key=clock.clone())
        assert torch.equal(captured.values, eager.values)
    clock[2] = 0
    graph.replay()
    assert not torch.equal(captured.values, eager.values)


def test_large_strides_and_views_give_equal_bytes():
    x = torch.randn(512, 512, device=GPU).to(torch.bfloat16)
    part, spec = x[32:160, 64:320], OperandSpec()
    whole = exact_operand(part.contiguous(), spec)
    assert torch.equal(exact_operand(part, spec).values, whole.values)
    assert torch.equal(exact_operand(part.t().contiguous().t(), spec).values, whole.values)
