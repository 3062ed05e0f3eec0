"""The rules of a table of three GEMMs: corrections, error feedback, hot channels, sums.

`recipe.py` imports this file, so the tables here are `Any`.
"""

from typing import Any

from fourbits.gemm.sums import unsupported_sums
from fourbits.quant.request import OPERAND_ROLES


def broken_rule(table: Any) -> str | None:
    """The first rule that a table breaks: field, rule, value, remedy. None for a valid one."""
    found = _wrong_correction(table) or _wrong_feedback(table) or _wrong_hot_channels(table)
    return found or _wrong_sums(table)


def _wrong_correction(table: Any) -> str | None:
    """The rule of corrections that a table breaks, or None. docs/nvfp4.md, section 21."""
    for role in ("fprop.rhs", "dgrad.rhs"):
        if name := table.operand(role).correction:
            return (
                f"{role}.correction: a weight has no tokens, of which a correction removes a part, got "
                f"{name!r}. Set it on the other operand, X or dY."
            )
    names = table.wgrad.lhs.correction, table.wgrad.rhs.correction
    if names[0] != names[1]:
        return (
            f"wgrad: dY and X must have the same correction, so that its cross terms vanish, got "
            f"{names[0]!r} (lhs) and {names[1]!r} (rhs). Set correction alike on both."
        )
    if table.saved_inputs == "packed" and names[1] != table.fprop.lhs.correction:
        return (
            f"saved_inputs: packed quantizes X once for Fprop and Wgrad and needs one correction, got "
            f"{table.fprop.lhs.correction!r} (fprop.lhs) and {names[1]!r} (wgrad.rhs). Set it to exact."
        )
    if table.wgrad.rhs.source == "forward" and (names[1] or table.fprop.lhs.correction):
        return (
            "wgrad.rhs.source: forward re-quantizes the forward operand, which lacks what a correction "
            "removes. Set wgrad.rhs.source to as_is, or correction to '' on X and dY."
        )
    return None


def _wrong_feedback(table: Any) -> str | None:
    """The rule of error feedback that a table breaks, or None. docs/nvfp4.md, section 25."""
    for role in OPERAND_ROLES:
        if role != "fprop.lhs" and table.operand(role).error_feedback:
            return f"{role}.error_feedback: is for X in Fprop, fprop.lhs. Set it to 0 here."
    if table.fprop.lhs.error_feedback and table.wgrad.rhs.source == "forward":
        return (
            "wgrad.rhs.source: forward re-quantizes X of Fprop, whose errors are only made up for in Fprop. "
            "Set it to as_is, or fprop.lhs.error_feedback to 0."
        )
    return None


def _wrong_hot_channels(table: Any) -> str | None:
    """The rule of hot channels that a GEMM table breaks, or None. docs/nvfp4.md, section 24."""
    share: object = table.hot_channels
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        return (
            f"hot_channels: must be a share of the input features, 0 to 1, got {share!r}. Set it to 0 for "
            "none."
        )
    if not share:
        return None
    if table.fprop.lhs.rht:
        return (
            "hot_channels: the operands of Fprop must have no transform, which mixes channels, got "
            f"rht={table.fprop.lhs.rht}. Set rht to 0 in fprop, or hot_channels to 0."
        )
    if any(getattr(table, gemm).lhs.correction for gemm in ("fprop", "dgrad", "wgrad")):
        return "hot_channels: cannot be combined with a correction. Set one of them only."
    if table.fprop.lhs.error_feedback:
        return (
            "hot_channels: cannot be combined with error_feedback, which corrects the same errors. Set one."
        )
    if table.native or table.amax_reduction:
        what = "GEMMs on FP4 tensor cores" if table.native else "shards by features"
        return f"hot_channels: {what} do not support them. Set hot_channels to 0."
    return None


def _wrong_sums(table: Any) -> str | None:
    """The rule of sums that a table breaks, or None. docs/nvfp4.md, section 22."""
    if table.sums == "fp32":
        if table.epilogue == "separate":
            return None
        return f"epilogue: {table.epilogue} needs sums other than fp32. Set sums, or epilogue to separate."
    for name in ("fprop", "dgrad", "wgrad"):
        gemm = getattr(table, name)
        reason = None if gemm.high_precision else unsupported_sums(table.sums, gemm.lhs, gemm.rhs)
        if reason is not None:
            return f"sums: {reason} ({name}). Set sums to fp32, or choose other operands."
    for asked, what in (
        (table.corrects, "correction adds a product of unquantized tensors"),
        (table.amax_reduction, "amax_reduction leaves each shard a part of a sum"),
        (table.native, "native GEMMs have the sums of their chip"),
    ):
        if asked:
            return f"sums: {what}, got sums {table.sums}. Set sums to fp32."
    return None
