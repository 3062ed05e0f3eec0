"""The operand specs whose bits are recorded: those of the shipped recipes, and rarer ones."""

from typing import Any

import fourbits as fb

ROLES = ("fprop.lhs", "fprop.rhs", "dgrad.lhs", "dgrad.rhs", "wgrad.lhs", "wgrad.rhs")
BLOCK_2D = (16, 16)
_METRICS = ("mse", "mae", "max")
_SIGNS = ("fixed:5", "per-layer", "per-call", "none")
_DOUBLE = {"format": "nvfp4-double"}
_SR = {"rounding": "sr"}

_ODD: dict[str, dict[str, Any]] = {
    **{f"4over6-{m}": {"scale_rule": f"4over6-{m}"} for m in _METRICS},
    **{f"4over6-{m} 16x16": {"scale_rule": f"4over6-{m}", "block": BLOCK_2D} for m in _METRICS},
    "4over6-mse bound 448": {"scale_rule": "4over6-mse", "scale_bound": 448},
    "4over6-mae sr scales": {"scale_rule": "4over6-mae", "scale_rounding": "sr"},
    "4over6-mse sr rht 16": {"scale_rule": "4over6-mse", **_SR, "rht": 16},
    **{f"search-{m}": {"scale_rule": f"search-{m}"} for m in _METRICS},
    "search-mse 16x16": {"scale_rule": "search-mse", "block": BLOCK_2D},
    "search-mae nve1m2": {"scale_rule": "search-mae", "format": "nve1m2"},
    "search-max nvint4": {"scale_rule": "search-max", "format": "nvint4"},
    "search-mse double": {"scale_rule": "search-mse", **_DOUBLE},
    **{f"ms-eden {size}": {"rounding": "ms-eden", "rht": size} for size in (16, 32, 64, 128)},
    "ms-eden 64 per-call": {"rounding": "ms-eden", "rht": 64, "rht_signs": "per-call"},
    "ms-eden pow2": {"rounding": "ms-eden", "rht": 16, "fp32_scale": "pow2"},
    "double": _DOUBLE,
    "double sr": {**_DOUBLE, **_SR},
    "double outer 1x32": {**_DOUBLE, "outer": (1, 32)},
    "double 16x16 outer 32x32": {**_DOUBLE, "block": BLOCK_2D, "outer": (32, 32)},
    "double 4over6 rht 32": {**_DOUBLE, "scale_rule": "4over6-mse", "rht": 32},
    "double pow2": {**_DOUBLE, "fp32_scale": "pow2"},
    "ue5m3": {"format": "nvfp4-ue5m3"},
    "ue5m3 sr sr": {"format": "nvfp4-ue5m3", **_SR, "scale_rounding": "sr"},
    "ue5m3 16x16": {"format": "nvfp4-ue5m3", "block": BLOCK_2D},
    "nve1m2": {"format": "nve1m2"},
    "nve1m2 sr": {"format": "nve1m2", **_SR},
    "nvint4": {"format": "nvint4"},
    "nvint4 sr": {"format": "nvint4", **_SR},
    "nvint4 16x16": {"format": "nvint4", "block": BLOCK_2D},
    "int8": {"format": "int8"},
    "int8 sr": {"format": "int8", **_SR},
    "int8 whole": {"format": "int8", "block": (0, 0)},
    "fp8 whole": {"format": "fp8", "block": (0, 0)},
    "fp8 pow2": {"format": "fp8", "fp32_scale": "pow2"},
    "fp8 sr": {"format": "fp8", **_SR},
    "fp8-e5m2": {"format": "fp8-e5m2"},
    "fp8-e5m2 whole pow2": {"format": "fp8-e5m2", "block": (0, 0), "fp32_scale": "pow2"},
    "mxfp8": {"format": "mxfp8"},
    "mxfp8-e5m2": {"format": "mxfp8-e5m2"},
    "mxfp8-e5m2 sr ceil": {"format": "mxfp8-e5m2", **_SR, "scale_rule": "ceil"},
    "mxfp4 ceil": {"format": "mxfp4", "scale_rule": "ceil"},
    "mxfp4 1x16 sr32": {"format": "mxfp4", "block": (1, 16), "rounding": "sr32"},
    "no te": {"te_compat": False},
    "no te 16x16": {"te_compat": False, "block": BLOCK_2D},
    "no te sr": {"te_compat": False, **_SR},
    "sr32": {"rounding": "sr32"},
    "sr32 16x16": {"rounding": "sr32", "block": BLOCK_2D},
    "sr32 rht 16": {"rounding": "sr32", "rht": 16},
    "headroom sr": {**_SR, "sr_headroom": True},
    "headroom sr32": {"rounding": "sr32", "sr_headroom": True},
    "sr scales": {"scale_rounding": "sr"},
    "sr scales 16x16": {"scale_rounding": "sr", "block": BLOCK_2D},
    "sr scales sr rht 16": {"scale_rounding": "sr", **_SR, "rht": 16},
    "pow2": {"fp32_scale": "pow2"},
    "pow2 16x16": {"fp32_scale": "pow2", "block": BLOCK_2D},
    "bound 256": {"scale_bound": 256},
    "16x16": {"block": BLOCK_2D},
    "32x32": {"block": (32, 32)},
    "4x4": {"block": (4, 4)},
    "1x64": {"block": (1, 64)},
    "3x48": {"block": (3, 48)},
    "bf16 then 16x16 rht 16": {"source": "bf16", "block": BLOCK_2D, "rht": 16},
    "fp32": {"format": "fp32"},
    "rht 16 te16": {"rht": 16, "rht_signs": "te16"},
    **{
        f"rht {size} {signs}": {"rht": size, "rht_signs": signs}
        for size in (4, 8, 16, 32, 64, 128)
        for signs in _SIGNS
    },
}

#: rarer specs that the compiled source is recorded for, too: a graph takes seconds
ODD_LARGE = (
    "4over6-mae",
    "search-mse",
    "double sr",
    "ue5m3 sr sr",
    "int8",
    "headroom sr",
    "sr scales",
    "3x48",
)


def recipe_specs() -> dict[str, fb.OperandSpec]:
    """Every distinct spec of the shipped recipes, under the name of the first operand that has it."""
    names: dict[fb.OperandSpec, str] = {}
    for name in fb.list_recipes():
        recipe = fb.get_recipe(name)
        tables: dict[str, Any] = {name: recipe}
        tables |= {f"{name} rule {i}": rule.table for i, rule in enumerate(recipe.layers)}
        for table, gemms in tables.items():
            for role in ROLES:
                gemm, side = role.split(".")
                names.setdefault(getattr(getattr(gemms, gemm), side).of_residual, f"{table} {role}")
    return {name: spec for spec, name in names.items()}


def odd_specs() -> dict[str, fb.OperandSpec]:
    """Specs of no shipped recipe: every rule, rounding, format and size of the transform."""
    return {name: fb.OperandSpec(**fields) for name, fields in _ODD.items()}
