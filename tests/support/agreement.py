"""fourbits against the oracle: the same call to both, and every field of the results compared."""

from dataclasses import fields

import torch
from torch import Tensor

from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.quant.tensor import QuantizedTensor
from oracle.bridge import patterns, raw_bits
from oracle.floats import FP32
from oracle.operand import Operand
from oracle.quantize import quantize as oracle_quantize
from oracle.spec import Spec

SCALE_DTYPES = {"E4M3": torch.float8_e4m3fn, "E8M0": torch.float8_e8m0fnu, "UE5M3": torch.uint8}
DEFAULTS = Spec()


def fourbits_spec(spec: Spec) -> OperandSpec:
    """The same spec for fourbits: the fields that differ from the defaults."""
    given = {f.name: getattr(spec, f.name) for f in fields(spec)}
    return OperandSpec(**{name: value for name, value in given.items() if value != getattr(DEFAULTS, name)})


def by_fourbits(
    x: Tensor, spec: Spec, axis: int = 1, amax: float | None = None, sr_key: tuple[int, ...] | None = None
) -> QuantizedTensor:
    return quantize(
        x,
        fourbits_spec(spec),
        axis,
        amax=None if amax is None else torch.tensor(amax, dtype=torch.float32),
        sr_key=None if sr_key is None else torch.tensor(sr_key, dtype=torch.int64),
    )


def by_oracle(
    x: Tensor, spec: Spec, axis: int = 1, amax: float | None = None, sr_key: tuple[int, ...] | None = None
) -> Operand:
    pattern = None if amax is None else raw_bits(torch.tensor(amax, dtype=torch.float32))
    assert not isinstance(pattern, list)
    return oracle_quantize(patterns(x), (x.shape[0], x.shape[1]), spec, axis, pattern, sr_key)


def plain_nan(rows: list[list[int]]) -> list[list[int]]:
    """fp32 patterns with one NaN for all."""
    return [[FP32.nan if FP32.is_nan(p) else p for p in row] for row in rows]


def assert_same_codes(q: QuantizedTensor, o: Operand) -> None:
    if o.element is None:
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[o.spec.format]
        assert q.codes.dtype == dtype
        widened = [[p << 16 for p in row] for row in o.codes] if o.spec.format == "bf16" else o.codes
        assert plain_nan(patterns(q.codes)) == plain_nan(widened)
    else:
        assert q.codes.dtype == torch.uint8
        assert raw_bits(q.codes) == o.packed()
    assert tuple(q.codes.shape) == (o.rows, o.padded // 2 if o.element and o.element.bits == 4 else o.padded)


def assert_same_scales(q: QuantizedTensor, o: Operand) -> None:
    if o.has_block_scale:
        grid = o.spec.kind.scale
        assert q.block_scale.dtype == (torch.float32 if grid is None else SCALE_DTYPES[grid.name])
        assert tuple(q.block_scale.shape) == o.tiling.counts
    else:
        assert tuple(q.block_scale.shape) == (0, 0)
    assert raw_bits(q.block_scale) == o.block_scale
    assert q.global_scale.dtype == torch.float32
    shape = () if isinstance(o.global_scale, int) else o.outer_tiling.counts
    assert tuple(q.global_scale.shape) == shape
    assert raw_bits(q.global_scale) == o.global_scale


def assert_same_operand(q: QuantizedTensor, o: Operand) -> None:
    assert (tuple(q.shape), q.axis) == (o.shape, o.axis)
    assert_same_scales(q, o)
    assert_same_codes(q, o)


def assert_agree(
    x: Tensor, spec: Spec, axis: int = 1, amax: float | None = None, sr_key: tuple[int, ...] | None = None
) -> Operand:
    """Quantize with both; codes, scales and values must be bit-identical. Returns the oracle's operand."""
    q, o = by_fourbits(x, spec, axis, amax, sr_key), by_oracle(x, spec, axis, amax, sr_key)
    assert_same_operand(q, o)
    assert plain_nan(patterns(q.dequantize(torch.float32))) == o.dequantize()
    return o
