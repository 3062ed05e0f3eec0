"""The compiled source gives the eager source's bytes, though compilers drop casts and assume no overflow."""

import pytest
import torch

from fourbits.quant import quantize as module
from fourbits.quant.operand import OperandSpec

KEY = torch.tensor([1234, 44, 17, 48, 3])
SPECS = {
    "rne": OperandSpec(),
    "tile": OperandSpec(block=(16, 16), source="bf16"),
    "sr": OperandSpec(rounding="sr"),
    "sr-rht": OperandSpec(rounding="sr", rht=16),
    "mxfp4-sr-rht": OperandSpec(format="mxfp4", rounding="sr", rht=32),
    "scale-sr": OperandSpec(scale_rounding="sr"),
}


def spread_input() -> torch.Tensor:
    """[144, 272] fp32 over many binades, subnormal results and zeros included."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(144, 272, generator=generator)
    x *= torch.exp2(torch.randint(-24, 3, (144, 272), generator=generator))
    x[3] = 0.0
    return x


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_compiled_bytes_equal_eager_bytes(spec: OperandSpec, axis: int, monkeypatch: pytest.MonkeyPatch):
    x = spread_input()
    eager = module.quantize(x, spec, axis, sr_key=KEY)
    monkeypatch.setattr(module, "COMPILE_FROM", 0)
    compiled = module.quantize(x, spec, axis, sr_key=KEY)
    exact = module.exact_operand(x, spec, axis, sr_key=KEY)
    assert torch.equal(compiled.codes, eager.codes)
    assert torch.equal(compiled.block_scale.view(torch.uint8), eager.block_scale.view(torch.uint8))
    assert torch.equal(compiled.global_scale, eager.global_scale)
    values = eager.element_codes() if spec.block_format.element is None else eager.block_values()
    if spec.block_format.scale != "fp32":
        stored = exact.values.t() if axis == 0 else exact.values
        assert torch.equal(stored.float(), values)
