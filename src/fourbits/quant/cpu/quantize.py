"""The public entry of quantization: from a tensor to a packed or an exact operand. docs/nvfp4.md, section 6.

Bits never depend on who computes. The reference (`quantize_reference.py`) runs eagerly on small tensors; on
larger ones the same source runs compiled, stage by stage, so that operands share what is compiled.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.formats.packing import column_words, pack_nibbles, rows_of_words
from fourbits.quant.cpu import four_over_six
from fourbits.quant.cpu.compiled import Runner, eager, runner_for, with_static_sizes
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference import ms_eden as eden
from fourbits.quant.reference import quantize as reference
from fourbits.quant.reference.blocks import block_view, completed, grid_shape, padded
from fourbits.quant.reference.hadamard import transformed
from fourbits.quant.reference.philox import as_sr_key, column_bytes, row_bytes, scale_noise, word_noise
from fourbits.quant.reference.scale_search import block_lanes, wanted_scales
from fourbits.quant.reference.scales import Scales
from fourbits.quant.scale_codes import encode_scales
from fourbits.quant.tensor import ExactOperand, QuantizedTensor


class _Job(NamedTuple):
    """One operand on its way: the checked arguments, and who runs the stages."""

    spec: OperandSpec
    axis: int
    amax: Tensor | None
    sr_key: Tensor | None
    run: Runner


@torch.no_grad()
def quantize(
    x: Tensor, spec: OperandSpec, axis: int = -1, amax: Tensor | None = None, sr_key: Tensor | None = None
) -> QuantizedTensor:
    """Codes and scales of x as a GEMM operand.

    x: 2-D fp32, bf16 or fp16; axis: the contraction axis, 0 or 1 (or -1, -2); amax: fp32 scalar to use
    instead of the tensor's own (of the transformed tensor where spec.rht is set); sr_key: int64 [5] (seed,
    stream, step, first row, first 16-element block) or [2] (seed, step), required where random bits are.
    Raises ValueError for other inputs.
    """
    job = _checked(x, spec, axis, amax, sr_key)
    ready = source_of(x, job.spec, job.axis, job.sr_key, job.run)
    shape = (x.shape[0], x.shape[1])
    if not spec.block_format.quantized:
        values = _stored(ready.to(spec.block_format.dtype), job.axis)
        return QuantizedTensor(values, _no_blocks(x), _one(x), job.axis, shape, spec)
    padding = not spec.rht and ready.shape[job.axis] != x.shape[job.axis]
    if job.run is not eager and not padding and four_over_six.takes(ready, spec, job.axis):
        made = four_over_six.chosen_codes(ready, spec, job.axis, job.amax, job.run)
        if made is not None:
            block_scale = encode_scales(made.block_scale, spec.block_format)
            return QuantizedTensor(made.codes, block_scale, made.global_scale, job.axis, shape, spec)
    codes, scales = _rounded(reference.element_codes, ready, job)
    if padding:
        codes = padded(codes[: x.shape[0], : x.shape[1]], spec, job.axis)  # 0, in poisoned blocks too
    codes = _packed(codes, job)
    if spec.block_size is None:
        return QuantizedTensor(codes, _no_blocks(x), scales.block_scale.reshape(()), job.axis, shape, spec)
    block_scale = encode_scales(_stored(scales.block_scale, job.axis), spec.block_format)
    return QuantizedTensor(codes, block_scale, _stored(scales.global_scale, job.axis), job.axis, shape, spec)


@torch.no_grad()
def exact_operand(
    x: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None = None, sr_key: Tensor | None = None
) -> ExactOperand:
    """Values ready for a GEMM, equal to those of `quantize`'s codes and scales; arguments as there."""
    job = _checked(x, spec, axis, amax, sr_key)
    ready = source_of(x, job.spec, job.axis, job.sr_key, job.run)
    if not spec.block_format.quantized:
        return ExactOperand(ready.to(spec.block_format.dtype), _one(x), job.axis, spec)
    if job.run is not eager and four_over_six.takes(ready, spec, job.axis):
        made = four_over_six.chosen_values(ready, spec, job.axis, job.amax, job.run)
        if made is not None:
            return ExactOperand(*made, job.axis, spec)
    values, scales = _rounded(reference.exact_values, ready, job)
    scale = scales.block_scale if spec.block_format.scale == "fp32" else scales.global_scale
    return ExactOperand(values, scale.reshape(()) if spec.block_size is None else scale, job.axis, spec)


def _checked(x: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None, sr_key: Tensor | None) -> _Job:
    """The arguments in their normal form. Raises ValueError for what cannot be quantized."""
    _check_types(x, spec, axis, amax)
    if x.dim() != 2:
        raise ValueError(f"quantize: x must be 2-D, got shape {list(x.shape)}. Flatten x first.")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"quantize: x must be float32, bfloat16 or float16, got {x.dtype}. Cast it first.")
    if amax is not None:
        if not spec.tensor_scaled:
            raise ValueError(
                f"quantize: {spec.format} has no scale of the whole tensor, so amax means nothing. "
                "Leave it out."
            )
        amax = amax.to(torch.float32).reshape(()).abs()
    if spec.stochastic and sr_key is None:
        raise ValueError(
            f"quantize: rounding={spec.rounding!r}, scale_rounding={spec.scale_rounding!r} needs sr_key, "
            "the seed and counter of its random bits."
        )
    key = None if sr_key is None else as_sr_key(sr_key)
    return _Job(spec, axis % 2, amax, key, runner_for(x))


def _check_types(x: object, spec: object, axis: object, amax: object) -> None:
    """What annotations say, for callers who do not check them."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        got = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"quantize: x must be a dense tensor, got {got}. Convert it first.")
    if not isinstance(spec, OperandSpec):
        raise ValueError(
            f"quantize: spec must be an OperandSpec, got {spec!r}. Write OperandSpec(format=...)."
        )
    if not isinstance(axis, int) or axis not in (-2, -1, 0, 1):
        raise ValueError(
            f"quantize: axis must be 0 or 1 (or -2, -1), the one that is summed over, got {axis!r}."
        )
    if amax is not None and not (isinstance(amax, Tensor) and amax.numel() == 1):
        got = list(amax.shape) if isinstance(amax, Tensor) else repr(amax)
        raise ValueError(
            f"quantize: amax must be a tensor of one number, got {got}. Write torch.tensor(3.0)."
        )


def source_of(x: Tensor, spec: OperandSpec, axis: int, sr_key: Tensor | None, run: Runner) -> Tensor:
    """The tensor that is quantized, in x's layout: its source, padded along axis to Cp, transformed."""
    x = padded(x.to(torch.bfloat16) if spec.source == "bf16" else x, spec, axis)
    if not spec.rht or x.numel() == 0:
        return x
    return transformed(x, spec, axis, sr_key, run)


def _rounded(stage: Callable[..., Tensor], ready: Tensor, job: _Job) -> tuple[Tensor, Scales]:
    """Every element after `stage`, in the shape of ready, and the scales of its blocks."""
    whole = completed(ready, job.spec, job.axis)
    scales = _scales(whole, job)
    noise = _noise(ready, job)
    rounded = job.run(stage)(
        _as_blocks(whole, job),
        scales.encode,
        scales.block_scale,
        None if noise is None else _as_blocks(noise, job),
        job.spec.for_elements(),
    ).reshape(whole.shape)
    return rounded if whole is ready else rounded[: ready.shape[0], : ready.shape[1]], scales


def _scales(whole: Tensor, job: _Job) -> Scales:
    """Scales of every block of a completed tensor, in its layout."""
    spec, axis, run = job.spec.for_scales(), job.axis, job.run
    words = None
    if job.spec.scale_rounding == "sr" or job.spec.rounding == "ms-eden":
        assert spec.block_size is not None
        words = run(scale_noise)(job.sr_key, spec.block_size, grid_shape(whole, spec, axis), axis)
    if spec.error_metric is not None:
        return _compared(whole, words, job)
    scales = run(reference.measured)(_as_blocks(whole, job), job.amax, words, spec, axis)
    return scales if spec.rounding != "ms-eden" else _corrected(whole, scales, words, job)


def _compared(whole: Tensor, words: Tensor | None, job: _Job) -> Scales:
    """Scales by a rule that compares the errors of candidates."""
    spec, axis, run = job.spec.for_scales(), job.axis, job.run
    lanes = _lanes(whole, job)
    if axis == 0 or not whole.numel():
        block_amax = run(reference.block_maxima)(_as_blocks(whole, job))
    else:
        block_amax = run(reference.lane_maxima)(lanes)
    wanted = wanted_scales(lanes, block_amax, job.amax, spec, axis, run)
    return run(reference.scales_of)(block_amax, job.amax, wanted, words, spec, axis)


def _corrected(whole: Tensor, scales: Scales, words: Tensor | None, job: _Job) -> Scales:
    """Scales after the correction of MS-EDEN, group by group."""
    size = job.spec.rht
    count, length = (whole.shape[0], whole.shape[1]) if job.axis == 0 else (whole.numel(), 1)
    groups = whole.reshape(count // size, size // 16, 16, length)
    cells, grid = (groups.shape[0], size // 16, length), scales.block_scale.shape
    assert words is not None
    encode = job.run(eden.in_force)(scales.encode, scales.block_scale)
    block_scale = with_static_sizes(scales.block_scale.reshape(cells), 1)
    sums = job.run(eden.products)(
        with_static_sizes(groups, 1, 2), with_static_sizes(encode.reshape(cells), 1)
    )
    whole, rounded = (with_static_sizes(part, 1) for part in sums)
    factor = job.run(eden.corrections)(whole, rounded, block_scale)[:, None].expand(cells).reshape(grid)
    return scales._replace(
        block_scale=job.run(eden.corrected)(scales.block_scale, factor, words), encode=encode
    )


def _as_blocks(whole: Tensor, job: _Job) -> Tensor:
    """The view of blocks, their size a constant of compiled code."""
    blocks = block_view(whole, job.spec, job.axis)
    return blocks if job.spec.block_size is None else with_static_sizes(blocks, 1, 3)


def _lanes(whole: Tensor, job: _Job) -> Tensor:
    """What `row_errors` sums over: slices by element of a block's row."""
    assert job.spec.block_size is not None
    if job.axis == 0:
        return _as_blocks(whole, job)
    rows, cols = job.spec.block_size
    blocks = whole.reshape(whole.shape[0] // rows, rows, whole.shape[1] // cols, cols)
    return with_static_sizes(job.run(block_lanes)(with_static_sizes(blocks, 1, 3)), 1, 2)


def _noise(ready: Tensor, job: _Job) -> Tensor | None:
    """Random bits of the elements, completed, in layout; None where none are drawn."""
    if job.spec.rounding not in ("sr", "sr32"):
        return None
    rows, units = ready.shape[1 - job.axis], ready.shape[job.axis] // 16
    if job.spec.rounding == "sr32":
        noise = job.run(word_noise)(job.sr_key, rows, units, job.axis)
    elif job.axis == 0:
        noise = job.run(column_bytes)(job.sr_key, rows, units)
    else:
        noise = job.run(row_bytes)(job.sr_key, rows, units).view(torch.uint8)
    return completed(noise.reshape(ready.shape), job.spec, job.axis)


def _packed(codes: Tensor, job: _Job) -> Tensor:
    """Codes as stored. codes: uint8, one per element, in layout."""
    element = job.spec.block_format.element
    assert element is not None
    if element.bits == 8:
        return _stored(codes, job.axis)
    if job.axis == 0:
        return rows_of_words(job.run(column_words)(codes))
    return job.run(pack_nibbles)(codes)


def _stored(x: Tensor, axis: int) -> Tensor:
    """Rows first, the contraction axis last, contiguous."""
    return (x.t() if axis == 0 else x).contiguous()


def _no_blocks(x: Tensor) -> Tensor:
    return torch.empty((0, 0), dtype=torch.float32, device=x.device)


def _one(x: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=x.device)
