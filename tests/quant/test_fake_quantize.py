"""fake_quantize: the bytes of quantize and dequantize, a straight-through gradient, what it refuses."""

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import fourbits as fb
from fourbits import OperandSpec
from fourbits.func_transforms import UnsupportedTransformError

SPECS = {
    "nvfp4": OperandSpec(),
    "stochastic": OperandSpec(rounding="sr"),
    "weight": OperandSpec(block=(16, 16), source="bf16"),
    "mxfp4": OperandSpec(format="mxfp4"),
    "fp8": OperandSpec(format="fp8"),
    "double": OperandSpec(format="nvfp4-double"),
    "bf16": OperandSpec(format="bf16"),
}
KEY = torch.tensor([7, 3])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_values_are_those_of_quantizing_and_dequantizing(spec, dtype, axis):
    x = torch.randn(40, 50).to(dtype)
    amax = torch.tensor(2.5) if spec.tensor_scaled else None
    made = fb.fake_quantize(x, spec, axis, amax, KEY)
    assert made.dtype == dtype
    assert torch.equal(made, fb.quantize(x, spec, axis, amax, KEY).dequantize(dtype))


def test_the_gradient_passes_to_x_unchanged_and_none_to_amax():
    x, amax = torch.randn(20, 33, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    gradient = torch.randn(20, 33)
    fb.fake_quantize(x, OperandSpec(), amax=amax).backward(gradient)
    assert x.grad is not None
    assert torch.equal(x.grad, gradient)
    assert amax.grad is None


@pytest.mark.parametrize("name", ["nvfp4", "stochastic", "fp8"])
def test_the_compiler_takes_it_whole_with_the_same_bytes(name):
    def fake(x):
        return fb.fake_quantize(x, SPECS[name], 0, sr_key=KEY)

    x = torch.randn(40, 50, requires_grad=True)
    made = torch.compile(fake, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(made, fake(x))
    made.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


def test_a_transform_is_refused_because_the_result_would_be_rotated():
    with pytest.raises(ValueError, match=r"spec.rht must be 0, got 16.*rotated.*rht=0"):
        fb.fake_quantize(torch.randn(16, 16), OperandSpec(rht=16))


def test_a_tensor_that_is_not_2d_is_refused_as_quantize_does():
    with pytest.raises(ValueError, match="must be 2-D"):
        fb.fake_quantize(torch.randn(16), OperandSpec())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_torch_func_differentiates_it_straight_through(spec):
    def fake(x: Tensor) -> Tensor:
        return fb.fake_quantize(x, spec, sr_key=KEY)

    x, tangent = torch.randn(20, 33), torch.randn(20, 33)
    assert torch.equal(grad(lambda x: fake(x).square().sum())(x), 2 * fake(x))
    found = jvp(fake, (x,), (tangent,))
    assert torch.equal(found[0], fake(x))
    assert torch.equal(found[1], tangent)


def test_vmap_is_refused_by_name():
    with pytest.raises(UnsupportedTransformError, match=r"fake_quantize: torch.func.vmap is not supported"):
        vmap(lambda x: fb.fake_quantize(x, OperandSpec()))(torch.randn(2, 16, 16))
