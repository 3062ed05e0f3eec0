"""Scale rules that compare candidates by the error they leave. docs/nvfp4.md, sections 7.4 and 7.5.

Four Over Six (arXiv:2512.02010) maps a block's maximum to 6 or to 4; `search` visits an octave of scales up
and one down. A rule asks for the errors of candidates and answers with the scale it wants, before rounding.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.formats.codes import decode, encode
from fourbits.formats.descriptors import E4M3, FloatFormat
from fourbits.formats.rounding import round_nearest
from fourbits.quant.cpu.compiled import Runner, with_static_sizes
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.scales import Level, divide, element_encode, level_of, target_and_kappa

_HEADROOM = 1.0625


class _Comparison(NamedTuple):
    """What the candidates of a tensor's blocks are compared on."""

    #: the elements, as `row_errors` reads them
    lanes: Tensor
    block_amax: Tensor
    level: Level
    spec: OperandSpec
    axis: int
    run: Runner

    def error(self, candidate: Tensor) -> Tensor:
        """The error of every block under a candidate scale; fp32 grids."""
        rows = self.run(row_errors)(self.lanes, candidate, self.level, self.spec, self.axis)
        dim = 1 if self.axis == 1 else 2
        if rows.shape[dim] == 1:
            return rows.squeeze(dim)
        return self.run(over_rows)(with_static_sizes(rows, dim), self.spec, dim)


def wanted_scales(
    lanes: Tensor, block_amax: Tensor, amax: Tensor | None, spec: OperandSpec, axis: int, run: Runner
) -> Tensor:
    """The unrounded block scale that spec's rule chooses: fp32 grid.

    lanes: blocks [A, b, B, a] along axis 0, for axis 1 as from `block_lanes`; block_amax: fp32 grid in
    layout; amax: fp32 scalar, None for the tensor's own; run: what runs the stages.
    """
    level = Level(*run(level_grids)(block_amax, amax, spec, axis))
    rule = _four_over_six if spec.scale_rule.startswith("4over6") else _search
    return rule(_Comparison(lanes, block_amax, level, spec, axis, run))


def _four_over_six(comparison: _Comparison) -> Tensor:
    to_six, six, four = comparison.run(six_and_four)(comparison.block_amax, comparison.level, comparison.spec)
    return comparison.run(better_of)(to_six, comparison.error(six), comparison.error(four))


def _search(comparison: _Comparison) -> Tensor:
    best, *others = search_candidates(comparison.block_amax, comparison.level, comparison.spec)
    least = comparison.error(best)
    for candidate in others:
        error = comparison.error(candidate)
        better = error < least
        best, least = torch.where(better, candidate, best), torch.where(better, error, least)
    return best


def level_grids(
    block_amax: Tensor, amax: Tensor | None, spec: OperandSpec, axis: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of the Level of every block."""
    level, _ = level_of(block_amax, amax, spec, axis)
    return level.amax, level.encode, level.decode


def six_and_four(block_amax: Tensor, level: Level, spec: OperandSpec) -> tuple[Tensor, Tensor, Tensor]:
    """The scale that maps block maxima to 6 as wanted and as rounded, and the rounded one that maps to 4."""
    to_six = _map_to_emax(block_amax, level, spec)
    return to_six, round_nearest(to_six, E4M3), round_nearest(to_six * 1.5, E4M3)


def better_of(to_six: Tensor, error_six: Tensor, error_four: Tensor) -> Tensor:
    """The wanted scale of the mapping with the smaller error; 6 in a tie."""
    return torch.where(error_four < error_six, to_six * 1.5, to_six)


def search_candidates(block_amax: Tensor, level: Level, spec: OperandSpec) -> tuple[Tensor, ...]:
    """The scale next to amax / emax, then seven codes up and eight down; repeats tie and never win."""
    first = round_nearest(_map_to_emax(block_amax, level, spec), E4M3)
    code = encode(first, E4M3).to(torch.int32)
    up = [(code + i).clamp_max(E4M3.max_code) for i in range(1, 8)]
    down = [(code - i).clamp_min(1) for i in range(1, 9)]
    return first, *(decode(visited.to(torch.uint8), E4M3) for visited in (*up, *down))


def row_errors(lanes: Tensor, candidate: Tensor, level: Level, spec: OperandSpec, axis: int) -> Tensor:
    """Error of every row of every block under a candidate scale: [A, a, B] for axis 1, [A, B, a] for axis 0.

    Elements round to nearest whatever spec.rounding says; everything is shifted by a power of two, so that no
    error under- or overflows. A row is summed in the order of the contraction.
    """
    shift = _over_lanes(normalizer(level.amax), axis)
    level = Level(*(_over_lanes(part, axis) for part in level))
    scale = _over_lanes(candidate, axis)
    encode_ = element_encode(scale, level)
    total: Tensor | None = None
    for lane in lanes.unbind(1 + axis):
        magnitude = lane.to(torch.float32).abs()
        element = round_nearest(magnitude * encode_, _element(spec))
        term = _term(_reconstructed(element * scale, level, shift, spec) - magnitude * shift, spec)
        total = term if total is None else _joined(total, term, spec)
    assert total is not None
    return total


def over_rows(rows: Tensor, spec: OperandSpec, dim: int) -> Tensor:
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


def block_lanes(blocks: Tensor) -> Tensor:
    """A copy with each element of a row of a block in a slice of its own: [A, a, B, b] -> [A, a, b, B].

    So sums run over whole slices. Along axis 0, [A, b, B, a], they do so without a copy.
    """
    return blocks.transpose(2, 3).contiguous()


def _over_lanes(grid: Tensor, axis: int) -> Tensor:
    """A grid [A, B] (or a scalar) that broadcasts over [A, a, B] for axis 1, [A, B, a] for axis 0."""
    return grid if grid.dim() == 0 else grid.unsqueeze(axis if axis == 1 else 2)


def normalizer(amax: Tensor) -> Tensor:
    """u: the power of two that brings amax to [1, 4): 2**(127 - E) with its biased exponent E in [1, 253]."""
    exponent = (amax.view(torch.int32) >> 23).clamp(1, 253)
    return ((254 - exponent) << 23).view(torch.float32)


def _reconstructed(scaled: Tensor, level: Level, shift: Tensor, spec: OperandSpec) -> Tensor:
    """The value of element * block scale, shifted."""
    if spec.fp32_scale == "pow2":
        return scaled * (level.decode * shift)
    return divide(scaled * (level.amax * shift), target_and_kappa(spec)[0])


def _term(deviation: Tensor, spec: OperandSpec) -> Tensor:
    return deviation * deviation if spec.error_metric == "mse" else deviation.abs()


def _joined(total: Tensor, term: Tensor, spec: OperandSpec) -> Tensor:
    return torch.maximum(total, term) if spec.error_metric == "max" else total + term


def _map_to_emax(block_amax: Tensor, level: Level, spec: OperandSpec) -> Tensor:
    """The scale that maps a block's maximum to the largest element, as TransformerEngine's 4/6 forms it."""
    scale = divide(block_amax, _element(spec).max_value) * level.encode
    return scale * _HEADROOM if spec.sr_headroom else scale


def _element(spec: OperandSpec) -> FloatFormat:
    element = spec.block_format.element
    assert element is not None
    return element
