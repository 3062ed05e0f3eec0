"""Quantizing with error feedback, kernel against reference, for the interpreter and for a GPU.

As a program it checks small cases in Triton's interpreter:
TRITON_INTERPRET=1 python -m support.feedback_cases
"""

import os
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fourbits.quant.feedback_coefficients import LARGEST, feedback_coefficients, span_within
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference import quantize as reference
from fourbits.quant.request import OperandInputs, OperandRequest
from support.fused_cases import Case, by_kernels, tensor
from support.triton_interpreter import failures


@dataclass(frozen=True)
class FeedbackCase:
    """A tensor, and how it is quantized. largest: whether all coefficients are, in place of a weight's."""

    x: Case
    spec: OperandSpec
    given: float | None = None
    largest: bool = False

    @property
    def name(self) -> str:
        amax = "" if self.given is None else f", amax {self.given:g}"
        spec = f"spans of {self.spec.error_feedback}, {self.spec.scale_rule}, {self.spec.source}"
        return f"{self.x.name}, {spec}{amax}{', largest' if self.largest else ''}"


def coefficients_for(case: FeedbackCase, columns: int) -> Tensor:
    """int8 [columns, span]: of a weight with correlated columns, or the largest everywhere."""
    span = case.spec.error_feedback
    if case.largest:
        return torch.full((columns, span_within(span, columns)), LARGEST, dtype=torch.int8)
    generator = torch.Generator().manual_seed(columns)
    mixing = torch.eye(columns) + torch.randn(columns, columns, generator=generator) / columns**0.5
    return feedback_coefficients(torch.randn(columns, columns, generator=generator) @ mixing, span)


def differences(case: FeedbackCase, device: torch.device | str = "cpu") -> list[str]:
    """What differs from the reference; empty if every byte is the same."""
    x = tensor(case.x, device)
    coefficients = coefficients_for(case, x.shape[1])
    amax = None if case.given is None else torch.tensor(case.given)
    request = OperandRequest(case.spec, 1, amax="own" if amax is None else "given")
    given = None if amax is None else amax.to(device)
    inputs = OperandInputs(amax=given, coefficients=coefficients.to(device))
    (found,) = by_kernels(x, [request], inputs)
    true = reference.exact_operand(x.cpu(), case.spec, 1, amax, None, coefficients)
    wrong: list[str] = []
    for name in ("values", "scale"):
        own, other = getattr(found, name).cpu(), getattr(true, name)
        kind = torch.int16 if own.dtype == torch.bfloat16 else torch.int32
        nan = torch.isnan(other)
        same = (own.view(kind) == other.view(kind)) | (nan & torch.isnan(own))
        if not same.all():
            wrong.append(f"{name}: {int((~same).sum())} of {same.numel()} differ")
    return wrong


ROW, FOUR_OVER_SIX = (OperandSpec(error_feedback=64, scale_rule=rule) for rule in ("max", "4over6-mse"))
BF16 = OperandSpec(error_feedback=128, source="bf16")
LONG, LONG_FOUR = (replace(spec, error_feedback=256) for spec in (ROW, FOUR_OVER_SIX))
SMALL = [
    *(FeedbackCase(Case("row", (18, 80)), spec) for spec in (ROW, FOUR_OVER_SIX, BF16)),
    FeedbackCase(Case("row", (18, 50), torch.float32), BF16),
    FeedbackCase(Case("row", (5, 24), torch.float16), OperandSpec(error_feedback=64)),
    *(
        FeedbackCase(Case("row", (40, 48), values=values), ROW)
        for values in ("nan and inf", "tiny", "huge", "zeros", "zero blocks", "ties")
    ),
    *(FeedbackCase(Case("row", (18, 48)), ROW, given) for given in (0.0, 1e-3, 1e6, float("nan"))),
    *(FeedbackCase(Case("row", (18, 48), layout=layout), ROW) for layout in ("rows apart", "transposed")),
    *(FeedbackCase(Case("row", shape), ROW) for shape in ((0, 32), (32, 0), (1, 16))),
    FeedbackCase(Case("row", (18, 80)), FOUR_OVER_SIX, largest=True),
    FeedbackCase(Case("row", (18, 80)), replace(ROW, scale_rule="search-mse")),
    *(FeedbackCase(Case("row", shape), LONG) for shape in ((0, 300), (3, 144), (3, 200), (3, 256), (3, 420))),
    FeedbackCase(Case("row", (3, 300)), LONG_FOUR),
    *(FeedbackCase(Case("row", (40, 280), values=values), LONG) for values in ("nan and inf", "zero blocks")),
    *(FeedbackCase(Case("row", (3, 300)), LONG, given) for given in (0.0, 1e6)),
    FeedbackCase(Case("row", (3, 300)), LONG, largest=True),
]


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    sys.exit(failures((case.name, lambda case=case: differences(case)) for case in SMALL))
