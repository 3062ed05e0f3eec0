"""OperandSpec: everything that decides the bits of one GEMM operand."""

from dataclasses import dataclass, replace
from typing import Literal

from fourbits.formats.descriptors import BLOCK_FORMATS, BlockFormat

Rounding = Literal["rne", "sr", "sr32"]
ScaleRule = Literal["max"]
AmaxPolicy = Literal["current"]
Source = Literal["as_is", "bf16"]

RHT_SIZES = (0, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandSpec:
    """How one operand of a GEMM is quantized. Checks itself once and never computes.

    Raises ValueError for a combination that has no meaning, naming the field. docs/nvfp4.md, section 3.3.
    """

    #: a name of formats.descriptors.BLOCK_FORMATS
    format: str = "nvfp4"
    #: (other axis, contraction axis); None takes the format's own, (0, 0) is one block for the whole tensor
    block: tuple[int, int] | None = None
    #: what is quantized: the tensor as it comes, or its bf16 rounding (weights)
    source: Source = "as_is"
    #: elements: to nearest even, stochastic with 8 bits (as the hardware does) or with 24 bits (unbiased)
    rounding: Rounding = "rne"
    #: size of the Hadamard transform along the contraction axis, 0 for none
    rht: int = 0
    #: te16 | fixed:SEED | per-layer | per-call | none; empty takes te16 for 16 and fixed:0 for other sizes
    rht_signs: str = ""
    scale_rule: ScaleRule = "max"
    amax_policy: AmaxPolicy = "current"
    #: bytes of underflowing blocks as TransformerEngine's (saturated codes under a zero scale); False stores
    #: zero codes
    te_compat: bool = True

    def __post_init__(self) -> None:
        if self.format not in BLOCK_FORMATS:
            raise ValueError(
                f"OperandSpec.format: no format is called {self.format!r}. Known: {', '.join(BLOCK_FORMATS)}."
            )
        self._check_block()
        self._check_transform()

    @property
    def block_format(self) -> BlockFormat:
        """The descriptor of `format`."""
        return BLOCK_FORMATS[self.format]

    @property
    def block_size(self) -> tuple[int, int] | None:
        """(other axis, contraction axis) in force; None for one block over the whole tensor, or no blocks at
        all.
        """
        size = self.block if self.block is not None else self.block_format.block
        return None if size == (0, 0) else size

    @property
    def stochastic(self) -> bool:
        """Whether rounding consumes random bits."""
        return self.rounding != "rne"

    @property
    def signs(self) -> str:
        """The sign rule in force."""
        return self.rht_signs or ("te16" if self.rht == 16 else "fixed:0")

    @property
    def transform(self) -> tuple[int, str] | None:
        """What both operands of a GEMM must share for the transform to cancel; None without one."""
        return (self.rht, self.signs) if self.rht else None

    def for_measuring(self) -> "OperandSpec":
        """The part of the spec that scales depend on, so that compiled code is shared."""
        return replace(self, rounding="rne", rht=0, rht_signs="", te_compat=True, source="as_is")

    def for_rounding(self) -> "OperandSpec":
        """The part of the spec that elements depend on once scales are known."""
        return replace(self, rht=0, rht_signs="", amax_policy="current", source="as_is")

    def _check_block(self) -> None:
        fmt = self.block_format
        if not fmt.quantized and (self.rounding != "rne" or self.block is not None):
            raise ValueError(
                f"OperandSpec: {self.format} has neither blocks nor stochastic rounding, "
                f"got block={self.block}, rounding={self.rounding!r}. Leave both at their defaults."
            )
        if self.block is None:
            return
        if self.block == (0, 0) and fmt.scale != "fp32":
            raise ValueError(
                f"OperandSpec.block: (0, 0) needs fp32 scales (fp8, int8), got format {self.format}."
            )
        if self.block != (0, 0) and min(self.block) < 1:
            raise ValueError(f"OperandSpec.block: both sizes must be at least 1, got {self.block}.")

    def _check_transform(self) -> None:
        if self.rht not in RHT_SIZES:
            raise ValueError(f"OperandSpec.rht: must be one of {RHT_SIZES}, got {self.rht}.")
        if self.rht_signs == "te16" and self.rht != 16:
            raise ValueError(
                f"OperandSpec.rht_signs: te16 is a vector of 16 signs, got rht={self.rht}. "
                "Use rht_signs='fixed:SEED' for other sizes."
            )
        kind, _, seed = self.rht_signs.partition(":")
        if self.rht_signs not in ("", "te16", "per-layer", "per-call", "none") and not (
            kind == "fixed" and seed.isdecimal() and int(seed) < 1 << 32
        ):
            raise ValueError(
                f"OperandSpec.rht_signs: got {self.rht_signs!r}. "
                "Allowed: te16, fixed:SEED (0 <= SEED < 2**32), per-layer, per-call, none."
            )
