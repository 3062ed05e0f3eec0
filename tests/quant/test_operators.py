"""Quantization in graphs: operators keep their contract with the compiler, and give the eager bytes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch.library import opcheck

import fourbits as fb
from fourbits import OperandSpec
from fourbits.gemm import matmul as _registers_operators  # noqa: F401  # pyright: ignore[reportUnusedImport]
from fourbits.gemm.traced import flat
from fourbits.operators import OVERLOAD
from fourbits.quant.cpu import compiled as compiler
from fourbits.quant.traced import spec_from_text, spec_to_text
from support.assertions import assert_same_operand

SPECS = {
    "nvfp4": OperandSpec(),
    "sr-rht": OperandSpec(rounding="sr", rht=16),
    "weight": OperandSpec(block=(16, 16), source="bf16"),
    "ue5m3": OperandSpec(format="nvfp4-ue5m3"),
    "mxfp4": OperandSpec(format="mxfp4", scale_rule="ceil"),
    "mxfp8": OperandSpec(format="mxfp8"),
    "fp8": OperandSpec(format="fp8"),
    "fp8-whole": OperandSpec(format="fp8", block=(0, 0)),
    "int8": OperandSpec(format="int8"),
    "double": OperandSpec(format="nvfp4-double"),
    "bf16": OperandSpec(format="bf16"),
    "fp32": OperandSpec(format="fp32"),
}
KEY = torch.tensor([7, 3])
QUANTIZE = getattr(torch.ops.fourbits.quantize_packed, OVERLOAD)
FAKE_QUANTIZE = getattr(torch.ops.fourbits.fake_quantize, OVERLOAD)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(45, 50), (16, 144)], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_the_compiler_knows_what_operators_return(name, shape, axis):
    spec = SPECS[name]
    for x in (torch.randn(shape), torch.randn(shape).bfloat16(), torch.randn(shape[::-1]).t()):
        args = (x, spec_to_text(spec), axis, torch.tensor(2.0) if spec.tensor_scaled else None, KEY)
        operators = [QUANTIZE] if spec.rht else [QUANTIZE, FAKE_QUANTIZE]
        for operator in operators:
            opcheck(operator, args, test_utils=("test_faketensor", "test_schema"))


@pytest.mark.parametrize("name", ["sr-rht", "mxfp4", "double"])
def test_the_compiler_is_told_what_a_product_returns(name):
    a, b = (fb.quantize(torch.randn(shape), SPECS[name], 1, sr_key=KEY) for shape in ((45, 50), (33, 50)))
    args = (*flat(a), *flat(b), torch.float16, torch.randn(33), "fp32", "separate", None)
    opcheck(getattr(torch.ops.fourbits.matmul_packed, OVERLOAD), args, test_utils=("test_faketensor",))


def test_gradients_are_registered_as_the_compiler_expects():
    x = torch.randn(20, 40, requires_grad=True)
    opcheck(FAKE_QUANTIZE, (x, spec_to_text(OperandSpec()), 1, None, None))


@pytest.mark.parametrize("name", SPECS)
def test_a_graph_quantizes_to_the_eager_bytes(name):
    def quantize(x: Tensor) -> fb.QuantizedTensor:
        return fb.quantize(x, SPECS[name], 0, sr_key=KEY)

    torch.compiler.reset()  # the compiler counts all specs as variants of one function
    x = torch.randn(45, 50)
    made = torch.compile(quantize, fullgraph=True, backend="aot_eager")(x)
    assert_same_operand(made, quantize(x))


@pytest.mark.parametrize("name", ["weight", "double"])
def test_a_graph_of_symbols_serves_all_sizes(name):
    """With dynamic=True the compiler takes a spec's numbers for symbols, too."""

    def product(x: Tensor) -> tuple[Tensor, ...]:
        spec = replace(SPECS[name], amax_headroom=1.5)
        quantized = fb.quantize(x, SPECS[name])
        return quantized.dequantize(), fb.matmul(quantized, quantized), fb.fake_quantize(x, spec)

    torch.compiler.reset()
    compiled = torch.compile(product, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (48, 45, 17):
        x = torch.randn(rows, 50)
        with torch.compiler.set_stance("default" if rows == 48 else "fail_on_recompile"):
            assert all(map(torch.equal, compiled(x), product(x)))


def test_codes_and_products_have_no_gradient_in_a_graph_either():
    """A step that expects one fails, as it does eagerly, instead of training on nothing."""

    def product(x: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        quantized = fb.quantize(x, SPECS["weight"], amax=amax)
        return quantized.dequantize(), fb.matmul(quantized, quantized)

    torch.compiler.reset()
    x, amax = torch.randn(20, 33, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    for call in (product, torch.compile(product, fullgraph=True, backend="aot_eager")):
        assert not any(made.requires_grad for made in call(x, amax))


def test_a_graph_of_symbols_transposes():
    def turned(x: Tensor) -> Tensor:
        return fb.quantize(x, SPECS["weight"]).t().dequantize()

    torch.compiler.reset()
    x = torch.randn(64, 128)
    assert torch.equal(torch.compile(turned, fullgraph=True, dynamic=True, backend="aot_eager")(x), turned(x))


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_survives_its_text(name):
    spec = replace(SPECS[name], amax_headroom=1.1)
    assert spec_from_text(spec_to_text(spec)) == spec


def test_a_graph_passes_the_gradient_on_and_none_to_amax():
    def loss(x: Tensor, amax: Tensor) -> Tensor:
        return (fb.fake_quantize(x, OperandSpec(), amax=amax) * weights).sum()

    x, amax, weights = torch.randn(20, 33), torch.tensor(3.0), torch.randn(20, 33)
    x.requires_grad_()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(x, amax).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weights)


@pytest.fixture
def few_variants(monkeypatch):
    """Two compiled variants per function, of any function."""
    compiler._compiled.cache_clear()
    compiler._warn_of_variants.cache_clear()
    torch.compiler.reset()
    monkeypatch.setattr(compiler, "_LIMITS", {})
    monkeypatch.setattr(compiler, "COMPILE_FROM", 0)
    with dynamo_config.patch(recompile_limit=2):
        yield
    compiler._compiled.cache_clear()
    torch.compiler.reset()


@pytest.mark.usefixtures("few_variants")
def test_beyond_the_limit_of_variants_quantization_runs_uncompiled_and_says_so():
    def doubled(x: Tensor, number: Tensor | None, factor: str) -> Tensor:
        return x * len(factor) + (0 if number is None else number)

    call: Callable[..., Tensor] = compiler.compiled(doubled)
    x = torch.randn(8)
    for factor in ("a", "bb"):
        assert torch.equal(call(x, None, factor), x * len(factor))
    with pytest.warns(UserWarning, match=r"doubled runs uncompiled.*compiled 2 times.*recompile_limit"):
        assert torch.equal(call(x, None, "ccc"), x * 3)
    assert torch.equal(call(x, None, "dddd"), x * 4)  # and does not say so again
