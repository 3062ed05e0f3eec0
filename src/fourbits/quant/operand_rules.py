"""The rules that an OperandSpec must satisfy; all other combinations are valid. docs/nvfp4.md, section 3.3.

Every rule runs whenever a spec is built. `operand.py` imports this file, so the specs here are `Any`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from fourbits.formats.descriptors import BLOCK_FORMATS
from fourbits.quant.correction import unknown_correction
from fourbits.quant.scale_rules import SCALE_RULES
from fourbits.settings import nearest

RHT_SIZES = (0, 4, 8, 16, 32, 64, 128)
_SIGN_RULES = ("", "te16", "per-layer", "per-call", "none")
#: maximum length of an amax history, in steps
MAX_HISTORY = 1 << 16
_SMALL_FLOAT_SCALES = ("e4m3", "ue5m3")
SPANS = (0, 64, 128, 256, 512, 1024, 2048, 4096)
_WHOLE_NUMBERS = (
    *("rht", "scale_bound", "amax_interval", "amax_history", "adaptive_interval"),
    *("error_feedback", "feedback_interval"),
)
_TEXTS = ("format", "rht_signs", "scale_rule", "correction")
_FLAGS = ("sr_headroom", "te_compat")


def problem(spec: Any, choices: Mapping[str, tuple[str, ...]]) -> str | None:
    """The first rule that an OperandSpec breaks: field, rule, value, remedy. None for a valid spec.

    choices: the allowed values by field.
    """
    if message := _types(spec) or _names(spec) or _choices(spec, choices):
        return message
    for rule in _RULES:
        if message := rule(spec):
            return message
    return None


def _types(spec: Any) -> str | None:
    """Checks types: settings from a recipe file are checked already, those of a Python caller are not."""
    for names, kind, words in (
        (_WHOLE_NUMBERS, int, "a whole number"),
        (_TEXTS, str, "text"),
        (_FLAGS, bool, "True or False"),
    ):
        for name in names:
            if type(getattr(spec, name)) is not kind:
                return f"{name}: must be {words}, got {getattr(spec, name)!r}. Pass one."
    for name in ("block", "outer"):
        size: object = getattr(spec, name)
        pair = isinstance(size, tuple) and [type(part) for part in size] == [int, int]
        if size is not None and not pair:
            return (
                f"{name}: must be a tuple (other axis, contraction axis) of whole numbers, got {size!r}. "
                "Write it as in (1, 16) or (16, 16)."
            )
    if type(spec.amax_headroom) not in (int, float):
        return f"amax_headroom: must be a number, got {spec.amax_headroom!r}. Pass one, such as 1.0."
    return None


def _names(spec: Any) -> str | None:
    """Whether the names that users can register are known in this process."""
    for field, what, known in (
        ("format", "block format", BLOCK_FORMATS),
        ("scale_rule", "scale rule", SCALE_RULES),
    ):
        name = getattr(spec, field)
        if name not in known:
            return (
                f"{field}: no {what} is called {name!r}.{nearest(name, list(known))} Known: "
                f"{', '.join(known)}. If it is your own, call fourbits.register_{what.replace(' ', '_')} "
                "first, in every process."
            )
    return None


def _choices(spec: Any, choices: Mapping[str, tuple[str, ...]]) -> str | None:
    for field, allowed in choices.items():
        if getattr(spec, field) not in allowed:
            return (
                f"{field}: must be one of {', '.join(allowed)}, got {getattr(spec, field)!r}. Pass one of "
                "these."
            )
    return None


def _block(spec: Any) -> str | None:
    if spec.block is None or not spec.block_format.quantized:
        return None
    if spec.block == (0, 0):
        if spec.block_format.scale == "fp32":
            return None
        return (
            f"block: (0, 0) needs fp32 scales (fp8, fp8-e5m2, int8), got format {spec.format}. Set block to "
            "null for the format's own."
        )
    if min(spec.block) < 1:
        return (
            f"block: both sizes must be at least 1, got {spec.block}. Pass (1, 16), or null for the "
            "format's own."
        )
    return None


def _outer(spec: Any) -> str | None:
    if not spec.block_format.outer_block:
        if spec.outer is None:
            return None
        return f"outer: only nvfp4-double has outer blocks, got {spec.outer} for {spec.format}. Remove it."
    outer, block = spec.outer_size, spec.block_size
    assert outer is not None
    assert block is not None
    if min(outer) < 1 or outer[0] % block[0] or outer[1] % block[1]:
        return (
            f"outer: must be a multiple of the block {block} in both directions, got {outer}. Enlarge "
            "outer, or reduce block."
        )
    return None


def _transform(spec: Any) -> str | None:
    if spec.rht not in RHT_SIZES:
        return f"rht: must be one of {RHT_SIZES}, got {spec.rht}. Pass 0 for no transform."
    if spec.rht_signs == "te16" and spec.rht != 16:
        return (
            f"rht_signs: te16 is a vector of 16 signs and needs rht=16, got rht={spec.rht}. Use fixed:SEED."
        )
    kind, _, seed = spec.rht_signs.partition(":")
    if spec.rht_signs in _SIGN_RULES or (
        kind == "fixed" and seed.isascii() and seed.isdecimal() and int(seed) < 1 << 32
    ):
        return None
    return (
        "rht_signs: must be one of te16, fixed:SEED (0 <= SEED < 2**32), per-layer, per-call, none, "
        f"got {spec.rht_signs!r}. Set it to te16 for rht 16, else to per-layer."
    )


def _correction(spec: Any) -> str | None:
    return unknown_correction(spec.correction)


def _feedback(spec: Any) -> str | None:
    if spec.error_feedback not in SPANS:
        return f"error_feedback: must be one of {SPANS}, got {spec.error_feedback}. Pass 0 for none."
    if spec.feedback_interval < 0:
        return (
            f"feedback_interval: must be at least 0, got {spec.feedback_interval}. Pass 0 or a number of "
            "steps."
        )
    if not spec.error_feedback:
        return None
    required = {"format": "nvfp4", "rounding": "rne", "scale_rounding": "rne", "rht": 0, "correction": ""}
    required |= {"adaptive": "none", "amax_policy": "current"}
    for field, value in required.items():
        if getattr(spec, field) != value:
            return (
                f"{field}: error feedback needs {value!r}, got {getattr(spec, field)!r}. Set it so, or "
                "error_feedback to 0."
            )
    if spec.block_size != (1, 16):
        return (
            f"block: error feedback needs (1, 16), got {spec.block_size}. Set it so, or error_feedback to 0."
        )
    return None


def _scale_rule(spec: Any) -> str | None:
    rule = SCALE_RULES[spec.scale_rule]
    if not rule.serves(spec.block_format):
        served = [fmt.name for fmt in BLOCK_FORMATS.values() if rule.serves(fmt)]
        return (
            f"scale_rule: {rule.name} needs {rule.needs}, got {spec.format}. Use "
            f"{', '.join(served) or 'another rule'}."
        )
    if rule.chooses_rounded and spec.scale_rounding == "sr":
        return f"scale_rounding: {rule.name} chooses among rounded scales and needs rne, got sr. Use rne."
    return None


def _scale(spec: Any) -> str | None:
    fmt = spec.block_format
    if spec.scale_bound not in (0, 256, 448):
        return (
            f"scale_bound: must be 256, 448, or 0 for the scale rule's default, got {spec.scale_bound}. "
            "Pass 0 unless a recipe names a bound."
        )
    if spec.scale_bound and fmt.scale != "e4m3":
        return f"scale_bound: {spec.format} has no E4M3 scales to bound, got {spec.scale_bound}. Use 0."
    if spec.scale_rounding == "sr" and fmt.scale not in _SMALL_FLOAT_SCALES:
        return f"scale_rounding: sr needs E4M3 or UE5M3 scales, got {spec.format}. Use rne."
    if spec.scale_rounding == "sr" and spec.block_size is not None and spec.block_size[1] < 4:
        return (
            f"scale_rounding: sr needs blocks of at least 4 along the contraction, "
            f"got blocks of {spec.block_size}. Use larger blocks, or rne."
        )
    if spec.fp32_scale == "pow2" and not (fmt.has_global_scale or fmt.scale == "fp32"):
        return f"fp32_scale: {spec.format} has no FP32 scale to round. Use exact."
    return None


def _headroom(spec: Any) -> str | None:
    if not spec.sr_headroom:
        return None
    if spec.block_format.scale not in _SMALL_FLOAT_SCALES:
        return (
            f"sr_headroom: needs E4M3 or UE5M3 block scales (nvfp4 and its variants), got {spec.format}. "
            "Set sr_headroom to false, or choose such a format."
        )
    if spec.rounding not in ("sr", "sr32"):
        return f"sr_headroom: needs rounding sr or sr32, got {spec.rounding}. Set it to false."
    return None


def _eden(spec: Any) -> str | None:
    if spec.rounding != "ms-eden":
        return None
    required = {"format": "nvfp4", "scale_rule": "max", "scale_rounding": "rne", "scale_bound": 0}
    for field, value in required.items():
        if getattr(spec, field) != value:
            return (
                f"{field}: ms-eden needs {value}, got {getattr(spec, field)!r}. Set it so, or choose "
                "another rounding."
            )
    if spec.block_size != (1, 16):
        return f"block: ms-eden needs (1, 16), got {spec.block_size}. Set it so, or choose another rounding."
    if spec.rht < 16:
        return f"rht: ms-eden needs a transform of size 16 or larger, got rht={spec.rht}. Set it to 16."
    return None


def _amax(spec: Any) -> str | None:
    if spec.amax_policy != "current" and not spec.tensor_scaled:
        return (
            f"amax_policy: {spec.amax_policy} needs one FP32 scale per tensor, got {spec.format}. Set "
            "amax_policy to current, or choose nvfp4."
        )
    if spec.amax_policy != "current" and spec.block_format.scale not in (*_SMALL_FLOAT_SCALES, "fp32"):
        return (
            f"amax_policy: {spec.amax_policy} counts saturated E4M3, UE5M3 or FP32 scales, got "
            f"{spec.block_format.scale} of {spec.format}. Use current."
        )
    if min(spec.amax_interval, spec.amax_history) < 1:
        return (
            f"amax_interval: amax_interval and amax_history must be at least 1, "
            f"got {spec.amax_interval} and {spec.amax_history}. Set both to 1 to use the last step alone."
        )
    if spec.amax_interval >= 1 << 32:
        return (
            f"amax_interval: must be below 2**32, got {spec.amax_interval}. Set it to the steps between "
            "updates, such as 16."
        )
    if spec.amax_history > MAX_HISTORY:
        return (
            f"amax_history: must be at most {MAX_HISTORY:,} steps, got {spec.amax_history}. Typical values "
            "are 8 to 1,024."
        )
    if not 0.0 < spec.amax_headroom < math.inf:
        return (
            f"amax_headroom: must be positive and finite, got {spec.amax_headroom}. Set it to 1.0 for none."
        )
    return None


def _adaptive(spec: Any) -> str | None:
    block = {"outer": (1, 16), "block": (16, 16)}.get(spec.adaptive)
    if block is not None and (spec.format != "nvfp4" or spec.block_size != block):
        return (
            f"adaptive: {spec.adaptive} needs nvfp4 {block}, got {spec.format} {spec.block_size}. Set both "
            "so, or adaptive to none."
        )
    if spec.adaptive == "outer" and spec.amax_policy != "current":
        return (
            "adaptive: outer chooses the FP32 scales and needs amax_policy current, got "
            f"{spec.amax_policy}. Set amax_policy to current, or adaptive to none."
        )
    if spec.adaptive_interval < 1:
        return (
            f"adaptive_interval: must be at least 1, got {spec.adaptive_interval}. Set it to 1 to adapt in "
            "every step."
        )
    return None


_RULES: tuple[Callable[[Any], str | None], ...] = (
    _block,
    _outer,
    _transform,
    _correction,
    _feedback,
    _scale_rule,
    _scale,
    _headroom,
    _eden,
    _amax,
    _adaptive,
)
