"""The GEMMs of a table that run on FP4 tensor cores."""

from dataclasses import replace

from fourbits.quant.operand import OperandSpec
from fourbits.recipe.recipe import GemmSpec, GemmTable

GEMMS = ("fprop", "dgrad", "wgrad")


def with_native_gemms(table: GemmTable) -> GemmTable:
    """The table with every GEMM that FP4 tensor cores support marked as native.

    Decided once, from the recipe's own specs: an adaptive operand's effective layout looks like a fixed one.
    """
    if table.sums != "fp32" or table.hot_channels:
        return table
    return replace(
        table, native=tuple(name for name in GEMMS if unsupported_native(getattr(table, name)) is None)
    )


def unsupported_native(gemm: GemmSpec) -> str | None:
    """Why a GEMM cannot run on FP4 tensor cores, or None."""
    return _unsupported_operand(gemm.lhs) or _unsupported_operand(gemm.rhs)


def emulated_gemms(table: GemmTable) -> str:
    """The quantized GEMMs that do not run on FP4 tensor cores, and why, as text; empty if none."""
    asked = f"sums {table.sums}" if table.sums != "fp32" else "hot channels" if table.hot_channels else None
    low = {name: gemm for name in GEMMS if not (gemm := getattr(table, name)).high_precision}
    reasons = {name: asked or unsupported_native(gemm) for name, gemm in low.items()}
    return ", ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)


def _unsupported_operand(spec: OperandSpec) -> str | None:
    size = spec.block_size
    if spec.format != "nvfp4":
        return spec.format
    if size is None or size[1] != 16:
        return f"blocks of {size}"
    if spec.amax_policy != "current":
        return f"amax_policy {spec.amax_policy}"
    if spec.correction:
        return f"correction {spec.correction}"
    if spec.adaptive != "none":
        return f"adaptive {spec.adaptive}"
    return None
