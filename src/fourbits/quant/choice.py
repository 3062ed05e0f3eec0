"""Scale rules: which block scale is wanted, before it is rounded. docs/nvfp4.md, sections 7.1 and 7.5.

`max` maps a block's maximum to the largest element. The others try candidates and keep the one that
reconstructs the block best: Four Over Six (arXiv:2512.02010) also maps the maximum to 4, and `search` visits
an octave of scales up and one down.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fourbits.formats.codes import decode, encode
from fourbits.formats.descriptors import E4M3, FloatFormat
from fourbits.formats.rounding import round_nearest
from fourbits.quant.operand import OperandSpec
from fourbits.quant.scaling import Level, divide, element_encode, max_target, target_and_kappa

#: candidate block scales -> the error of each, all grids of one number per block
Errors = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
_HEADROOM = 1.0625


def wanted_scales(block_amax: Tensor, level: Level, spec: OperandSpec, errors: Errors) -> Tensor:
    """The unrounded block scale that spec.scale_rule chooses. block_amax: fp32 grid -> fp32 grid."""
    return _RULES[spec.scale_rule.partition("-")[0]](block_amax, level, spec, errors)


def _max(block_amax: Tensor, level: Level, spec: OperandSpec, errors: Errors) -> Tensor:
    return max_target(block_amax, level, spec)


def _four_over_six(block_amax: Tensor, level: Level, spec: OperandSpec, errors: Errors) -> Tensor:
    to_six = _map_to_emax(block_amax, level, spec)
    to_four = to_six * 1.5
    error_six, error_four = errors((round_nearest(to_six, E4M3), round_nearest(to_four, E4M3)))
    return torch.where(error_four < error_six, to_four, to_six)


def _search(block_amax: Tensor, level: Level, spec: OperandSpec, errors: Errors) -> Tensor:
    best = round_nearest(_map_to_emax(block_amax, level, spec), E4M3)
    code = encode(best, E4M3).to(torch.int32)
    (least,) = errors((best,))
    up = [(code + i).clamp_max(E4M3.max_code) for i in range(1, 8)]
    down = [(code - i).clamp_min(1) for i in range(1, 9)]  # repeats of a visited scale tie and never win
    for visited in (*up, *down):
        candidate = decode(visited.to(torch.uint8), E4M3)
        (error,) = errors((candidate,))
        better = error < least
        best, least = torch.where(better, candidate, best), torch.where(better, error, least)
    return best


_RULES: dict[str, Callable[[Tensor, Level, OperandSpec, Errors], Tensor]] = {
    "max": _max,
    "4over6": _four_over_six,
    "search": _search,
}


def block_errors(
    lanes: Tensor, candidates: tuple[Tensor, ...], level: Level, spec: OperandSpec, axis: int
) -> tuple[Tensor, ...]:
    """Error of every block's reconstruction under each of the candidate scales, in spec's metric.

    lanes: blocks, for axis 1 as from `lanes_first`; candidates and level: fp32 grids -> fp32 grids. Elements
    round to nearest whatever spec.rounding says, and everything is shifted by a power of two, so that no
    error under- or overflows.
    """
    shift = _normalizer(level.amax)
    level = Level(*(_over_rows(part, axis) for part in level))
    shift = _over_rows(shift, axis)
    grids = [_over_rows(candidate, axis) for candidate in candidates]
    encodes = [element_encode(grid, level) for grid in grids]
    totals: list[Tensor | None] = [None] * len(grids)
    for lane in lanes.unbind(1 - axis):
        magnitude = lane.to(torch.float32).abs()
        for i, (grid, encode_) in enumerate(zip(grids, encodes, strict=True)):
            element = round_nearest(magnitude * encode_, _element(spec))
            deviation = _reconstructed(element * grid, level, shift, spec) - magnitude * shift
            totals[i] = _accumulated(totals[i], deviation, spec)
    return tuple(_over_block(total, spec, 1 if axis == 1 else 2) for total in totals if total is not None)


def lanes_first(blocks: Tensor) -> Tensor:
    """A copy with each element of a row of a block in a slice of its own: [A, a, B, b] -> [b, A, a, B].

    So the sums below run over whole slices. Along axis 0, [A, b, B, a], they do so without a copy.
    """
    return blocks.permute(3, 0, 1, 2).contiguous()


def _over_rows(grid: Tensor, axis: int) -> Tensor:
    """A grid [A, B] (or a scalar) that broadcasts over the slices of `lanes_first`."""
    return grid if grid.dim() == 0 else grid.unsqueeze(axis if axis == 1 else 2)


def _normalizer(amax: Tensor) -> Tensor:
    """The power of two that brings amax to [1, 4): 2**(127 - E) with its biased exponent E in [1, 253]."""
    exponent = (amax.view(torch.int32) >> 23).clamp(1, 253)
    return ((254 - exponent) << 23).view(torch.float32)


def _reconstructed(scaled: Tensor, level: Level, shift: Tensor, spec: OperandSpec) -> Tensor:
    """The value of element * block scale, shifted."""
    if spec.fp32_scale == "pow2":
        return scaled * (level.decode * shift)
    return divide(scaled * (level.amax * shift), target_and_kappa(spec)[0])


def _accumulated(total: Tensor | None, deviation: Tensor, spec: OperandSpec) -> Tensor:
    """A row's error with one more element, in the order of the contraction."""
    term = deviation * deviation if spec.error_metric == "mse" else deviation.abs()
    if total is None:
        return term
    return torch.maximum(total, term) if spec.error_metric == "max" else total + term


def _over_block(rows: Tensor, spec: OperandSpec, dim: int) -> Tensor:
    """A block's error from those of its rows, along dim: the halving tree of section 7.4, or the maximum."""
    if spec.error_metric == "max":
        return rows.amax(dim)
    return halving_sum(rows, dim)


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


def _map_to_emax(block_amax: Tensor, level: Level, spec: OperandSpec) -> Tensor:
    """The scale that maps a block's maximum to the largest element, as TransformerEngine's 4/6 forms it."""
    scale = divide(block_amax, _element(spec).max_value) * level.encode
    return scale * _HEADROOM if spec.sr_headroom else scale


def _element(spec: OperandSpec) -> FloatFormat:
    element = spec.block_format.element
    assert element is not None
    return element
