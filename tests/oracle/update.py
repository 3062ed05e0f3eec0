"""The stochastic update of BF16 masters (section 18)."""

from oracle.floats import BF16, FP32, convert
from oracle.noise import update_bits


def update_bf16(z: int, seed: int, step: int, index: int, i: int, j: int) -> int:
    """Section 18: the bf16 pattern stored for the new fp32 weight z of one element of parameter `index`."""
    if not FP32.is_finite(z):
        return convert(z, FP32, BF16)
    stored = (z + update_bits(seed, step, index, i, j)) >> 16
    return stored - 1 if BF16.abs(stored) >= BF16.inf else stored
