"""OperandSpec: everything that determines the bits of one GEMM operand. docs/nvfp4.md, section 3.3."""

from dataclasses import astuple, dataclass, replace
from typing import Literal, get_args

from fourbits.formats.descriptors import BLOCK_FORMATS, BlockFormat
from fourbits.quant.operand_rules import problem
from fourbits.quant.scale_rules import SCALE_RULES

Source = Literal["as_is", "bf16", "forward"]
Rounding = Literal["rne", "sr", "sr32", "ms-eden"]
ScaleRounding = Literal["rne", "sr"]
Fp32Scale = Literal["exact", "pow2"]
AmaxPolicy = Literal["current", "delayed", "interval", "history"]
Adaptive = Literal["none", "outer", "block"]

#: the values that a field may have, for fields with a few choices
CHOICES: dict[str, tuple[str, ...]] = {
    "source": get_args(Source),
    "rounding": get_args(Rounding),
    "scale_rounding": get_args(ScaleRounding),
    "fp32_scale": get_args(Fp32Scale),
    "amax_policy": get_args(AmaxPolicy),
    "adaptive": get_args(Adaptive),
}


class _HashedOnce:
    """A value that is looked up in caches at every call, and has many fields to hash."""

    __slots__ = ("_hash",)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandSpec(_HashedOnce):
    """How one operand of a GEMM is quantized. Checks itself once and never computes.

    Raises ValueError for a combination that has no meaning, naming the field.
    """

    #: a name of formats.descriptors.BLOCK_FORMATS, which `register_block_format` adds to
    format: str = "nvfp4"
    #: (other axis, contraction axis); None takes the format's own, (0, 0) is one block for the whole tensor
    block: tuple[int, int] | None = None
    #: block that shares one FP32 scale in nvfp4-double; None takes 1x128
    outer: tuple[int, int] | None = None
    #: what is quantized: the tensor itself, its bf16 rounding (weights), or the values of the Fprop operand
    source: Source = "as_is"
    #: of elements: to nearest even, stochastic with 8 bits (as the hardware does) or 24 (unbiased), or to
    #: nearest under stochastic block scales that undo the bias
    rounding: Rounding = "rne"
    #: map block maxima to 16/17 of the largest element, so that stochastic rounding never has to saturate
    sr_headroom: bool = False
    #: size of the Hadamard transform along the contraction axis, 0 for none
    rht: int = 0
    #: te16 | fixed:SEED | per-layer | per-call | none; empty takes te16 for 16 and fixed:0 for other sizes
    rht_signs: str = ""
    #: a registered `quant.correction.Correction`: a part of X or dY that is removed before quantizing, and
    #: whose product the linear layer adds back in FP32; empty for none
    correction: str = ""
    #: neighbours along the contraction, a span, in which later blocks make up for what a block loses, by
    #: coefficients that follow from the weight that X is multiplied by; 0 for none
    error_feedback: int = 0
    #: steps from one update of the coefficients to the next; 0 takes 50
    feedback_interval: int = 0
    #: a name of quant.scale_rules.SCALE_RULES, which `register_scale_rule` adds to: block scale from the
    #: block's maximum, or the candidate with the least error
    scale_rule: str = "max"
    #: largest block scale the tensor's amax is mapped to; 0 takes 448, with 4over6 and search 256
    scale_bound: int = 0
    scale_rounding: ScaleRounding = "rne"
    #: FP32 scales exact, or rounded down to a power of two
    fp32_scale: Fp32Scale = "exact"
    #: underflowed blocks (scale 0) keep saturated codes, as in TransformerEngine; False stores zero codes
    te_compat: bool = True
    amax_policy: AmaxPolicy = "current"
    #: steps between measurements of `interval`
    amax_interval: int = 100
    #: steps that `history` looks back
    amax_history: int = 16
    #: factor on a stored amax
    amax_headroom: float = 1.0
    #: the tensor's statistics choose its outer blocks or its blocks
    adaptive: Adaptive = "none"
    #: steps from one such choice to the next
    adaptive_interval: int = 100

    def __post_init__(self) -> None:
        if message := problem(self, CHOICES):
            raise ValueError(f"OperandSpec.{message}")

    def __hash__(self) -> int:
        """The hash of all fields, computed once; a copy from another process has none yet."""
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash(astuple(self)))
            return self._hash

    @property
    def block_format(self) -> BlockFormat:
        """The descriptor of `format`."""
        return BLOCK_FORMATS[self.format]

    @property
    def block_size(self) -> tuple[int, int] | None:
        """Effective (other axis, contraction axis); None without blocks, or for one over the whole tensor."""
        if not self.block_format.quantized:
            return None
        size = self.block if self.block is not None else self.block_format.block
        return None if size == (0, 0) else size

    @property
    def outer_size(self) -> tuple[int, int] | None:
        """(other axis, contraction axis) that share one FP32 scale, where a tensor has several."""
        length = self.block_format.outer_block
        return (self.outer or (1, length)) if length else None

    @property
    def scale_sizes(self) -> tuple[tuple[int, int], ...]:
        """Elements (other axis, contraction axis) under one number of each level of scales.

        Blocks first, then groups of blocks, then outer blocks. Empty without blocks.
        """
        size = self.block_size
        if size is None:
            return ()
        groups = ((size[0] * rows, size[1] * columns) for rows, columns in self.block_format.scale_groups)
        return (size, *groups, *((self.outer_size,) if self.outer_size else ()))

    @property
    def square(self) -> bool:
        """Whether the elements that share a scale, at every level, are as many along both axes."""
        return all(rows == columns for rows, columns in self.scale_sizes)

    @property
    def tensor_scaled(self) -> bool:
        """Whether there is one FP32 scale per tensor, which its amax determines."""
        fmt = self.block_format
        if fmt.scale == "fp32":
            return self.block_size is None
        return fmt.has_global_scale and not fmt.outer_block

    @property
    def bound(self) -> float:
        """The largest block scale that the tensor's amax is mapped to."""
        return float(self.scale_bound or SCALE_RULES[self.scale_rule].bound or self.block_format.scale_max)

    @property
    def error_metric(self) -> str | None:
        """mse, mae or max where candidate scales are compared by their error."""
        return SCALE_RULES[self.scale_rule].error_metric

    @property
    def stochastic(self) -> bool:
        """Whether quantizing consumes random bits."""
        return self.block_format.quantized and (self.rounding != "rne" or self.scale_rounding == "sr")

    @property
    def signs(self) -> str:
        """The effective sign rule."""
        return self.rht_signs or ("te16" if self.rht == 16 else "fixed:0")

    @property
    def of_residual(self) -> "OperandSpec":
        """The spec that quantizes a correction's residual: this one without the correction."""
        return replace(self, correction="") if self.correction else self

    @property
    def transform(self) -> tuple[int, str] | None:
        """The key that both operands of a GEMM must share for the transform to cancel; None without one."""
        return (self.rht, self.signs) if self.rht else None
