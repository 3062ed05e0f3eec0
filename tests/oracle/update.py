"""The stochastic update of BF16 masters (section 18)."""

from oracle.floats import BF16, FP32, convert
from oracle.noise import update_bits


def rounded_update(z: int, r: int) -> int:
    """The bf16 pattern stored for the new fp32 weight z with 16 random bits r."""
    if not FP32.is_finite(z):
        return convert(z, FP32, BF16)
    stored = (z + r) >> 16
    return stored - 1 if BF16.abs(stored) >= BF16.inf else stored


def update_bf16(z: int, seed: int, step: int, index: int, i: int, j: int) -> int:
    """The same for element (i, j) of parameter number `index`, whose bits come from its place."""
    return rounded_update(z, update_bits(seed, step, index, i, j))
