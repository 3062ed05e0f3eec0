"""The measurements of `fourbits bench calibrate` in a file, and the rates that a plan takes from them."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fourbits.plan.gpus import GPUS, MAX_GPUS, Gpu
from fourbits.plan.rates import DECLARED, Rates, copy_rate, shape_efficiency, with_measured
from fourbits.settings import build, to_dict

FORM = "fourbits-calibration 1"
#: a measured rate may exceed what bounds it by this factor (caches); beyond, the file is taken for wrong
_MOST = 1.5
#: what a measured GEMM ran on: tensor cores of a format, or those of BF16 for 4-bit operands
GemmUnit = Literal["bf16", "fp8", "nvfp4", "emulated"]
#: bytes or FLOPs per second, and seconds of a GEMM, that a machine can have
_RATES, _SECONDS = (1e3, 1e18), (1e-9, 1e5)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTime:
    """A measured GEMM [m, k] x [k, n]. unit: bf16, fp8, nvfp4, or emulated (4-bit operands in BF16)."""

    unit: GemmUnit
    m: int
    n: int
    k: int
    seconds: float

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            _require(name, getattr(self, name), 1, 1 << 40)
        _require("seconds", self.seconds, *_SECONDS)

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return 2.0 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A machine's rates. Bytes and FLOPs per second; None where it could not be measured.

    device: as the driver names it; quantize, quantize_stochastic: of moved bytes; link: sent per rank in an
    all-gather over `ranks` ranks.
    """

    form: str = FORM
    device: str
    torch: str
    fourbits: str
    copy: float
    gemms: tuple[GemmTime, ...] = ()
    quantize: float | None = None
    quantize_stochastic: float | None = None
    attention: float | None = None
    scan: float | None = None
    link: float | None = None
    ranks: int = 1
    #: what could not be measured, and why
    missing: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.form != FORM:
            raise ValueError(f"calibration: form must be {FORM!r}, got {self.form!r}. Measure again.")
        for name in ("copy", "quantize", "quantize_stochastic", "attention", "scan", "link"):
            rate: float | None = getattr(self, name)
            if rate is not None:
                _require(name, rate, *_RATES)
        _require("ranks", self.ranks, 1, MAX_GPUS)


def _require(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(
            f"{name} must be from {low:g} to {high:g}, got {value}. Measure again with "
            "`fourbits bench calibrate`."
        )


def load_calibration(path: Path) -> Calibration:
    """Read a file. Raises ValueError for one that is no calibration, and OSError."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"calibration: {path} is not JSON. Pass a file of bench calibrate.") from error
    if not isinstance(found, Mapping):
        raise ValueError(
            f"calibration: {path} must hold an object, got a {type(found).__name__}. Pass a file of "
            "bench calibrate."
        )
    return build(Calibration, found, str(path))


def to_json(calibration: Calibration) -> str:
    """The text of the file."""
    return json.dumps(to_dict(calibration), indent=2) + "\n"


def gpu_of(calibration: Calibration) -> Gpu:
    """The GPU of the table that was measured. Raises ValueError if it is not there."""
    found = next((gpu for gpu in GPUS.values() if gpu.device == calibration.device), None)
    if found is None:
        known = ", ".join(gpu.device for gpu in GPUS.values())
        raise ValueError(
            f"calibration: device must be one of {known}, got {calibration.device!r}. Measure one of these, "
            "or plan without a calibration."
        )
    return found


def how_to_use(calibration: Calibration, path: Path) -> str:
    """A line about a file that was written: the command that uses it, or why none does."""
    try:
        gpu = gpu_of(calibration)
    except ValueError:
        return (
            f"{path}: rates of {calibration.device}. Plans have no data sheet of it, so `fourbits plan` "
            "cannot use them"
        )
    return f"{path}: use it as in `fourbits plan CONFIG --gpu {gpu.name} --calibration {path}`"


def calibrated(calibration: Calibration, gpu: Gpu) -> Rates:
    """DECLARED, with the measured rates replaced. Raises ValueError if another GPU was measured."""
    if gpu_of(calibration) is not gpu:
        raise ValueError(
            f"calibration: was measured on {gpu_of(calibration).name}, and the plan is for {gpu.name}. Plan "
            "for the former, or omit the calibration."
        )
    measured: dict[str, object] = {**_shares(calibration, gpu)}
    shares = _gemm_shares(calibration, gpu, with_measured(DECLARED, "measured", copy=measured["copy"]))
    if shares:
        measured["gemm_of"] = tuple(shares.items())
    return with_measured(DECLARED, f"measured on one {calibration.device}", **measured)


def _shares(calibration: Calibration, gpu: Gpu) -> dict[str, float]:
    """What was measured, but for GEMMs, as shares of what bounds it. Raises ValueError for more than that."""
    bounds = {
        "copy": gpu.bandwidth,
        "quantize": calibration.copy,
        "quantize_stochastic": calibration.copy,
        "attention": gpu.bf16_peak,
        "scan": gpu.bf16_peak,
        **({"link": gpu.link} if calibration.ranks <= gpu.domain else {}),
    }
    found = {name: getattr(calibration, name) for name in bounds}
    for name, rate in found.items():
        most = _MOST * bounds[name]
        if rate is not None and rate > most:
            raise ValueError(
                f"calibration: {name} must be at most {most:.3g} per second on {gpu.name}, got {rate:.3g}. "
                "Measure again with `fourbits bench calibrate`."
            )
    return {name: rate / bounds[name] for name, rate in found.items() if rate is not None}


def _gemm_shares(calibration: Calibration, gpu: Gpu, rates: Rates) -> dict[str, float]:
    """The share of a unit's peak that a full GEMM reaches: the median over shapes bound by arithmetic."""
    shares: dict[str, list[float]] = {}
    for gemm in calibration.gemms:
        peak = gpu.peak("bf16" if gemm.unit == "emulated" else gemm.unit)
        if peak is None or _bound_by_bytes(gemm, gpu, rates):
            continue
        full = gemm.rate / (peak * shape_efficiency(gpu, gemm.m, gemm.n, gemm.k))
        shares.setdefault(gemm.unit, []).append(min(full, 1.0))
    return {unit: statistics.median(found) for unit, found in shares.items()}


def _bound_by_bytes(gemm: GemmTime, gpu: Gpu, rates: Rates) -> bool:
    moved = 2.0 * (gemm.m * gemm.k + gemm.n * gemm.k + gemm.m * gemm.n)
    return moved / copy_rate(gpu, rates) > 0.7 * gemm.seconds
