"""Quantization as the compiler sees it: a spec as text, and empty outputs of the operators.

Sizes may be symbolic here.
"""

import ast
import functools
import operator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fourbits.quant.arguments import checked_inputs
from fourbits.quant.operand import OperandSpec
from fourbits.quant.scale_hierarchy import hierarchy_of

_FIELDS = tuple(field.name for field in fields(OperandSpec))
_FLOATS = {field.name for field in fields(OperandSpec) if field.type is float}


def spec_to_text(spec: OperandSpec) -> str:
    """A spec as text for `spec_from_text`, by functions that the compiler's front end can evaluate."""
    return ",".join([f"{name}={_literal(getattr(spec, name))}" for name in _FIELDS])


def _literal(value: object) -> str:
    """The text of a field; a float in hexadecimal, in quotes.

    Compiling with dynamic=True makes numbers symbols. As an index, or in hexadecimal, they are numbers again.
    """
    if isinstance(value, tuple):
        return "(" + "".join([f"{_literal(entry)}," for entry in value]) + ")"
    if isinstance(value, float):
        return repr(value.hex())
    if isinstance(value, int) and not isinstance(value, bool):
        return repr(operator.index(value))
    return repr(value)


@functools.lru_cache(maxsize=1024)
def spec_from_text(text: str) -> OperandSpec:
    """Inverse of `spec_to_text`."""
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    found: dict[str, Any] = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
    for name in _FLOATS:
        found[name] = float.fromhex(found[name])
    return OperandSpec(**found)


def fake_fake_quantize(x: Tensor, spec: str, axis: int, amax: Tensor | None, sr_key: Tensor | None) -> Tensor:
    """An empty output of `fourbits::fake_quantize`."""
    checked_inputs(x, spec_from_text(spec), axis, amax, sr_key)
    return x.new_empty((x.shape[0], x.shape[1]))


def fake_packed(
    x: Tensor,
    spec: str,
    axis: int,
    amax: Tensor | None,
    sr_key: Tensor | None,
    coefficients: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty outputs of `fourbits::quantize_packed`."""
    parsed = spec_from_text(spec)
    axis, _, _ = checked_inputs(x, parsed, axis, amax, sr_key, coefficients)
    fmt, size, outer = parsed.block_format, parsed.block_size, parsed.outer_size
    rows, length = x.shape[1 - axis], _blocks(x.shape[axis], max(16, parsed.rht)) * max(16, parsed.rht)
    if fmt.element is None:
        codes = x.new_empty((rows, length), dtype=fmt.dtype)
    else:
        codes = x.new_empty((rows, length * fmt.element.bits // 8), dtype=torch.uint8)
    block_scale = x.new_empty((0, 0), dtype=torch.float32)
    if size is not None:
        hierarchy = hierarchy_of(fmt)
        dtype = torch.uint8 if hierarchy.dtype == torch.float8_e8m0fnu else hierarchy.dtype
        shape = hierarchy.stored_shape(_blocks(rows, size[0]), _blocks(length, size[1]))
        block_scale = x.new_empty(shape, dtype=dtype)
    shape = () if outer is None else (_blocks(rows, outer[0]), _blocks(length, outer[1]))
    return codes, block_scale, x.new_empty(shape, dtype=torch.float32)


def _blocks(size: int, length: int) -> int:
    return -(-size // length)
