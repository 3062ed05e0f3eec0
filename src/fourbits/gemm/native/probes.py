"""Small GEMMs whose results distinguish the possible rules of FP4 sums. docs/nvfp4.md, section 22.1."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from fourbits.formats.codes import encode
from fourbits.formats.descriptors import E2M1
from fourbits.formats.packing import pack_nibbles
from fourbits.quant.operand import OperandSpec
from fourbits.quant.tensor import QuantizedTensor

#: two factors, by place in the contraction or by block of 16
Pairs = dict[int, tuple[float, float]]
#: extents of the operands of a probe; all rows are equal
ROWS, LENGTH = 16, 384
#: its result with steps of 96 products differs from that with steps of 64
WIDTH_PROBE = "products 100 and 140"


class Probe(NamedTuple):
    """One row times one column. Factors that are not named are 0, scales 1."""

    name: str
    products: Pairs
    scales: Pairs
    #: the result by the rules of sm_100, in steps of 64
    expected: float


def _after_large(name: str, rest: Pairs, expected: float, sign: float = 1.0) -> Probe:
    """2^24 from the first block, then further products."""
    products = dict.fromkeys(range(16), (4.0 * sign, 4.0)) | {k: (a * sign, b) for k, (a, b) in rest.items()}
    return Probe(name, products, {0: (256.0, 256.0)}, expected)


def _between(name: str, large: tuple[float, float], small: float, step: int, expected: float) -> Probe:
    """A large product, a small one, and the negative of the large one, a step apart."""
    places = (0, step, 2 * step)
    products = dict(zip(places, ((6.0, 6.0), (0.5, 0.5), (-6.0, 6.0)), strict=True))
    scales = dict(zip((place // 16 for place in places), (large, (small, small), large), strict=True))
    return Probe(name, products, scales, expected)


def _cancelled(name: str, first: tuple[float, float], second: Pairs, expected: float) -> Probe:
    """A small product, and 64 further a block that cancels, or that is zero, under the largest scales."""
    return Probe(name, {0: first, **second}, {0: (2.0**-9, 2.0**-9), 4: (448.0, 448.0)}, expected)


_LARGE = (448.0, 448.0)
PROBES = (
    _after_large("toward zero, not to nearest", {64: (1.5, 1.0)}, 16777216.0),
    _after_large("toward zero, not down", {64: (1.5, 1.0)}, -16777216.0, sign=-1.0),
    _after_large("a difference is exact", {64: (-0.5, 0.5)}, 16777215.0),
    _after_large("64 products are one sum", {64: (1.0, 1.0), 80: (1.0, 1.0)}, 16777218.0),
    _after_large("128 products are two sums", {128: (1.0, 1.0), 192: (1.0, 1.0)}, 16777216.0),
    _after_large(WIDTH_PROBE, {100: (1.0, 1.0), 140: (1.0, 1.0)}, 16777216.0),
    _between("products of one sum cancel exactly", _LARGE, 2.0**-6, 16, 2.0**-14),
    _between("those of different sums do not", _LARGE, 2.0**-6, 64, 0.0),
    _between("36 bits below the largest are truncated", (256.0, 256.0), 2.0**-9, 16, 0.0),
    _between("35 bits are kept", (128.0, 256.0), 2.0**-9, 16, 2.0**-20),
    _cancelled("a block that cancels keeps its exponent", (0.5, 0.5), {64: (6.0, 6.0), 65: (-6.0, 6.0)}, 0.0),
    _cancelled("and truncates", (1.0, 0.5), {64: (6.0, 6.0), 65: (-6.0, 6.0)}, 2.0**-19),
    _cancelled("a block of zero products has none", (0.5, 0.5), {64: (6.0, 0.0)}, 2.0**-20),
)


def operands(probe: Probe, device: torch.device) -> tuple[QuantizedTensor, QuantizedTensor]:
    """The row and the column of a probe, each repeated: nvfp4 [16, 384] with global scale 1."""
    a, b = (_operand(values, scales, device) for values, scales in _rows(probe))
    return a, b


def _rows(probe: Probe) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for side in range(2):
        values = torch.zeros(ROWS, LENGTH, dtype=torch.float32, device="cpu")
        scales = torch.ones(ROWS, LENGTH // 16, dtype=torch.float32, device="cpu")
        for place, pair in probe.products.items():
            values[:, place] = pair[side]
        for block, pair in probe.scales.items():
            scales[:, block] = pair[side]
        yield values, scales


def _operand(values: torch.Tensor, scales: torch.Tensor, device: torch.device) -> QuantizedTensor:
    return from_codes(encode(values, E2M1), scales.to(torch.float8_e4m3fn), device)


def random_operand(rows: int, length: int, seed: int, device: torch.device) -> QuantizedTensor:
    """Uniform codes under scales from 2^-5 to 2^6: sums of them show how they were rounded."""
    generator = torch.Generator("cpu").manual_seed(seed)
    codes = torch.randint(0, 16, (rows, length), generator=generator, dtype=torch.uint8, device="cpu")
    octaves = torch.randint(-5, 7, (rows, length // 16), generator=generator, dtype=torch.int32, device="cpu")
    return from_codes(codes, torch.exp2(octaves.to(torch.float32)).to(torch.float8_e4m3fn), device)


def from_codes(codes: torch.Tensor, scales: torch.Tensor, device: torch.device) -> QuantizedTensor:
    """nvfp4 in blocks of 1x16 from codes [R, C] and E4M3 scales [R, C / 16], with global scale 1."""
    one = torch.ones((), dtype=torch.float32, device=device)
    shape = (codes.shape[0], codes.shape[1])
    return QuantizedTensor(pack_nibbles(codes).to(device), scales.to(device), one, 1, shape, OperandSpec())
