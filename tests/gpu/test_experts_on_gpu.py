"""Experts on a GPU: the bytes of the reference, one launch per tensor and GEMM, and nobody waits for it."""

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

from fourbits import convert, set_step
from fourbits.linear.operand_cache import KeptWeight
from fourbits.linear.stacked import fused, loop
from fourbits.quant.kernels.launcher import Launcher
from support.assertions import assert_same_bytes
from support.grouped_cases import (
    COUNTS,
    PRODUCTS,
    QUANTIZED,
    gemm_excess,
    inputs_of,
    quantized_differences,
)

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
EXPERTS, WIDTH, INNER, TOKENS, TOP_K = 16, 256, 384, 512, 2
#: uneven numbers of rows, empty groups, more than a tile of every height
MANY = (300, 0, 1, 129, 64, 0, 17, 255, 128, 40, 0, 63)


class Experts(nn.Module):
    """transformers' experts interface, without transformers."""

    def __init__(self, has_bias: bool = False, is_transposed: bool = False) -> None:
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias = EXPERTS, True, has_bias
        self.is_transposed, self.act_fn = is_transposed, nn.functional.silu
        up, down = (2 * INNER, WIDTH), (WIDTH, INNER)
        order = -1 if is_transposed else 1
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, *up[::order]) * 0.05)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, *down[::order]) * 0.05)
        if has_bias:
            self.gate_up_proj_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER) * 0.1)
            self.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.1)

    def _apply_gate(self, up: Tensor) -> Tensor:
        gate, up = up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        raise AssertionError("converted experts compute themselves")


def experts(**options: bool) -> Any:
    torch.manual_seed(0)
    model = Experts(**options).to(GPU)
    convert(model, "nvfp4", keep_first=0, keep_last=0)
    return model


def routing(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Uneven: few tokens choose late experts, and none the last."""
    generator = torch.Generator().manual_seed(seed)
    odds = torch.linspace(1.0, 0.0, EXPERTS).expand(TOKENS, -1)
    chosen = torch.multinomial(odds, TOP_K, generator=generator)
    return chosen.to(GPU), torch.rand(TOKENS, TOP_K, generator=generator).to(GPU)


def tokens(seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, WIDTH, generator=generator).to(torch.bfloat16).to(GPU)


def gradients(model: Any, x: Tensor, route: Sequence[Tensor]) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x, *route)
    found = torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()])
    return [y.detach(), *found]


@pytest.mark.parametrize("case", QUANTIZED, ids=str)
def test_operands_of_groups_are_the_references(case):
    assert quantized_differences(case, GPU) == []


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        *((counts, (40, 72)) for counts in COUNTS.values() if sum(counts)),
        (MANY, (512, 640)),
        (MANY, (130, 300)),
    ],
    ids=str,
)
def test_grouped_gemms_stay_within_the_bound_of_fp32_sums(counts, sizes):
    excess = gemm_excess(counts, sizes, GPU)
    assert max(excess.values()) <= 1, excess


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_products_are_those_of_a_loop_of_linear_layers_on_a_cpu(case):
    """Operands have equal bytes, so what remains is the order of FP32 sums, and one rounding of Y and dX."""
    needs = (True, True, case.bias)
    call, dy = inputs_of(case)
    expected = [loop.forward(call), *loop.backward(call, dy, needs)]
    call, dy = inputs_of(case, GPU)
    assert fused.unsupported(call.table, dy.dtype, call.weight) is None
    y, saved = fused.forward(call, needs[:2])
    found = [y, *fused.backward(call._replace(x=None), dy, saved, needs)]
    for result, true in zip(found, expected, strict=True):
        if true is not None and result is not None:
            eps = torch.finfo(true.dtype).eps
            scale = true.abs().max().item() if true.numel() else 0.0
            torch.testing.assert_close(result.cpu(), true, rtol=2 * eps, atol=2.0**-18 * scale)


@pytest.mark.parametrize("transposed", [False, True])
def test_bits_of_exact_products_are_those_of_a_loop_of_linear_layers_on_a_cpu(transposed):
    """Multiples of 1/2 up to 6 with a 6 in every block: every product and sum is exact, in any order."""
    case = next(case for case in PRODUCTS if case.recipe == "nvfp4" and case.sizes == (48, 32))
    call, dy = inputs_of(case)
    assert call.x is not None
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -2.0, -6.0])

    def exact(like: Tensor) -> Tensor:
        values = grid[torch.randint(len(grid), like.shape)]
        values[..., ::16] = 6.0
        return values.to(like.dtype)

    weight = exact(call.weight).mT.contiguous() if transposed else exact(call.weight)
    call, dy = call._replace(x=exact(call.x), weight=weight, transposed=transposed), exact(dy)
    expected: list[Any] = [loop.forward(call), *loop.backward(call, dy, (True, False, False))]
    on = call._replace(
        **{name: getattr(call, name).to(GPU) for name in ("x", "weight", "offsets", "counters")}
    )
    y, saved = fused.forward(on, (True, False))
    found: list[Any] = fused.backward(on._replace(x=None), dy.to(GPU), saved, (True, False, False))
    assert_same_bytes(y.cpu(), expected[0])
    assert_same_bytes(found[0].cpu(), expected[1])


@pytest.fixture
def waiting_is_an_error():
    """From where the test says so on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        try:
            yield lambda: torch.cuda.set_sync_debug_mode("error")
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, {"has_bias": True, "is_transposed": True}], ids=str)
def test_a_step_launches_once_per_tensor_and_gemm_and_waits_for_nothing(
    options, monkeypatch, waiting_is_an_error
):
    model, x, route = experts(**options), tokens(), routing()
    set_step(model, 0)
    gradients(model, x, route)  # plans, compiles, looks at the first gradient
    launched: list[str] = []
    launch = Launcher.__call__

    def recorded(launcher: Any, *arguments: Any) -> None:
        launched.append(launcher._kernel.fn.__name__)
        launch(launcher, *arguments)

    monkeypatch.setattr(Launcher, "__call__", recorded)
    set_step(model, 1)
    torch.cuda.synchronize()
    waiting_is_an_error()
    gradients(model, x, route)
    per_product = {"grouped_amax_kernel": 3, "grouped_operands_kernel": 3, "grouped_sums_kernel": 1}
    per_product |= {"grouped_rows_kernel": 2}
    for kernel, times in per_product.items():
        assert launched.count(kernel) == 2 * times, kernel
    assert set(launched) <= {*per_product, "tile_map_kernel", "grouped_columns_kernel"}


def test_weights_that_set_step_promises_unwritten_are_quantized_once(monkeypatch):
    model, x, route = experts(), tokens(), routing()
    set_step(model, 0, same_weights=True)
    first = gradients(model, x, route)
    made: list[object] = []
    monkeypatch.setattr(fused, "_quantized_weight", lambda *given: made.append(given))
    set_step(model, 0, same_weights=True)
    for found, true in zip(gradients(model, x, route), first, strict=True):
        assert_same_bytes(found, true)
    assert made == []
    monkeypatch.undo()
    monkeypatch.setattr(KeptWeight, "operand", lambda self, weight, plan, counter, make: make())
    set_step(model, 0)
    for found, true in zip(gradients(model, x, route), first, strict=True):
        assert_same_bytes(found, true)


def test_a_cuda_graph_replays_for_any_routing():
    model, x, route = experts(), tokens(), routing()
    set_step(model, 0)
    other = tokens(5), routing(6)
    expected = gradients(model, other[0], other[1])
    given = x.clone(), tuple(part.clone() for part in route)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(model, *given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    set_step(model, 0)
    with torch.cuda.graph(graph):
        found = gradients(model, *given)
    given[0].copy_(other[0])
    for mine, theirs in zip(given[1], other[1], strict=True):
        mine.copy_(theirs)
    graph.replay()
    for one, true in zip(found, expected, strict=True):
        assert_same_bytes(one, true)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("options", [{}, {"has_bias": True, "is_transposed": True}], ids=str)
def test_compiled_experts_have_the_bits_of_eager_ones(options):
    torch._dynamo.reset()
    model, x, route = experts(**options), tokens(), routing()
    set_step(model, 4)
    expected = gradients(model, x, route)
    compiled = copy.deepcopy(model)
    # else Inductor multiplies gate and up without rounding their activation to BF16 between
    with torch._inductor.config.patch(emulate_precision_casts=True):
        compiled.compile(fullgraph=True)
        set_step(compiled, 4)
        found = compiled(x.clone().requires_grad_(), *route)
    assert_same_bytes(found.detach(), expected[0])
