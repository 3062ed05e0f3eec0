"""Layers that are shards by features of larger ones, and quantize to the bytes of those layers' slices.

A layer split by out_features holds rows of W; one split by in_features holds columns. Only two things of an
operand depend on the rest of its tensor: the amax, which is reduced over the shards, and the coordinates of
its random bits, which count from the first feature of the whole. docs/nvfp4.md, sections 6 and 11.
"""

from dataclasses import replace
from math import lcm

from torch import nn

from fourbits.linear.amax_reduction import amax_reduction as reduction_of
from fourbits.linear.layer_state import FeatureShard, state_of
from fourbits.quant.request import OPERAND_ROLES
from fourbits.recipe.recipe import GemmTable, table_from_text

#: role -> the features along its stored rows, and along its contraction
_ROWS = {"fprop.rhs": "out", "dgrad.rhs": "in", "wgrad.lhs": "out", "wgrad.rhs": "in"}
_CONTRACTION = {"fprop.lhs": "in", "fprop.rhs": "in", "dgrad.lhs": "out", "dgrad.rhs": "out"}


def shard_features(layer: nn.Module, first_in: int = 0, first_out: int = 0, amax_reduction: str = "") -> None:
    """Declare a converted layer to be a shard of a larger one; call it after `convert`, before training.

    first_in, first_out: the features of the whole layer at which this one's weight starts. amax_reduction:
    a name given to `register_amax_reduction`; empty where no operand has an amax (MX formats). The layer
    must have the number that the whole layer has in its model. Raises ValueError for a layer that is not
    converted, for a split inside a block, for adaptive layouts and for FP4 tensor cores.
    """
    for name, first in (("first_in", first_in), ("first_out", first_out)):
        if isinstance(first, bool) or not isinstance(first, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"shard_features: {name} must be an int, got {first!r}. Pass a whole number.")
    state = state_of(layer, "shard_features")
    shard = FeatureShard(first_in, first_out)
    state.shard_as(shard, sharded(table_from_text(state.table), amax_reduction, shard))


def sharded(table: GemmTable, amax_reduction: str, shard: FeatureShard) -> GemmTable:
    """The table of a shard. Raises ValueError where a table does not support it."""
    for kind, first in (("in", shard.first_in), ("out", shard.first_out)):
        unit = feature_unit(table, kind)
        if first < 0 or first % unit:
            raise ValueError(
                f"shard_features: first_{kind} must be a multiple of {unit} from 0 on, so that no block is "
                f"split, got {first}. Split {kind}_features into parts of whole blocks."
            )
    operands = [table.operand(role) for role in OPERAND_ROLES]
    if any(spec.adaptive != "none" for spec in operands):
        raise ValueError(
            "shard_features: an adaptive layout would follow the statistics of one shard. Set adaptive to "
            "none."
        )
    if table.gradient_rows == "limited":
        raise ValueError(
            "shard_features: limits follow the rows of one shard's gradient, not of the whole. Set "
            "gradient_rows to any."
        )
    if amax_reduction:
        reduction_of(amax_reduction)
    elif any(spec.tensor_scaled for spec in operands):
        raise ValueError(
            "shard_features: the recipe has operands with one scale per tensor, so a shard needs the name of "
            "a registered amax_reduction, got ''. Register one with register_amax_reduction."
        )
    return replace(table, amax_reduction=amax_reduction)


def feature_unit(table: GemmTable, kind: str) -> int:
    """Features between places where a layer may be split: whole blocks and transforms of all operands."""
    unit = 16
    for role in OPERAND_ROLES:
        spec = table.operand(role)
        sizes = spec.scale_sizes
        if _ROWS.get(role) == kind:
            unit = lcm(unit, *(size[0] for size in sizes))
        if _CONTRACTION.get(role) == kind:
            unit = lcm(unit, spec.rht or 1, *(size[1] for size in sizes))
    return unit
