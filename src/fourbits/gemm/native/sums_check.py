"""A GPU's FP4 sums, compared bit for bit with the known rules: reported, not required.

Sums within the bound of section 12.4 may train. Whether they are those of section 22 says whether another
device can repeat a run, and settles what is unknown of a chip.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.gemm.native.probes import PROBES, WIDTH_PROBE, operands, random_operand
from fourbits.gemm.sums import matmul as modelled
from fourbits.quant.tensor import QuantizedTensor

Product = Callable[[QuantizedTensor, QuantizedTensor, torch.dtype, Tensor | None], Tensor]

#: rules that random sums are compared with
RULES = ("sm_100", "sm_103", "exact")
#: M, N and K of the random GEMM
_SHAPE = (128, 128, 1536)
_WIDTHS = {16777216.0: 64, 16777218.0: 96}


class SumsReport(NamedTuple):
    """The sums of one device."""

    #: results of the probes, by name
    probes: dict[str, float]
    #: names of the probes whose result is not that of sm_100
    unlike: tuple[str, ...]
    #: products of one step, 64 or 96, if the probe of the width gave one of its two results
    width: int | None
    #: outputs of the random GEMM with the very bits of each rule, and how many there are
    equal: dict[str, int]
    outputs: int

    def __str__(self) -> str:
        rule, count = max(self.equal.items(), key=lambda item: item[1])
        width = f"steps of {self.width}" if self.width else "steps of unknown width"
        probes = f"{len(self.probes) - len(self.unlike)} of {len(self.probes)} probes as sm_100"
        return f"{width}, {probes}, {count} of {self.outputs} random sums with the bits of {rule}"


def examine_sums(device: torch.device, multiply: Product) -> SumsReport:
    """The results of the probes and of a random GEMM on a device, beside the rules' own."""
    probes = {
        probe.name: float(multiply(*operands(probe, device), torch.float32, None)[0, 0]) for probe in PROBES
    }
    found = multiply(*_random_operands(device), torch.float32, None).cpu()
    return SumsReport(
        probes, unlike_probes(probes), step_width(probes), outputs_of_rules(found), found.numel()
    )


def unlike_probes(probes: dict[str, float]) -> tuple[str, ...]:
    """Names of the probes whose result is not that of sm_100."""
    return tuple(probe.name for probe in PROBES if probes[probe.name] != probe.expected)


def step_width(probes: dict[str, float]) -> int | None:
    """Products of one step, by the result of the probe of the width."""
    return _WIDTHS.get(probes[WIDTH_PROBE])


def random_sums(rule: str) -> Tensor:
    """The outputs of the random GEMM by a rule, fp32 [M, N]."""
    return modelled(*_random_operands(torch.device("cpu")), torch.float32, None, rule)


def outputs_of_rules(found: Tensor) -> dict[str, int]:
    """How many outputs of the random GEMM have the very bits of each rule."""
    return {rule: _equal_bits(found, random_sums(rule)) for rule in RULES}


def _random_operands(device: torch.device) -> tuple[QuantizedTensor, QuantizedTensor]:
    M, N, K = _SHAPE
    a, b = (random_operand(rows, K, seed, device) for seed, rows in enumerate((M, N)))
    return a, b


def _equal_bits(a: Tensor, b: Tensor) -> int:
    return int((a.contiguous().view(torch.int32) == b.view(torch.int32)).sum())
