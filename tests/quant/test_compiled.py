"""The compiled source gives the eager source's bytes, though compilers drop casts and assume no overflow."""

import math

import pytest
import torch
from torch._inductor.exc import CppCompileError, InductorError

from fourbits.quant import quantize as module
from fourbits.quant.cpu import compiled as compiler
from fourbits.quant.operand import OperandSpec
from support.adversarial import FINITE, NON_FINITE
from support.assertions import assert_same_operand

KEY = torch.tensor([1234, 44, 17, 48, 3])
SPECS = {
    "rne": OperandSpec(),
    "tile": OperandSpec(block=(16, 16), source="bf16"),
    "sr": OperandSpec(rounding="sr"),
    "sr-rht": OperandSpec(rounding="sr", rht=16),
    "mxfp4-sr-rht": OperandSpec(format="mxfp4", rounding="sr", rht=32),
    "scale-sr": OperandSpec(scale_rounding="sr"),
    "sr32": OperandSpec(rounding="sr32"),
    "4over6": OperandSpec(scale_rule="4over6-mse"),
    "eden": OperandSpec(rounding="ms-eden", rht=32, rht_signs="per-call"),
    "fp8": OperandSpec(format="fp8"),
    "fp8-whole": OperandSpec(format="fp8", block=(0, 0)),
}
#: without another graph: the compiled stages of SPECS serve these inputs, too
EDGES = ("rne", "tile", "sr-rht", "mxfp4-sr-rht", "4over6", "eden", "fp8")
#: the same for rules and formats of their own; each along one axis, because every graph takes seconds
RARER_EDGES = {
    "ue5m3": (OperandSpec(format="nvfp4-ue5m3"), 1),
    "nvint4": (OperandSpec(format="nvint4"), 0),
    "int8": (OperandSpec(format="int8"), 1),
    "no-te-compat": (OperandSpec(te_compat=False), 0),
    "mxfp8-e5m2": (OperandSpec(format="mxfp8-e5m2", scale_rule="ceil"), 1),
    "search": (OperandSpec(format="nve1m2", scale_rule="search-max"), 0),
}


def spread_input() -> torch.Tensor:
    """[144, 272] fp32 over many binades, subnormal results and zeros included."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(144, 272, generator=generator)
    x *= torch.exp2(torch.randint(-24, 3, (144, 272), generator=generator))
    x[3] = 0.0
    return x


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", SPECS)
def test_compiled_bytes_equal_eager_bytes(name: str, axis: int, monkeypatch: pytest.MonkeyPatch):
    x, spec = spread_input(), SPECS[name]
    eager = module.quantize(x, spec, axis, sr_key=KEY)
    monkeypatch.setattr(compiler, "COMPILE_FROM", 0)
    compiled = module.quantize(x, spec, axis, sr_key=KEY)
    exact = module.exact_operand(x, spec, axis, sr_key=KEY)
    assert torch.equal(compiled.codes, eager.codes)
    assert torch.equal(compiled.block_scale.view(torch.uint8), eager.block_scale.view(torch.uint8))
    assert torch.equal(compiled.global_scale, eager.global_scale)
    values = eager.element_codes() if spec.block_format.element is None else eager.block_values()
    if spec.block_format.scale != "fp32":
        stored = exact.values.t() if axis == 0 else exact.values
        assert torch.equal(stored.float(), values)


def assert_equal_operands(x: torch.Tensor, spec: OperandSpec, axis: int, amax: torch.Tensor | None) -> None:
    found = []
    for compile_from in (0, 1 << 62):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiler, "COMPILE_FROM", compile_from)
            found.append(module.quantize(x, spec, axis, amax=amax, sr_key=KEY))
    assert_same_operand(*found)


@pytest.mark.parametrize("name", EDGES)
def test_compiled_edges_are_the_eager_ones(name: str):
    """Poison, zeros of both signs, subnormals, underflow and the largest numbers, along both axes."""
    for number, make in enumerate({**FINITE, **NON_FINITE}.values()):
        assert_equal_operands(make((48, 144), number), SPECS[name], number % 2, None)


@pytest.mark.parametrize("name", RARER_EDGES)
def test_compiled_edges_of_rarer_rules_and_formats_are_the_eager_ones(name: str):
    spec, axis = RARER_EDGES[name]
    for number, make in enumerate({**FINITE, **NON_FINITE}.values()):
        assert_equal_operands(make((48, 144), number), spec, axis, None)
        if spec.tensor_scaled and number % 4 == 0:
            assert_equal_operands(make((48, 144), number), spec, axis, torch.tensor(1e-3))


@pytest.mark.parametrize("amax", [0.0, 7e-36, 1e-3, 3.4e38, math.inf, math.nan])
@pytest.mark.parametrize("name", ["rne", "sr-rht", "fp8-whole"])
def test_a_given_amax_is_used_by_compiled_code_as_by_eager_code(name: str, amax: float):
    for kind in ("normal", "nan"):
        x = {**FINITE, **NON_FINITE}[kind]((48, 144), 3)
        assert_equal_operands(x, SPECS[name], 1, torch.tensor(amax))


def test_sizes_that_are_no_multiple_of_anything_are_compiled_too():
    x = FINITE["spread"]((15, 4423), 4)
    assert x.numel() >= compiler.COMPILE_FROM
    assert_equal_operands(x, SPECS["rne"], 1, None)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", ["sr-rht", "4over6"])
def test_a_callers_compiled_code_gives_the_eager_bytes(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler, "COMPILE_FROM", 0)
    x, spec = spread_input()[:48, :64].to(torch.bfloat16).contiguous(), SPECS[name]
    compiled = torch.compile(lambda x: module.quantize(x, spec, 1, sr_key=KEY).codes)(x)
    monkeypatch.setattr(compiler, "COMPILE_FROM", 1 << 62)
    assert torch.equal(compiled, module.quantize(x, spec, 1, sr_key=KEY).codes)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_caller_may_compile_a_format_whose_scales_the_compiler_has_no_code_for():
    """The last block ends after the tensor: the compiler has read scales from beyond it."""
    x, spec = spread_input()[:48, :72], OperandSpec(format="mxfp4")
    compiled = torch.compile(lambda x: module.quantize(x, spec, 1).dequantize())(x)
    assert torch.equal(compiled, module.quantize(x, spec, 1).dequantize())


def test_a_compiler_that_is_killed_or_objects_is_quoted():
    killed, said = (CppCompileError(["g++"], output) for output in ("", "In file a:\na:1: error: no such"))
    assert compiler._reason(killed) == "the C++ compiler was killed without a message (out of memory?)"
    for error in (said, InductorError(said, None)):
        assert compiler._reason(error) == "a:1: error: no such"
    assert compiler._reason(RuntimeError("No working C++ compiler found\nat all")) == (
        "No working C++ compiler found"
    )
