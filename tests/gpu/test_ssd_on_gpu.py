"""The SSD scan's kernels on a GPU: against FP64 at real shapes, compiled, and replayed from a CUDA graph."""

import pytest
import torch
from torch import Tensor

from fourbits.model.mamba2 import Mamba2
from fourbits.model.ops import self_check
from fourbits.model.ops.ssd import op as ssd_op
from fourbits.model.ops.ssd.op import ssd, ssd_forward
from fourbits.model.regions import compile_regions
from support.ssd_cases import NAMES, rms

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
#: between the inputs and a result, each at most 2^-9 of a term; terms have random signs
ROUNDINGS = 4
# (B, T, H, P, G, N), whether documents start, the strongest decay. As many heads per group as in the 12B and
# the 1.2B, odd lengths, both head dims. A new head dim, state size or use of documents costs seconds of
# compilation.
CASES = [
    ((1, 1093, 40, 64, 2, 128), False, 1.0),
    ((2, 333, 40, 64, 2, 128), True, 16.0),
    ((2, 500, 32, 80, 2, 128), False, 16.0),
    ((1, 333, 16, 80, 1, 128), True, 1.0),
    ((3, 77, 8, 16, 2, 32), True, 1.0),
    ((1, 77, 8, 64, 1, 256), False, 1.0),
]
SHAPE = CASES[0][0]


def arguments(shape, strongest=1.0) -> tuple[list[Tensor], Tensor]:
    """x, dt, a, b, c, d and dy on the GPU, with the model's strides and time steps."""
    batch, length, heads, head_dim, groups, states = shape
    sizes = (heads * head_dim, groups * states, groups * states)
    x, b, c = torch.randn(batch, length, sum(sizes), device=GPU).bfloat16().split(sizes, -1)
    dt = torch.rand(batch, length, heads, device=GPU) * 0.1
    a, d = -torch.rand(heads, device=GPU) * strongest - 0.1, torch.randn(heads, device=GPU)
    x, b, c = x.unflatten(-1, (heads, -1)), b.unflatten(-1, (groups, -1)), c.unflatten(-1, (groups, -1))
    return [x, dt, a, b, c, d], torch.randn(x.shape, device=GPU).bfloat16()


def value_and_gradients(function, args, dy):
    args = [arg.detach().requires_grad_() for arg in args]
    y = function(*args)
    return [y.detach(), *torch.autograd.grad(y, args, dy)]


@pytest.mark.parametrize(("shape", "documents", "strongest"), CASES, ids=str)
def test_kernels_differ_from_fp64_by_the_roundings_of_their_factors(shape, documents, strongest):
    args, dy = arguments(shape, strongest)
    starts = torch.rand(shape[:2], device=GPU) < 0.01 if documents else None
    found = value_and_gradients(lambda *a: ssd_forward(*a, starts), args, dy)
    exact = [arg.double() for arg in args]
    true = value_and_gradients(
        lambda x, dt, a, b, c, d: ssd(x, dt, a, b, c, d, 64, starts), exact, dy.double()
    )
    for name, got, expected in zip(NAMES, found, true, strict=True):
        assert rms(got - expected) <= ROUNDINGS * 2.0**-9 * rms(expected), name


def test_equal_arguments_give_equal_bits():
    args, dy = arguments(SHAPE)
    first, second = (value_and_gradients(lambda *a: ssd_forward(*a, None), args, dy) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_every_head_dim_and_state_of_the_presets_passes_the_self_check():
    for head_dim, states in ((64, 128), (80, 128), (16, 32)):
        assert self_check.use_kernels(GPU, torch.bfloat16, head_dim, states)
        shares = self_check.check(GPU, torch.bfloat16, head_dim, states)
        assert max(shares.values()) <= 1


def mixer() -> tuple[Mamba2, Tensor]:
    layer = Mamba2(256, 16, 64, 128, 2, 4, 128, 1e-5).cuda()
    for name, parameter in layer.named_parameters():
        torch.nn.init.normal_(parameter, std=0.02 if parameter.dim() > 1 else 0.5)
        assert parameter.is_cuda, name
    return layer, torch.randn(2, 300, 256, device=GPU).bfloat16()


def results(layer: Mamba2, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    y = layer(x)
    y.float().square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def test_a_compiled_mixer_runs_the_kernels_in_one_graph(monkeypatch):
    layer, x = mixer()
    eager = results(layer, x)
    compile_regions(layer)  # one graph, or a warning, which is an error here
    results(layer, x)
    calls = []
    for name in ("forward", "backward"):
        kernel = getattr(ssd_op.kernels, name)
        monkeypatch.setattr(ssd_op.kernels, name, lambda *a, n=name, k=kernel: calls.append(n) or k(*a))
    compiled = results(layer, x)
    assert calls == ["forward", "backward"]
    for got, expected in zip(compiled, eager, strict=True):
        assert rms(got - expected) <= ROUNDINGS * 2.0**-9 * rms(expected)


def test_a_mixer_under_one_compile_uses_the_kernels_as_eagerly():
    layer, x = mixer()
    eager = results(layer, x)
    self_check._decisions.clear()
    found = torch.compile(layer, fullgraph=True)(x)
    assert self_check._decisions
    assert all(self_check._decisions.values())
    assert rms(found - eager[0]) <= ROUNDINGS * 2.0**-9 * rms(eager[0])


def test_a_cuda_graph_replays_the_bits_of_an_eager_call():
    args, dy = arguments(SHAPE)
    eager = value_and_gradients(lambda *a: ssd_forward(*a, None), args, dy)
    graph, kept = torch.cuda.CUDAGraph(), [arg.clone() for arg in args]
    with torch.cuda.graph(graph):
        replayed = value_and_gradients(lambda *a: ssd_forward(*a, None), kept, dy)
    for arg in kept:
        arg.zero_()
    graph.replay()
    assert not replayed[0].any()
    for arg, value in zip(kept, args, strict=True):
        arg.copy_(value)
    graph.replay()
    assert all(map(torch.equal, replayed, eager))
