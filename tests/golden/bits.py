"""What fb.quantize stores: codes, scales, values and the transpose of every spec, on small and large inputs.

A case is a name, and everything else follows from it, so that one case can be computed alone.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

import fourbits as fb
from golden.hashes import hashed
from golden.inputs import DTYPES, KINDS, matrix
from golden.specs import ODD_LARGE, odd_specs, recipe_specs

SMALL = ((1, 1), (1, 16), (17, 50), (64, 144))
LATER_RECIPES = ("mxfp4-ceil", "ue5m3", "fp4-all-the-way", "averis", "tetrajet2", "alto", "fourbits")
#: more elements than the 65,536 from which a CPU compiles
LARGE = ((300, 272), (256, 512))
#: combinations of dtype, values and amax for each shape and axis
_OF_A_RECIPE, _ODD_ONES = 4, 3
_COMBINATIONS = [
    (dtype, kind, amax) for amax in ("own", "given") for kind in KINDS for dtype in ("fp32", "bf16", "fp16")
]
#: coprime to their number, so that neighbours differ in everything
_STRIDE = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of fb.quantize."""

    name: str
    spec: fb.OperandSpec
    shape: tuple[int, int]
    axis: int
    dtype: str
    kind: str
    amax: str

    @property
    def key(self) -> str:
        """What the entry is called."""
        rows, columns = self.shape
        return f"bits/{self.name}/{rows}x{columns} axis {self.axis}/{self.dtype} {self.kind} {self.amax}"


@cache
def cases() -> tuple[Case, ...]:
    """All cases, small ones first."""
    recipes, odd = recipe_specs(), odd_specs()
    # The number of a spec chooses its inputs: later recipes come last, so that the earlier ones keep theirs.
    later = {
        name: spec for recipe in LATER_RECIPES for name, spec in recipes.items() if name.split()[0] == recipe
    }
    earlier = {name: spec for name, spec in recipes.items() if name not in later}
    small, large = [], []
    for number, (name, spec) in enumerate({**earlier, **odd, **later}.items()):
        turn, count = 5 * number, _OF_A_RECIPE if name in recipes else _ODD_ONES
        for shape in SMALL:
            for axis in (1,) if spec.error_feedback else (0, 1):
                small += [_case(name, spec, shape, axis, turn + i) for i in range(count)]
                turn += count
        if name in recipes or name in ODD_LARGE:
            axis = 1 if spec.error_feedback else number // 2 % 2
            large.append(_case(name, spec, LARGE[number % 2], axis, turn))
    return tuple(dict.fromkeys(small + large))


def _case(name: str, spec: fb.OperandSpec, shape: tuple[int, int], axis: int, turn: int) -> Case:
    dtype, kind, amax = _COMBINATIONS[_STRIDE * turn % len(_COMBINATIONS)]
    amax = amax if spec.tensor_scaled else "own"
    return Case(name=name, spec=spec, shape=shape, axis=axis, dtype=dtype, kind=kind, amax=amax)


def recorded(case: Case, device: str, state: AbstractContextManager[object] | None = None) -> str:
    """Hashes of codes, block scales, global scale, values and, of square blocks, the transpose's four.

    state: of the caller, entered once the inputs exist; the bits must not depend on it.
    """
    x = matrix(case.shape, case.kind, DTYPES[case.dtype]).to(device)
    key = torch.tensor([1234, 44, 17, 48, 3], device=device)
    amax, coefficients = _amax(case, x), _coefficients(case, x)
    with state or nullcontext():
        q = fb.quantize(x, case.spec, case.axis, amax=amax, sr_key=key, coefficients=coefficients)
        parts = [*_parts(q), *(_parts(q.t()) if _square(case.spec) else ())]
    return " ".join(map(hashed, parts))


def _coefficients(case: Case, x: Tensor) -> Tensor | None:
    """Of error feedback: small whole numbers of either sign, without a pattern in rows or columns."""
    if not case.spec.error_feedback:
        return None
    columns = x.shape[1]
    span = fb.feedback_coefficients(torch.zeros(1, columns), case.spec.error_feedback).shape[1]
    numbers = torch.arange(columns * span, dtype=torch.int64).view(columns, span)
    return (numbers * numbers % 31 - 15).to(torch.int8).to(x.device)


def _parts(q: fb.QuantizedTensor) -> list[Tensor]:
    return [q.codes, q.block_scale, q.global_scale, q.dequantize()]


def _square(spec: fb.OperandSpec) -> bool:
    sizes = (spec.block_size, spec.outer_size)
    return not spec.rht and all(size is None or size[0] == size[1] for size in sizes)


def _amax(case: Case, x: Tensor) -> Tensor | None:
    """Of a grid the one that makes its scales powers of two; else less than the largest, which saturates."""
    if case.amax == "own":
        return None
    if case.kind == "grid":
        return torch.tensor(6.0 * 448.0, device=x.device)
    finite = torch.where(torch.isfinite(x), x.float(), 0.0).abs().max()
    return torch.where(finite > 0, finite * 0.75, 1.0)
