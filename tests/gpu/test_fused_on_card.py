"""The fused kernels on a card: the reference's bytes, products within the bound, noise as its bits say."""

import pytest
import torch

from fourbits.formats.packing import swizzle_scales
from fourbits.gemm.cpu import matmul as matmul_emulated
from fourbits.gemm.kernels import launch as matmul_cuda
from fourbits.gemm.matmul import matmul
from fourbits.gemm.native.self_check import check_native
from fourbits.quant.cpu import compiled
from fourbits.quant.kernels.kernel_config import NoiseKey
from fourbits.quant.kernels.launch_exact import fused_operands
from fourbits.quant.kernels.launch_packed import fused_quantize, fused_swizzled
from fourbits.quant.kernels.support import Wanted
from fourbits.quant.operand import OperandSpec
from support.fused_cases import PAIRS, POLICIES, SMALL, Case, differences, policy_differences
from support.matmul_cases import LAYOUTS, Product, excess
from support.matmul_cases import SMALL as SMALL_PRODUCTS

pytestmark = pytest.mark.gpu

CARD = torch.device("cuda")
LARGE = [
    *(Case(pair, (304, 1072)) for pair in PAIRS),
    *(Case(pair, (1024, 2048)) for pair in ("nearest", "stochastic", "weight")),
    *(Case("stochastic", (304, 1072), dtype) for dtype in (torch.float32, torch.float16)),
    Case("weight", (304, 1072), torch.float32),
]
LARGE_PRODUCTS = [
    *(Product(layout, (520, 264, 1040)) for layout in LAYOUTS),
    *(Product("wgrad", (264, 520, 1040), torch.float32, accumulate=added) for added in (False, True)),
    Product("fprop", (264, 520, 1040), torch.float16, bias=True),
]


@pytest.fixture(autouse=True)
def references_are_eager_and_unwritten_memory_is_nan(monkeypatch):
    monkeypatch.setattr(compiled, "COMPILE_FROM", 1 << 60)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=lambda case: case.name)
def test_bytes_are_the_references(case):
    assert differences(case, CARD) == []


@pytest.mark.parametrize("stored", POLICIES, ids=str)
def test_amax_policies_use_and_observe_what_the_reference_does(stored):
    assert policy_differences(stored, CARD) == []


@pytest.mark.parametrize("product", [*SMALL_PRODUCTS, *LARGE_PRODUCTS], ids=lambda product: product.name)
def test_products_stay_within_the_bound(product):
    assert excess(product, CARD) <= 1


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("fp8")])
@pytest.mark.parametrize("shape", [(256, 192, 4096), (250, 130, 4096)], ids=["cuBLAS", "own kernel"])
def test_fp8_sums_are_promoted_before_their_few_bits_add_up(layout, shape):
    """Section 12.5's second promise, which unpromoted sums of 4096 terms miss by a factor of about four."""
    (M, N, K), (spec_a, axis_a, spec_b, axis_b) = shape, LAYOUTS[layout]
    x, w = torch.randn(M, K, device=CARD), torch.randn(N, K, device=CARD)
    kept = [(t if axis == 1 else t.t().contiguous(), axis) for t, axis in ((x, axis_a), (w, axis_b))]
    (a,), (b,) = (
        fused_operands(t, (Wanted(spec, axis),))
        for (t, axis), spec in zip(kept, (spec_a, spec_b), strict=True)
    )
    true = matmul_emulated.matmul(a, b, torch.float32, None).double()
    error = matmul_cuda.matmul(a, b, torch.float32).double() - true
    assert error.square().mean().sqrt() <= 2.0**-12 * true.square().mean().sqrt()


def test_swizzled_scales_are_the_plain_ones_in_the_tensor_cores_layout():
    x = torch.randn(300, 1040, device=CARD)
    for want in (Wanted(OperandSpec(), 1), Wanted(OperandSpec(rht=16), 0)):
        codes, scales, _ = fused_swizzled(x, want)
        (plain,) = fused_quantize(x, (want,))
        assert torch.equal(codes, plain.codes)
        assert torch.equal(scales, swizzle_scales(plain.block_scale).view(torch.uint8))


def test_the_self_check_passes_with_the_emulated_product():
    findings = check_native(CARD, matmul)
    assert all(finding.passed for finding in findings), findings


def test_tiles_and_offsets_do_not_move_random_bits():
    """A tensor quantized in two halves, with its coordinates in the key, has the bytes of the whole."""
    x = torch.randn(256, 512, device=CARD)
    amax = x.abs().amax()
    # seed, step, zero, zero, first token of the second half, the same / 16
    clock = torch.tensor([7, 3, 0, 0, 128, 8], device=CARD)
    row, column = OperandSpec(rounding="sr"), OperandSpec(rounding="sr", rht=16)
    column_amax = torch.tensor(9.0, device=CARD)

    def made(part, token, token_block):
        keys = NoiseKey(clock, (0, 2, 1, token, 2), 36), NoiseKey(clock, (0, 2, 1, 2, token_block), 38)
        wanted = Wanted(row, 1, keys[0], amax), Wanted(column, 0, keys[1], column_amax)
        return [operand.values for operand in fused_operands(part, wanted)]

    whole, halves = made(x, 2, 2), [made(x[:128], 2, 2), made(x[128:], 4, 5)]
    for i in range(2):
        assert torch.equal(whole[i], torch.cat([half[i] for half in halves]))


def test_stochastic_rounding_goes_up_as_often_as_its_bits_say():
    """Over many keys each element's mean is that of floor(256 f) / 256, within six standard errors."""
    x = torch.randn(64, 256, device=CARD).to(torch.bfloat16)
    amax, keys = torch.tensor(8.0, device=CARD), 2048
    total = torch.zeros_like(x, dtype=torch.float64)
    for step in range(keys):
        key = torch.tensor([1, 44, step, 0, 0], device=CARD)
        (made,) = fused_operands(x, (Wanted(OperandSpec(rounding="sr"), 1, key, amax),))
        total += (made.values.float() * made.scale).double()
    (q,) = fused_quantize(x, (Wanted(OperandSpec(), 1, None, amax),))
    scale = (q.block_scale.float() * q.global_scale).double().repeat_interleave(16, 1)
    magnitude = (x.double().abs() / scale).clamp_max(6.0)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 8], dtype=torch.float64, device=CARD)
    below = torch.bucketize(magnitude, grid, right=True) - 1
    low, step_size = grid[below], grid[below + 1] - grid[below]
    share = torch.floor(256 * (magnitude - low) / step_size) / 256
    mean = (total / keys).abs() / scale
    sigma = step_size * (share.clamp_min(1 / 256) * (1 - share) / keys).sqrt()
    assert bool(((mean - (low + share * step_size)).abs() <= 6 * sigma + step_size / 256).all())


def test_a_captured_graph_replays_with_new_noise():
    x = torch.randn(64, 256, device=CARD)
    clock = torch.tensor([1, 44, 0, 0, 0], device=CARD)
    want = Wanted(OperandSpec(rounding="sr"), 1, clock)
    fused_operands(x, (want,))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (captured,) = fused_operands(x, (with_key(want, clock),))
    for step in (0, 5):
        clock[2] = step
        graph.replay()
        (eager,) = fused_operands(x, (with_key(want, clock.clone()),))
        assert torch.equal(captured.values, eager.values)
    clock[2] = 0
    graph.replay()
    assert not torch.equal(captured.values, eager.values)


def with_key(want, entries):
    return want._replace(key=NoiseKey(entries))


def test_large_strides_and_views_give_equal_bytes():
    x = torch.randn(512, 512, device=CARD).to(torch.bfloat16)
    want = Wanted(OperandSpec(), 1)
    (whole,) = fused_operands(x[32:160, 64:320].contiguous(), (want,))
    (view,) = fused_operands(x[32:160, 64:320], (want,))
    (turned,) = fused_operands(x[32:160, 64:320].t().contiguous().t(), (want,))
    assert torch.equal(whole.values, view.values)
    assert torch.equal(whole.values, turned.values)
