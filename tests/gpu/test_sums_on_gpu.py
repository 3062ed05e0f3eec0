"""Sums of tensor cores on a GPU have the bytes that a CPU computes: instructions, GEMMs, layers, training.

What is compared in models: linear layers and everything that PyTorch rounds once per element. Reductions
(norms, softmax, the gradient of a bias) add in another order on each device; no model here has them on both.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fourbits as fb
from fourbits.gemm.kernels.launch_bf16 import OperandLayout, PointerGemm, Problem
from fourbits.gemm.kernels.tiles import gpu_model
from fourbits.gemm.native.probes import PROBES, operands, random_operand
from fourbits.gemm.reference.tensor_core import TENSOR_CORES
from fourbits.linear.module import QuantizedLinear
from fourbits.model.lm import LanguageModel
from fourbits.quant.tensor import unpacked
from fourbits.recipe.presets import get_recipe
from model.shapes import random_tokens, small_model
from support import chain_cases
from support import tensor_core_cases as cases
from support.assertions import assert_same_bytes
from support.eager import eager as eager

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
PAIRS = [(name, sums) for name, supported in cases.SUPPORTED.items() for sums in supported]
#: sums, and a recipe whose GEMMs all have an instruction for them
TRAINED = (
    ("sm_100", "nvfp4"),
    ("sm_103", "nvfp4"),
    ("sm_90", "mxfp4"),
    ("sm_90_fp8", "fp8"),
    ("exact", "nvfp4"),
)


def without_payload(x: Tensor) -> Tensor:
    """Where a GEMM gives NaN, its scaling by a processor decides which."""
    return torch.where(torch.isnan(x), torch.nan, x)


@pytest.mark.parametrize("make", [cases.random_bytes, cases.like_data, cases.cancelling])
@pytest.mark.parametrize("name", TENSOR_CORES)
def test_an_instruction_has_the_bits_of_a_cpu(name, make):
    core, count = TENSOR_CORES[name], 8_000
    for dtype in core.operands:
        for block in core.scale_blocks or (0,):
            a, b = (make((count, core.products), dtype) for _ in range(2))
            c = (
                torch.randn(count)
                if make is not cases.random_bytes
                else make((count, 1), torch.float32)[:, 0]
            )
            scales: list[Tensor | None] = [None, None]
            if block:
                scale = cases.E4M3 if block == 16 else cases.E8M0
                scales = [make((count, core.products // block), scale) for _ in range(2)]
            results = [
                fb.tensor_core_dot(
                    a.to(device), b.to(device), c.to(device), core,
                    *(None if scale is None else scale.to(device) for scale in scales),
                ).cpu()
                for device in (GPU, torch.device("cpu"))
            ]  # fmt: skip
            assert_same_bytes(results[0], results[1], f"{dtype}, {block}")


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_a_probe_has_its_value(probe):
    a, b = operands(probe, GPU)
    assert float(fb.matmul(a, b, torch.float32, sums="sm_100")[0, 0]) == probe.expected


@pytest.mark.parametrize("kind", cases.OPERANDS)
@pytest.mark.parametrize(("name", "sums"), PAIRS)
def test_a_gemm_has_the_bits_of_a_cpu(name, sums, kind):
    for M, N, K, axis, dtype in (
        (37, 26, 300, 1, torch.float32),
        (16, 33, 528, 0, torch.bfloat16),
        (1, 129, 16, 1, torch.float32),
    ):
        a, b = (
            cases.OPERANDS[kind]((rows, K) if axis else (K, rows), spec, axis)
            for rows, spec in zip((M, N), cases.SPECS[name], strict=True)
        )
        bias = torch.randn(N)
        expected = fb.matmul(a, b, dtype, bias, sums=sums)
        found = fb.matmul(cases.moved(a, GPU), cases.moved(b, GPU), dtype, bias.to(GPU), sums=sums)
        assert_same_bytes(without_payload(found.cpu()), without_payload(expected), f"{M}x{N}x{K}, {dtype}")


@pytest.mark.parametrize("name", [name for name, _ in chain_cases.checks(GPU, large=True)])
def test_the_kernels_have_the_bits_of_the_reference(name):
    check = dict(chain_cases.checks(GPU, large=True))[name]
    assert check() == []


@pytest.mark.parametrize("axis", [0, 1])
def test_what_a_gpu_quantizes_it_multiplies_to_the_bits_of_a_cpu(axis):
    """Large enough for tiles of any size, and from the tensors, not from operands that a CPU made."""
    x, w = torch.randn(384, 512), torch.randn(384, 512) * torch.randn(384, 512).exp()
    results = []
    for device in (torch.device("cpu"), GPU):
        pair = [fb.quantize(t.to(device), fb.OperandSpec(rht=16), axis) for t in (x, w)]
        results.append(fb.matmul(pair[0], pair[1], torch.float32, sums="sm_100", epilogue="product").cpu())
    assert_same_bytes(*results)


def test_hoppers_own_bf16_gemm_has_the_sums_of_its_model():
    """One chain along K, without split-K, on operands whose sums differ from exact ones and from FP32's."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    a, b = (random_operand(256, 1536, seed, GPU) for seed in (1, 2))
    left, right = (unpacked(q) for q in (a, b))
    layout = OperandLayout((256, 1536), 1536, 1, True)
    gemm = PointerGemm(Problem(layout, layout, torch.float32, None, GPU), gpu_model(GPU))
    one = torch.ones((), device=GPU)
    found = gemm(left.values, right.values, one, one, None)
    modelled, exact = (fb.matmul(a, b, torch.float32, sums=sums, alpha=one) for sums in ("sm_90", "exact"))
    assert not torch.equal(found, exact)
    assert_same_bytes(found.cpu(), modelled.cpu())


class Linears(nn.Module):
    """Quantized linear layers between functions that round once per element: relu^2 and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(96, 128, bias=False)
        self.second = nn.Linear(128, 128, bias=False)
        self.last = nn.Linear(128, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu().square()
        h = h + self.second(h)
        return self.last(h)


def trained(device: torch.device, sums: str, recipe: str, dtype: torch.dtype) -> list[Tensor]:
    """Outputs, weight gradients and weights of three steps: squared errors, momentum 1/2, powers of two.

    Steps and momentum are powers of two, so that an update rounds once however a device adds a product.
    """
    torch.manual_seed(0)
    model = Linears()
    batches = [(torch.randn(2, 128, 96), torch.randn(2, 128, 48)) for _ in range(3)]
    model = model.to(device)
    keep = fb.KeepBF16(names=())
    fb.convert(model, replace(get_recipe(recipe), sums=sums, keep_bf16=keep, layers=()))
    assert sum(isinstance(layer, QuantizedLinear) for layer in model.modules()) == 3
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-5, momentum=0.5, foreach=False)
    found = []
    for step, (x, target) in enumerate(batches):
        fb.set_step(model, step)
        optimizer.zero_grad()
        y = model(x.to(device, dtype))
        ((y.float() - target.to(device)).square() * 2.0**-12).sum().backward()
        found += [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        found += [p.detach().clone() for p in model.parameters()]
    return [t.cpu() for t in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sums", "recipe"), TRAINED)
def test_training_on_a_gpu_gives_the_weight_gradients_of_a_cpu(sums, recipe, dtype):
    on_gpu, on_cpu = (trained(device, sums, recipe, dtype) for device in (GPU, torch.device("cpu")))
    assert len(on_cpu) == 3 * 7
    for i, (found, expected) in enumerate(zip(on_gpu, on_cpu, strict=True)):
        assert bool(expected.any()), "gradients are not zero"
        assert_same_bytes(found, expected, f"result {i}")


def hybrid(device: torch.device) -> tuple[LanguageModel, dict[str, QuantizedLinear]]:
    """A model with attention and Mamba, and its quantized linears."""
    model = small_model("M-*-").to(device)
    fb.convert(model, replace(get_recipe("nvfp4"), sums="sm_100"))
    fb.set_step(model, 5, first_token=64)
    return model, {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def recorded_calls() -> dict[str, list[Tensor]]:
    """X, Y and dY of every quantized linear in one step of training on the CPU."""
    model, layers = hybrid(torch.device("cpu"))
    calls: dict[str, list[Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def seen(module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
            calls[name] = [inputs[0].detach(), y.detach()]
            y.register_hook(lambda dy: calls[name].append(dy))

        return seen

    for name, layer in layers.items():
        layer.register_forward_hook(hook(name))
    tokens = random_tokens(2, 33)
    model.loss(tokens[:, :-1], tokens[:, 1:])[0].backward()
    return calls


def replayed(device: torch.device, calls: dict[str, list[Tensor]]) -> list[tuple[Tensor, ...]]:
    """Y, dX and dW of every quantized linear from the X and dY of a recorded step."""
    _, layers = hybrid(device)
    assert set(calls) == set(layers)
    results = []
    for name, layer in layers.items():
        x, _, dy = (t.to(device) for t in calls[name])
        y = layer(x.requires_grad_())
        grads = torch.autograd.grad(y, (x, layer.weight), dy)
        results.append(tuple(t.cpu() for t in (y.detach(), *grads)))
    return results


def test_every_linear_of_a_model_has_the_bits_of_a_cpu_on_the_inputs_of_its_step():
    """A hybrid's step runs on the CPU; each of its linears on a GPU then gets the X and dY that it had there,
    and gives the same Y, dX and FP32 dW.
    """
    calls = recorded_calls()
    on_gpu, on_cpu = (replayed(device, calls) for device in (GPU, torch.device("cpu")))
    assert len(on_cpu) >= 6
    for name, found, expected in zip(calls, on_gpu, on_cpu, strict=True):
        assert_same_bytes(expected[0], calls[name][1], f"{name}: Y of the step")
        for what, one, other in zip(("Y", "dX", "dW"), found, expected, strict=True):
            assert bool(other.any())
            assert_same_bytes(one, other, f"{name}: {what}")
