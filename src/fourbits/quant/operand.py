"""OperandSpec: everything that decides the bits of one GEMM operand. docs/nvfp4.md, section 3.3."""

import functools
from dataclasses import dataclass, replace

from fourbits.quant.operand_fields import OperandFields
from fourbits.quant.operand_rules import problem


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandSpec(OperandFields):
    """How one operand of a GEMM is quantized. Checks itself once and never computes.

    Raises ValueError for a combination that has no meaning, naming the field.
    """

    def __post_init__(self) -> None:
        if message := problem(self):
            raise ValueError(f"OperandSpec.{message}")

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - a spec is a value, and few are ever made
    def for_scales(self) -> "OperandSpec":
        """What scales depend on once the blocks' maxima are known, so that compiled code is shared."""
        eden = self.rounding == "ms-eden"
        return replace(
            self,
            source="as_is",
            rounding=self.rounding if eden or self.sr_headroom else "rne",
            rht=self.rht if eden else 0,
            rht_signs="",
            te_compat=True,
            amax_policy="current",
            adaptive="none",
        )

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def for_elements(self) -> "OperandSpec":
        """What elements depend on once scales are known."""
        eden = self.rounding == "ms-eden"
        return OperandSpec(
            format=self.format,
            block=self.block,
            outer=self.outer,
            rounding="rne" if eden else self.rounding,
            te_compat=self.te_compat or eden,
        )
