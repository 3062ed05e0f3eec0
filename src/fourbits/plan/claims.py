"""Public claims about FP4's speed: what they refer to, and how much of them a step of a given run shows."""

from collections.abc import Callable
from dataclasses import dataclass

from fourbits.plan.gpus import GPUS


@dataclass(frozen=True, slots=True)
class Claim:
    """A claimed speedup, its source, and the fast and the slow side as (GPU, recipe)."""

    text: str
    source: str
    fast: tuple[str, str]
    slow: tuple[str, str]

    @property
    def of_peaks(self) -> float:
        """The ratio of the declared dense peaks, which is what the claim is about."""
        (fast_gpu, fast), (slow_gpu, slow) = self.fast, self.slow
        rate, base = GPUS[fast_gpu].peak(fast), GPUS[slow_gpu].peak(slow)
        assert rate is not None, f"{fast_gpu} has tensor cores for {fast}"
        assert base is not None, f"{slow_gpu} has tensor cores for {slow}"
        return rate / base


_PAPER = "arXiv:2509.25149, table 1"
_BLOG = "NVIDIA's blog on NVFP4"
CLAIMS = (
    Claim("4x of BF16 on GB200", _PAPER, ("gb200", "nvfp4"), ("gb200", "bf16")),
    Claim("6x of BF16 on GB300", _PAPER, ("gb300", "nvfp4"), ("gb300", "bf16")),
    Claim("2x of FP8 on GB200", _PAPER, ("gb200", "nvfp4"), ("gb200", "fp8")),
    Claim("3x of FP8 on GB300", _PAPER, ("gb300", "nvfp4"), ("gb300", "fp8")),
    Claim("7x of Hopper: GB300 over H100 in FP8", _BLOG, ("gb300", "nvfp4"), ("h100", "fp8")),
)


@dataclass(frozen=True, slots=True)
class ClaimInStep:
    """A claim, the ratio of peaks, and that of predicted tokens/s per GPU; None where a side does not fit."""

    claim: Claim
    of_peaks: float
    of_steps: float | None


def claims_in_step(tokens_per_second: Callable[[str, str], float | None]) -> list[ClaimInStep]:
    """Every claim. tokens_per_second: per GPU, predicted, of (GPU, recipe)."""
    found: list[ClaimInStep] = []
    for claim in CLAIMS:
        fast, slow = tokens_per_second(*claim.fast), tokens_per_second(*claim.slow)
        ratio = None if fast is None or slow is None else fast / slow
        found.append(ClaimInStep(claim, claim.of_peaks, ratio))
    return found
