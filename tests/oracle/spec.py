"""Block formats (section 3.2), the fields of a spec, what may not be combined (3.3), constants of 7.1."""

from dataclasses import dataclass
from fractions import Fraction

from oracle.floats import FP32
from oracle.grids import E1M2, E2M1, E4M3, E5M2, E8M0, INT4, INT8, UE5M3, Grid


@dataclass(frozen=True)
class Format:
    """Grids of elements and scales; fp32: where an fp32 scale sits: "tensor", "outer", "block" or ""."""

    element: Grid | None
    scale: Grid | None
    fp32: str
    block: tuple[int, int] = (1, 16)

    @property
    def two_level(self) -> bool:
        return self.scale is E4M3 or self.scale is UE5M3


FORMATS = {
    "nvfp4": Format(E2M1, E4M3, "tensor"),
    "nvfp4-double": Format(E2M1, E4M3, "outer"),
    "nvfp4-ue5m3": Format(E2M1, UE5M3, ""),
    "nvfp4-ue5m3-global": Format(E2M1, UE5M3, "tensor"),
    "nve1m2": Format(E1M2, E4M3, "tensor"),
    "nvint4": Format(INT4, E4M3, "tensor"),
    "mxfp4": Format(E2M1, E8M0, "", (1, 32)),
    "mxfp8": Format(E4M3, E8M0, "", (1, 32)),
    "mxfp8-e5m2": Format(E5M2, E8M0, "", (1, 32)),
    "fp8": Format(E4M3, None, "block", (1, 128)),
    "fp8-e5m2": Format(E5M2, None, "block", (1, 128)),
    "int8": Format(INT8, None, "block", (1, 128)),
    "bf16": Format(None, None, ""),
    "fp32": Format(None, None, ""),
}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The fields of section 3.3, with its defaults. block None is the format's usual one."""

    format: str = "nvfp4"
    block: tuple[int, int] | None = None
    outer: tuple[int, int] | None = None
    source: str = "as_is"
    rht: int = 0
    rht_signs: str = ""
    rounding: str = "rne"
    sr_headroom: bool = False
    scale_rule: str = "max"
    scale_bound: int = 0
    scale_rounding: str = "rne"
    fp32_scale: str = "exact"
    te_compat: bool = True
    amax_policy: str = "current"
    amax_interval: int = 100
    amax_history: int = 16
    amax_headroom: float = 1.0
    adaptive: str = "none"
    adaptive_interval: int = 100

    @property
    def kind(self) -> Format:
        return FORMATS[self.format]

    @property
    def blocks(self) -> tuple[int, int]:
        return self.block or self.kind.block

    @property
    def outer_blocks(self) -> tuple[int, int]:
        return self.outer or (1, 128)

    @property
    def one_fp32_scale(self) -> bool:
        """Whether there is one fp32 scale per tensor."""
        return self.kind.fp32 == "tensor" or self.blocks == (0, 0)

    @property
    def bound(self) -> int:
        """B of section 7.1."""
        if self.kind.scale is UE5M3 and not self.kind.fp32:
            return 61440
        return self.scale_bound or (448 if self.scale_rule == "max" else 256)

    @property
    def metric(self) -> str:
        return self.scale_rule.rpartition("-")[2]


def why_not(s: Spec) -> str:
    """The first rule of section 3.3 that a spec breaks, or "" for a valid one."""
    kind, (br, bc) = s.kind, s.blocks
    eden_ok = (
        (s.format, s.blocks, s.scale_rule, s.scale_rounding, s.scale_bound)
        == ("nvfp4", (1, 16), "max", "rne", 0)
    ) and s.rht >= 16
    broken = {
        "ceil needs E8M0 scales": s.scale_rule == "ceil" and kind.scale is not E8M0,
        "4over6 needs E2M1 and E4M3": s.scale_rule.startswith("4over6")
        and (kind.element is not E2M1 or kind.scale is not E4M3),
        "search needs E4M3 scales": s.scale_rule.startswith("search") and kind.scale is not E4M3,
        "search chooses the scale itself": s.scale_rule.startswith("search") and s.scale_rounding == "sr",
        "scale_rounding sr needs an E4M3 or UE5M3 scale": s.scale_rounding == "sr" and not kind.two_level,
        "scale_rounding sr needs bc >= 4": s.scale_rounding == "sr" and bc < 4,
        "scale_bound needs an E4M3 scale": s.scale_bound != 0 and kind.scale is not E4M3,
        "sr_headroom needs a two-level scale": s.sr_headroom and not kind.two_level,
        "sr_headroom needs stochastic rounding": s.sr_headroom and s.rounding == "rne",
        "amax_policy needs an fp32 scale per tensor": s.amax_policy != "current" and not s.one_fp32_scale,
        "pow2 needs an fp32 scale": s.fp32_scale == "pow2" and not kind.fp32,
        "adaptive outer needs current": s.adaptive == "outer" and s.amax_policy != "current",
        "ms-eden": s.rounding == "ms-eden" and not eden_ok,
        "te16 needs rht 16": s.rht_signs == "te16" and s.rht != 16,
        "0x0 needs an fp32-scaled format": s.blocks == (0, 0) and kind.fp32 != "block",
        "block must be positive": s.blocks != (0, 0) and min(br, bc) < 1,
        "outer needs nvfp4-double": s.outer is not None and kind.fp32 != "outer",
        "outer must be a multiple of the block": kind.fp32 == "outer"
        and min(br, bc) > 0
        and any(o % b for o, b in zip(s.outer_blocks, s.blocks, strict=True)),
    }
    return next((rule for rule, is_broken in broken.items() if is_broken), "")


@dataclass(frozen=True)
class Constants:
    """Section 7.1 (and 7.7): T and kappa as fp32 patterns; smax, the largest scale."""

    T: int
    kappa: int
    smax: int


def constants(s: Spec) -> Constants:
    """Of a two-level format. The exact rational is rounded once."""
    if s.rounding == "ms-eden":
        override = Fraction(988125, 1000000)
        return Constants(FP32.of(Fraction(25599, 100) * 6 / override), FP32.of(override / 6), FP32.of(448))
    assert s.kind.element is not None
    assert s.kind.scale is not None
    emax, headroom = s.kind.element.largest, Fraction(16, 17) if s.sr_headroom else Fraction(1)
    return Constants(
        FP32.of(s.bound * emax * headroom), FP32.of(1 / (emax * headroom)), FP32.of(s.kind.scale.largest)
    )
