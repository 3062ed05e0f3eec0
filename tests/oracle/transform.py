"""The random Hadamard transform (section 9), butterfly by butterfly."""

from oracle.floats import FP32, to_bf16
from oracle.noise import SIGN_WORD, Key, philox

ROOT = {4: 0x3F000000, 8: 0x3EB504F3, 16: 0x3E800000, 32: 0x3E3504F3, 64: 0x3E000000, 128: 0x3DB504F3}
TE16 = {3, 5, 6, 7, 8, 9, 10, 12, 14, 15}


def negative(words: tuple[int, ...], n: int) -> list[bool]:
    return [bool(words[i // 32] >> (i % 32) & 1) for i in range(n)]


def signs(rule: str, n: int, key: Key | None) -> list[bool]:
    """For each position of a group of n whether its sign is -1. An empty rule is the default of the size."""
    rule = rule or ("te16" if n == 16 else "fixed:0")
    if rule == "none":
        return [False] * n
    if rule == "te16":
        if n != 16:
            raise ValueError(f"te16 is for n = 16, not {n}")
        return [i in TE16 for i in range(n)]
    if rule.startswith("fixed:"):
        return negative(philox((0, 0, 0, SIGN_WORD), (int(rule.removeprefix("fixed:")), 7)), n)
    if key is None:
        raise ValueError(f"{rule} signs need a key")
    counter = {"per-layer": (0, key.gemm, 0, SIGN_WORD), "per-call": (key.step, key.gemm, 1, SIGN_WORD)}[rule]
    return negative(philox(counter, (key.seed, key.sign_stream)), n)


def rotate(group: list[int], minus: list[bool]) -> list[int]:
    """One group of n: BF16, signs, butterflies h = 1, 2, .. n/2, the factor n^-1/2, BF16."""
    n = len(group)
    z = [FP32.neg(to_bf16(y)) if flip else to_bf16(y) for y, flip in zip(group, minus, strict=True)]
    h = 1
    while h < n:
        for i in range(n):
            if i & h == 0:
                z[i], z[i + h] = FP32.add(z[i], z[i + h]), FP32.sub(z[i], z[i + h])
        h *= 2
    return [to_bf16(FP32.mul(value, ROOT[n])) for value in z]


def rht(row: list[int], minus: list[bool]) -> list[int]:
    """All groups of one row of the padded stored matrix."""
    n = len(minus)
    return [value for start in range(0, len(row), n) for value in rotate(row[start : start + n], minus)]
