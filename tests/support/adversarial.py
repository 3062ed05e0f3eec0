"""Inputs that reveal differences: rounding ties and their neighbours, extreme exponents, zeros, patterns."""

from collections.abc import Callable

import torch
from torch import Tensor

Shape = tuple[int, int]
E2M1_TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pick(values: Tensor, shape: Shape, seed: int) -> Tensor:
    return values[torch.randint(len(values), shape, generator=generator(seed))]


def signs(shape: Shape, seed: int) -> Tensor:
    return pick(torch.tensor([1.0, -1.0]), shape, seed + 1000)


def normal(shape: Shape, seed: int) -> Tensor:
    return torch.randn(shape, generator=generator(seed))


def ties(shape: Shape, seed: int) -> Tensor:
    """E2M1 midpoints, their fp32 neighbours, and 6: nvfp4 has multiplier 1 here."""
    middle = torch.tensor(E2M1_TIES)
    above, below = torch.nextafter(middle, torch.tensor(9.0)), torch.nextafter(middle, torch.tensor(0.0))
    values = torch.cat([middle, middle, above, below, torch.tensor([6.0, 6.0, 6.0, 0.0])])
    return pick(values, shape, seed) * signs(shape, seed)


def scale_ties(shape: Shape, seed: int) -> Tensor:
    """Rows of size m * 2^e whose maxima meet midpoints of 8-bit scales; one 2688 sets the range of nvfp4."""
    m = torch.arange(16, 33).float() / 16
    x = pick(m, (shape[0], 1), seed) * torch.exp2(pick(torch.arange(-10.0, 9.0), (shape[0], 1), seed + 1))
    x = x * pick(torch.tensor([6.0, 3.0, 1.5, 0.0, -6.0]), shape, seed + 2)
    if x.numel():
        x[0, 0] = 2688.0
    return x


def spread(shape: Shape, seed: int) -> Tensor:
    """A different exponent for every element, over 80 binades."""
    return normal(shape, seed) * torch.exp2(pick(torch.arange(-40.0, 40.0), shape, seed + 1))


def rows_apart(shape: Shape, seed: int) -> Tensor:
    """Rows of very different size: some block scales are subnormal or underflow."""
    return normal(shape, seed) * torch.exp2(pick(torch.arange(-24.0, 3.0), (shape[0], 1), seed + 1))


def tiny(shape: Shape, seed: int) -> Tensor:
    """Around the smallest normal number, where S_enc meets FMAX."""
    return normal(shape, seed) * 2e-38


def subnormal(shape: Shape, seed: int) -> Tensor:
    return normal(shape, seed) * 1e-42


def huge(shape: Shape, seed: int) -> Tensor:
    """Up to the largest finite number."""
    return (normal(shape, seed) * 2e38).clamp(-3.4028234663852886e38, 3.4028234663852886e38)


def zeros(shape: Shape, seed: int) -> Tensor:
    """Blocks of +0, of -0, and of both, and one small element."""
    x = pick(torch.tensor([0.0, -0.0]), shape, seed)
    if x.numel() > 40:
        x.view(-1)[37] = -1e-3
    return x


def patterns(shape: Shape, seed: int) -> Tensor:
    """Any finite bit pattern."""
    bits = torch.randint(0, 1 << 31, shape, generator=generator(seed), dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32) * signs(shape, seed)
    return torch.where(torch.isfinite(x), x, torch.ones_like(x))


FINITE: dict[str, Callable[[Shape, int], Tensor]] = {
    "normal": normal,
    "ties": ties,
    "scale_ties": scale_ties,
    "spread": spread,
    "rows_apart": rows_apart,
    "tiny": tiny,
    "subnormal": subnormal,
    "huge": huge,
    "zeros": zeros,
    "patterns": patterns,
}


def with_value(value: float) -> Callable[[Shape, int], Tensor]:
    """Normal numbers with a few elements replaced, one block of two or so."""

    def make(shape: Shape, seed: int) -> Tensor:
        x = normal(shape, seed)
        if x.numel():
            x.view(-1)[x.numel() // 2] = value
            x[-1, -1] = -value
        return x

    return make


NON_FINITE: dict[str, Callable[[Shape, int], Tensor]] = {
    "nan": with_value(float("nan")),
    "inf": with_value(float("inf")),
    "overflows_bf16": with_value(3.4028234663852886e38),
}
