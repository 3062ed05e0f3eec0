"""Scale rules, above all those that compare candidates by the error they leave. docs/nvfp4.md, 7.4 and 7.5.

Four Over Six (arXiv:2512.02010) maps a block's maximum to 6 or to 4; `search` visits an octave of scales up
and one down. The candidate with the least error wins, the first one in a tie.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fourbits.formats.codes import decode, encode
from fourbits.formats.descriptors import E4M3
from fourbits.formats.rounding import round_nearest
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.elements import element_of
from fourbits.quant.reference.scales import Level, divide, element_encode, of_maximum, target_and_kappa
from fourbits.quant.scale_rules import FOUR_OVER_SIX, SEARCH

#: (blocks [A, a, B, b], block_amax, level of each block, spec, axis) -> unrounded block scales, fp32 [A, B]
IdealScale = Callable[[Tensor, Tensor, Level, OperandSpec, int], Tensor]
#: block scales to compare, fp32 grids: before and after their rounding to nearest
Candidates = Sequence[tuple[Tensor, Tensor]]

_HEADROOM = 1.0625


def searched_scales(blocks: Tensor, block_amax: Tensor, level: Level, spec: OperandSpec, axis: int) -> Tensor:
    """The unrounded block scale with the least error, by spec's rule: fp32 grid.

    blocks: completed, [A, a, B, b]; block_amax: fp32 grid; level: that of each block, see `over_blocks`.
    """
    slices = element_slices(blocks, axis)

    def error(scale: Tensor) -> Tensor:
        return block_errors(row_errors(slices, scale, level, spec, axis), spec, 1 if axis == 1 else 2)

    return best_of(CANDIDATES[spec.scale_rule](block_amax, level, spec), error)


def best_of(candidates: Candidates, error: Callable[[Tensor], Tensor]) -> Tensor:
    """The ideal scale whose rounded one has the least error; the first of several with equal errors."""
    (best, scale), *others = candidates
    least = error(scale)
    for ideal, scale in others:
        found = error(scale)
        best, least = better_of(best, least, ideal, found), better_of(least, least, found, found)
    return best


def better_of(first: Tensor, first_error: Tensor, second: Tensor, second_error: Tensor) -> Tensor:
    """The second where its error is less; the first in a tie, and where an error is NaN."""
    return torch.where(second_error < first_error, second, first)


def six_and_four(block_amax: Tensor, level: Level, spec: OperandSpec) -> Candidates:
    """The scale that maps the block's maximum to 6, and the one that maps it to 4."""
    to_six = _map_to_emax(block_amax, level, spec)
    to_four = to_six * 1.5
    return (to_six, round_nearest(to_six, E4M3)), (to_four, round_nearest(to_four, E4M3))


def octaves(block_amax: Tensor, level: Level, spec: OperandSpec) -> Candidates:
    """The scale nearest to amax / emax, then seven codes up and eight down; repeats tie and never win."""
    first = round_nearest(_map_to_emax(block_amax, level, spec), E4M3)
    code = encode(first, E4M3).to(torch.int32)
    up = [(code + i).clamp_max(E4M3.max_code) for i in range(1, 8)]
    down = [(code - i).clamp_min(1) for i in range(1, 9)]
    scales = (first, *(decode(visited.to(torch.uint8), E4M3) for visited in (*up, *down)))
    return tuple((scale, scale) for scale in scales)


#: the candidates of each rule
CANDIDATES: dict[str, Callable[[Tensor, Level, OperandSpec], Candidates]] = {
    **dict.fromkeys(FOUR_OVER_SIX, six_and_four),
    **dict.fromkeys(SEARCH, octaves),
}


#: the functions of SCALE_RULES, by name
IDEAL_SCALES: dict[str, IdealScale] = {
    "max": of_maximum,
    "ceil": of_maximum,
    **dict.fromkeys((*FOUR_OVER_SIX, *SEARCH), searched_scales),
}


def row_errors(slices: Tensor, candidate: Tensor, level: Level, spec: OperandSpec, axis: int) -> Tensor:
    """Error of every row of every block under a candidate scale: [A, a, B] for axis 1, [A, B, a] for axis 0.

    slices: as from `element_slices`. Elements round to nearest whatever spec.rounding says. A power of two
    shifts everything, so that no error under- or overflows. A row is summed in the order of the contraction.
    """
    shift = _per_row(normalizer(level.amax), axis)
    level = Level(*(_per_row(part, axis) for part in level))
    scale = _per_row(candidate, axis)
    encode_ = element_encode(scale, level)
    total: Tensor | None = None
    for values in slices.unbind(1 + axis):
        magnitude = values.to(torch.float32).abs()
        element = round_nearest(magnitude * encode_, element_of(spec))
        term = _term(_reconstructed(element * scale, level, shift, spec) - magnitude * shift, spec)
        total = term if total is None else _accumulated(total, term, spec)
    assert total is not None
    return total


def block_errors(rows: Tensor, spec: OperandSpec, dim: int) -> Tensor:
    """Errors of blocks from those of their rows, along dim: the maximum, or the halving tree."""
    return rows.amax(dim) if spec.error_metric == "max" else halving_sum(rows, dim)


def halving_sum(terms: Tensor, dim: int) -> Tensor:
    """Sum along dim, the second half onto the first until one is left; zeros fill up to a power of two."""
    count = terms.shape[dim]
    missing = (1 << (count - 1).bit_length()) - count
    if missing:
        shape = [missing if i == dim else size for i, size in enumerate(terms.shape)]
        terms = torch.cat((terms, terms.new_zeros(shape)), dim)
    while terms.shape[dim] > 1:
        half = terms.shape[dim] // 2
        terms = terms.narrow(dim, 0, half) + terms.narrow(dim, half, half)
    return terms.squeeze(dim)


def element_slices(blocks: Tensor, axis: int) -> Tensor:
    """Blocks with each element of a block's row in a slice that sums can run over.

    [A, a, B, b] -> [A, a, b, B] for axis 1, copied for speed; for axis 0 [A, b, B, a] is such slices.
    """
    return blocks if axis == 0 else blocks.transpose(2, 3).contiguous()


def normalizer(amax: Tensor) -> Tensor:
    """u: the power of two that brings amax to [1, 4): 2**(127 - E) with its biased exponent E in [1, 253]."""
    exponent = (amax.view(torch.int32) >> 23).clamp(1, 253)
    return ((254 - exponent) << 23).view(torch.float32)


def _per_row(grid: Tensor, axis: int) -> Tensor:
    """A grid [A, B] (or a scalar) that broadcasts over [A, a, B] for axis 1, [A, B, a] for axis 0."""
    return grid if grid.dim() == 0 else grid.unsqueeze(axis if axis == 1 else 2)


def _reconstructed(scaled: Tensor, level: Level, shift: Tensor, spec: OperandSpec) -> Tensor:
    """The value of element * block scale, shifted."""
    if spec.fp32_scale == "pow2":
        return scaled * (level.decode * shift)
    return divide(scaled * (level.amax * shift), target_and_kappa(spec)[0])


def _term(deviation: Tensor, spec: OperandSpec) -> Tensor:
    return deviation * deviation if spec.error_metric == "mse" else deviation.abs()


def _accumulated(total: Tensor, term: Tensor, spec: OperandSpec) -> Tensor:
    return torch.maximum(total, term) if spec.error_metric == "max" else total + term


def _map_to_emax(block_amax: Tensor, level: Level, spec: OperandSpec) -> Tensor:
    """p: the scale that maps a block's maximum to the largest element, in TransformerEngine's order."""
    scale = divide(block_amax, element_of(spec).max_value) * level.encode
    return scale * _HEADROOM if spec.sr_headroom else scale
