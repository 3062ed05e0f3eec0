"""Block formats and scale rules from outside: checked, tried out, and added to the tables of shipped ones.

A registration applies to the process. What a function returns is checked at every call. docs/extending.md.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fourbits.formats.descriptors import BLOCK_FORMATS, BlockFormat, add_block_format, remove_block_format
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference import quantize as reference
from fourbits.quant.reference.blocks import in_layout
from fourbits.quant.reference.scale_search import IDEAL_SCALES, IdealScale
from fourbits.quant.reference.scales import Derived, Level
from fourbits.quant.scale_hierarchy import SCALE_HIERARCHIES, Levels, ScaleHierarchy
from fourbits.quant.scale_rules import SCALE_RULES, ScaleRule, add_scale_rule, remove_scale_rule
from fourbits.quant.tensor import unpacked

#: name -> its registration, so that registering the same again changes nothing
_given: dict[tuple[str, str], object] = {}


def register_block_format(block_format: BlockFormat, scales: ScaleHierarchy | None = None) -> None:
    """Register a block format for OperandSpec, recipes and everything that quantizes, in this process.

    scales: the hierarchy that block_format.scale names, if no format has it yet. The format is tried out on
    a small tensor. Raises ValueError for a name that is taken, a format that cannot be stored or that its
    functions contradict; then nothing is registered.
    """
    name = block_format.name
    if _is_repeated("block format", name, (block_format, scales), BLOCK_FORMATS):
        return
    if scales is not None and not _is_repeated("scale hierarchy", scales.name, scales, SCALE_HIERARCHIES):
        SCALE_HIERARCHIES[scales.name] = _checked_hierarchy(scales, block_format)
        try:
            _add_block_format(block_format)
        except ValueError:
            del SCALE_HIERARCHIES[scales.name]
            raise
        _given["scale hierarchy", scales.name] = scales
    else:
        _add_block_format(block_format)
    _given["block format", name] = (block_format, scales)


def register_scale_rule(rule: ScaleRule, ideal: IdealScale) -> None:
    """Register a scale rule for OperandSpec, recipes and everything that quantizes, in this process.

    ideal: (blocks, block_amax, level, spec, axis) -> the block scales to be rounded, fp32 [A, B], for blocks
    [A, a, B, b] with largest magnitudes block_amax [A, B] (NaN or Inf where a block has one, whose scale will
    be NaN). Raises ValueError for a name that is taken, for a rule that serves no format, and for a function
    that returns something else.
    """
    if _is_repeated("scale rule", rule.name, (rule, ideal), SCALE_RULES):
        return
    able = [name for name, scales in SCALE_HIERARCHIES.items() if scales.reads_ideal]
    if rule.scales is None or not set(rule.scales) <= set(able):
        raise ValueError(
            f"scale rule {rule.name!r}: scales must be some of {', '.join(able)}, got {rule.scales}. Other "
            "scales follow from the maxima of blocks, or are not registered."
        )
    served = [fmt.name for fmt in BLOCK_FORMATS.values() if rule.serves(fmt)]
    if not served:
        raise ValueError(
            f"scale rule {rule.name!r}: no format has {rule.needs}. Change scales, or register such a format "
            "first."
        )
    add_scale_rule(rule)
    IDEAL_SCALES[rule.name] = _checked_ideal(rule.name, ideal)
    try:
        for axis in (0, 1):
            spec = OperandSpec(format=served[0], scale_rule=rule.name)
            reference.quantize(_trial(spec), spec, axis, None, None)
    except Exception:
        remove_scale_rule(rule.name)
        del IDEAL_SCALES[rule.name]
        raise
    _given["scale rule", rule.name] = (rule, ideal)


def _is_repeated(what: str, name: str, given: object, known: object) -> bool:
    """Whether exactly this is registered already. Raises ValueError for a name that is taken."""
    if not name:
        raise ValueError(f"{what}: its name must not be empty. Choose one.")
    if (what, name) in _given and _given[what, name] == given:
        return True
    if name in known:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(
            f"{what} {name!r}: the name is already taken, and cached quantizers or compiled code may use it. "
            "Choose another name."
        )
    return False


def _add_block_format(block_format: BlockFormat) -> None:
    if message := _problem(block_format):
        raise ValueError(f"block format {block_format.name!r}: {message}")
    add_block_format(block_format)
    try:
        _try_out(block_format)
    except Exception:
        remove_block_format(block_format.name)
        raise


def _problem(fmt: BlockFormat) -> str | None:
    """Why a descriptor cannot be stored or computed, or None."""
    if fmt.element is None or fmt.element.bits not in (4, 8):
        bits = "none" if fmt.element is None else f"{fmt.element.bits} bits"
        return (
            f"element must have 4 or 8 bits, two or one to a byte, got {bits}. Pass an element format of "
            "that size."
        )
    if fmt.scale not in SCALE_HIERARCHIES:
        return (
            f"no scale hierarchy is called {fmt.scale!r}. Known: {', '.join(SCALE_HIERARCHIES)}. Pass one of "
            "that name as scales."
        )
    if fmt.block is None or min(fmt.block) < 1:
        return (
            f"block must be (other axis, contraction axis), both at least 1, got {fmt.block}. Pass one such "
            "as (1, 16)."
        )
    if fmt.scale_in_epilogue and (fmt.has_global_scale or fmt.outer_block):
        return (
            "block scales in the GEMM's epilogue are its only scales, got has_global_scale or outer_block "
            "beside them. Fold the tensor's scale into the block scales."
        )
    return None


def _trial(spec: OperandSpec) -> Tensor:
    """A tensor with incomplete blocks and groups, many binades, a block row of zeros, and a NaN."""
    groups = (spec.block_format.scale_groups or ((1, 1),))[-1]
    assert spec.block_size is not None
    rows, columns = (2 * size * group + 3 for size, group in zip(spec.block_size, groups, strict=True))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows + columns, rows + columns, generator=generator, dtype=torch.float32, device="cpu")
    exponents = torch.randint(
        -12, 12, (rows + columns, 1), generator=generator, dtype=torch.int64, device="cpu"
    )
    x *= torch.exp2(exponents.to(torch.float32))
    x[: spec.block_size[0]] = 0.0
    x[-1, -1] = torch.nan
    return x


def _try_out(fmt: BlockFormat) -> None:
    """Raises ValueError if values of a small tensor are not exact, or its stored scales not those derived."""
    spec = OperandSpec(format=fmt.name)
    for axis in (0, 1):
        x = _trial(spec)
        amax = x.nan_to_num().abs().amax() if spec.tensor_scaled else None  # so that one block has the NaN
        packed = reference.quantize(x, spec, axis, amax, None)
        derived, stored = reference.exact_operand(x, spec, axis, amax, None), unpacked(packed)
        shape = x.shape[1 - axis], x.shape[axis]  # beyond it is padding, whose values do not count
        pairs = [(derived.values, stored.values[: shape[0], : shape[1]])]
        if fmt.scale_in_epilogue:
            pairs = [(derived.scale, stored.scale), *pairs]
        elif not _same(packed.block_values(), stored.values):
            raise ValueError(
                f"block format {fmt.name!r}: an element times its block scale must have at most the 8 "
                "significant bits of BF16. Use scales with fewer bits, or scale_in_epilogue=True."
            )
        for computed, read in pairs:
            computed = computed.t() if axis == 0 else computed
            if not _same(computed[: read.shape[0], : read.shape[1]], read):
                raise ValueError(
                    f"scale hierarchy {fmt.scale!r}: decode(encode(levels)) must give the levels back, NaN "
                    f"included, and does not along axis {axis}. Store every level exactly; shape shared "
                    "levels by in_layout(group, axis)."
                )


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have equal values, NaN where the other has NaN."""
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _checked_ideal(name: str, ideal: IdealScale) -> IdealScale:
    def checked(blocks: Tensor, block_amax: Tensor, level: Level, spec: OperandSpec, axis: int) -> Tensor:
        found = ideal(blocks, block_amax, level, spec, axis)
        _check_grid(
            found, tuple(block_amax.shape), f"scale rule {name!r}: its function", "one scale per block"
        )
        return found

    return checked


def _checked_hierarchy(scales: ScaleHierarchy, fmt: BlockFormat) -> ScaleHierarchy:
    """The hierarchy with functions that check what they return."""
    subject = f"scale hierarchy {scales.name!r}: "
    count = 1 + len(fmt.scale_groups)
    if fmt.scale != scales.name:
        raise ValueError(f"{subject}block format {fmt.name!r} has scale={fmt.scale!r}. Give both one name.")
    if len(scales.of_zeros) != count:
        raise ValueError(
            f"{subject}of_zeros must have a number for each of the {count} levels, got "
            f"{scales.of_zeros}. Pass as many numbers."
        )
    if scales.dtype == torch.float8_e8m0fnu:
        raise ValueError(f"{subject}dtype must be one that torch.compile supports. Store bytes, torch.uint8.")

    def derive(
        block_amax: Tensor, ideal: Tensor, level: Level, words: Tensor | None, spec: OperandSpec, axis: int
    ) -> Derived:
        levels, encode = scales.derive(block_amax, ideal, level, words, spec, axis)
        groups = ((1, 1), *spec.block_format.scale_groups)
        if len(levels) != len(groups):
            raise ValueError(
                f"{subject}derive must return {len(groups)} levels, got {len(levels)}. Return one grid "
                "per scale of the format."
            )
        for number, (found, group) in enumerate(zip(levels, groups, strict=True)):
            size = in_layout(group, axis) or group
            shape = tuple(-(-n // step) for n, step in zip(block_amax.shape, size, strict=True))
            _check_grid(found, shape, f"{subject}derive", f"level {number} with a number per {group} blocks")
        _check_grid(encode, tuple(block_amax.shape), f"{subject}derive", "one encode factor per block")
        return levels, encode

    def encode(levels: Levels) -> Tensor:
        stored, shape = scales.encode(levels), scales.stored_shape(*levels[0].shape)
        _check_grid(stored, shape, f"{subject}encode", "what stored_shape and dtype say", scales.dtype)
        return stored

    return replace(scales, derive=derive, encode=encode)


def _check_grid(
    found: Tensor, shape: tuple[int, ...], subject: str, what: str, dtype: torch.dtype = torch.float32
) -> None:
    if tuple(found.shape) != tuple(shape) or found.dtype != dtype:
        raise ValueError(
            f"{subject} must return {what}, {dtype} {list(shape)}, got {found.dtype} {list(found.shape)}. "
            "Blocks [A, a, B, b] are reduced over dimensions 1 and 3; shared levels have ceil(n / group) "
            "rows and columns."
        )
