"""What fb.matmul returns for the operands of every recipe's three GEMMs, and for pairs of formats."""

from typing import Any

import torch

import fourbits as fb
from golden.hashes import described
from golden.inputs import DTYPES, bell, exponents
from golden.specs import odd_specs

#: M, N, K
SIZES = ((17, 33, 50), (64, 80, 144), (200, 144, 272))
#: what is multiplied: shapes by letters, and the axis that is summed over
_GEMMS = {"fprop": ("MK", "NK", 1, 1), "dgrad": ("MN", "NK", 1, 0), "wgrad": ("MN", "MK", 0, 0)}
_OUT = tuple(DTYPES.items())
#: rarer pairs of operands
_PAIRS = (
    ("16x16", "4over6-mse"), ("double", "nvint4"), ("double 16x16 outer 32x32", "double"),
    ("int8", "int8 whole"), ("fp8 whole", "fp8-e5m2"), ("mxfp8-e5m2", "ue5m3"),
    ("fp32", "fp32"), ("fp32", "sr32"), ("int8", "fp32"),
    ("rht 64 per-call", "rht 64 per-call"), ("3x48", "1x64"), ("nve1m2", "mxfp8"),
)  # fmt: skip


def entries(device: str) -> dict[str, str]:
    """Every GEMM of every recipe and rule on every size, and the pairs; dtypes and bias take turns."""
    found: dict[str, str] = {}
    for name in fb.list_recipes():
        recipe = fb.get_recipe(name)
        tables: dict[str, Any] = {name: recipe}
        tables |= {f"{name} rule {i}": rule.table for i, rule in enumerate(recipe.layers)}
        for table, gemms in tables.items():
            for gemm in _GEMMS:
                specs = getattr(gemms, gemm)
                if specs.lhs.error_feedback:  # needs coefficients; bits.py records the operand
                    continue
                found |= _of_sizes(f"{table} {gemm}", specs.lhs, specs.rhs, gemm, device)
    odd = odd_specs()
    for lhs, rhs in _PAIRS:
        found |= _of_sizes(f"{lhs} by {rhs}", odd[lhs], odd[rhs], "fprop", device)
    return found


def _of_sizes(name: str, lhs: fb.OperandSpec, rhs: fb.OperandSpec, gemm: str, device: str) -> dict[str, str]:
    """One pair on all sizes, in every output dtype, with and without bias."""
    found: dict[str, str] = {}
    for turn, sizes in enumerate(SIZES):
        dtype, (a, b) = _OUT[turn % 2][1], _operands(lhs, rhs, gemm, sizes, _OUT[turn % 2][1], device)
        for word, out in _OUT:
            for bias in (None, bell((b.rows,), f"bias {name}").to(device, dtype)):
                key = f"products/{name}/{'x'.join(map(str, sizes))}/{word}{'' if bias is None else ' bias'}"
                found[key] = described(fb.matmul(a, b, out, bias))
    return found


def _operands(
    lhs: fb.OperandSpec,
    rhs: fb.OperandSpec,
    gemm: str,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
) -> list[fb.QuantizedTensor]:
    letters = dict(zip("MNK", sizes, strict=True))
    left, right, *axes = _GEMMS[gemm]
    made: list[fb.QuantizedTensor] = []
    for side, (shape, spec, axis) in enumerate(zip((left, right), (lhs, rhs), axes, strict=True)):
        size = letters[shape[0]], letters[shape[1]]
        x = (bell(size, shape) * exponents(size, shape)).to(device, dtype)
        key = torch.tensor([1234, 40 + side, 17, 48, 3], device=device)
        if spec.transform is not None:  # signs follow the key, and must be equal on both sides
            key[1] = 40
        made.append(fb.quantize(x, spec, axis, sr_key=key))
    return made
