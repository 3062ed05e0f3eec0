"""Products of experts by grouped kernels: one launch to quantize each tensor and one for each GEMM.

Codes, scales and random bits are those of `loop.forward` and `loop.backward`; sums of products differ from
theirs by no more than those of two GEMM kernels. Nothing here waits for the device: shapes bound every grid,
and where an expert's rows lie is read on the device (`quant/grouped_layout.py`).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourbits.device import probe
from fourbits.gemm.grouped import column_sums, rows_gemm, sums_gemm, unsupported_grouped_gemms
from fourbits.linear.layer_state import CallConfig, LayerState
from fourbits.linear.sr_counter import KEY_FIELDS
from fourbits.linear.stacked.loop import GroupedCall
from fourbits.quant.grouped import (
    Quantizer,
    equal_groups,
    grouped_quantizer,
    height_of,
    tile_map,
    unsupported_device,
    unsupported_groups,
)
from fourbits.quant.grouped_layout import GroupedOperand, GroupTiles, most_tiles
from fourbits.quant.request import OPERAND_ROLES, OperandRequest, Signature, signature_of
from fourbits.recipe.recipe import GemmTable, table_from_text

#: computes the operand of a weight, or finds it: (weight, plan, compute) -> operand
ReuseWeight = Callable[[Tensor, object, Callable[[], GroupedOperand]], GroupedOperand]
_ROLE_AXES = {"fprop.lhs": 1, "fprop.rhs": 1, "dgrad.lhs": 1, "dgrad.rhs": 0, "wgrad.lhs": 0, "wgrad.rhs": 0}


class Shape(NamedTuple):
    """The key of a plan, apart from its table."""

    #: signature of X [M, K]
    x: Signature
    #: shape of W [E, N, K], or [E, K, N] if transposed
    weight: tuple[int, int, int]
    weight_dtype: torch.dtype
    transposed: bool
    bias: torch.dtype | None
    #: from the counter of one expert to that of the next
    key_stride: int

    @property
    def out_features(self) -> int:
        """Columns of Y: N."""
        return self.weight[2 if self.transposed else 1]


@dataclass(slots=True, eq=False)
class ExpertsPlan:
    """The launches of a product of experts, for tensors of one shape. GEMMs are planned by the first call."""

    table: GemmTable
    shape: Shape
    #: rows of a tile of the map by which operands are quantized
    height: int
    map: Callable[[Tensor], GroupTiles]
    weights: GroupTiles
    fprop: Any = None
    dgrad: Any = None
    wgrad: Any = None

    @property
    def groups(self) -> int:
        """Number of experts: E."""
        return self.shape.weight[0]

    def roles(self, *roles: str) -> tuple[OperandRequest, ...]:
        """The requests of these roles, along the axes of the tensors that the operands are of."""
        return tuple(_request(self.table, role, self.shape.transposed) for role in roles)

    def quantizer(self, signature: Signature, *roles: str) -> Quantizer:
        """The quantizer of a tensor with rows of experts, or of W, as `signature` has it."""
        padded = roles[0] in ("fprop.rhs", "dgrad.rhs")
        key_stride = self.shape.key_stride
        tiles = most_tiles(signature.shape[0], self.groups, self.height), self.height
        if padded:
            tiles = len(self.weights.entries), self.weights.height
        return grouped_quantizer(signature, self.groups, tiles, self.roles(*roles), padded, key_stride)

    def gemm_map(self, height: int, tiles: GroupTiles, offsets: Tensor) -> GroupTiles:
        """The map of tiles of a GEMM of this height."""
        if height == tiles.height:
            return tiles
        rows = self.shape.x.shape[0]
        return tile_map(rows, self.groups, height, offsets.device)(offsets)


@functools.lru_cache(maxsize=1 << 12)
def unsupported_table(table: str, device: torch.device) -> str | None:
    """Why grouped kernels do not compute a table on a device, or None."""
    parsed = table_from_text(table)
    for asked, what in (
        (parsed.native, "GEMMs on FP4 tensor cores"),
        (parsed.sums != "fp32", "sums of tensor cores"),
        (parsed.amax_reduction, "shards by features"),
        (parsed.corrects, "corrections"),
        (parsed.gradient_rows != "any", "limited rows"),
        (parsed.saved_inputs != "exact", "packed inputs"),
        (parsed.fprop.rhs.rht or parsed.dgrad.rhs.rht, "transformed weights"),
    ):
        if asked:
            return f"{what} have no grouped kernels"
    specs = [(parsed.operand(role), axis) for role, axis in _ROLE_AXES.items()]
    if not all(spec.block_format.quantized for spec, _ in specs):
        return "grouped kernels multiply quantized operands only"
    return unsupported_groups(device, specs) or unsupported_grouped_gemms(device)


def unsupported_fused(table: str, weight: Tensor) -> str | None:
    """Why a layer's experts are multiplied one after the other where its weights are now, or None."""
    device = torch.device(probe().torch_device) if weight.is_meta else weight.device
    reason = unsupported_table(table, device)
    if reason is not None and reason == unsupported_device(device):
        return f"grouped kernels do not run on {device.type}" if device.type != "cuda" else reason
    return reason


def unsupported(table: str, dtype: torch.dtype, weight: Tensor) -> str | None:
    """Why grouped kernels do not compute a product, or None. dtype: of X."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"no grouped kernel for {dtype}"
    return unsupported_table(table, weight.device)


def forward(
    call: GroupedCall, needs: Sequence[bool], reuse_weight: ReuseWeight | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Y [M, N], and what the backward pass reads: the map, W's operand if Dgrad shares it, X's for Wgrad.

    needs: whether dX and dW will be needed. Rows of Y past the last offset are not written.
    """
    x, weight = call.x, call.weight
    assert x is not None
    plan = plan_of(call, signature_of(x))
    if not x.shape[0]:
        return x.new_empty((0, plan.shape.out_features)), []
    tiles = plan.map(call.offsets)
    lhs, *column = _quantized(plan, call, x, tiles, ("fprop.lhs", *(("wgrad.rhs",) if needs[1] else ())))

    def quantize_weight() -> GroupedOperand:
        return _quantized_weight(plan, call, "fprop.rhs")

    of_operand = call.table, plan.weights.height
    rhs = quantize_weight() if reuse_weight is None else reuse_weight(weight, of_operand, quantize_weight)
    if plan.fprop is None:
        bias = None if call.bias is None else call.bias.dtype
        sizes = plan.shape.out_features, x.shape[1]
        plan.fprop = rows_gemm(lhs, rhs, plan.groups, sizes, x.dtype, bias)
    rows = plan.gemm_map(plan.fprop.height, tiles, call.offsets)
    bias = None if call.bias is None else call.bias.contiguous()
    y = plan.fprop(lhs, rhs, rows, bias)
    if not any(needs):
        return y, []
    saved = [tiles.entries, tiles.starts]
    if needs[0] and plan.table.shares_weight:
        saved += [rhs.values, rhs.scale]
    if needs[1]:
        saved += [column[0].values, column[0].scale]
    return y, saved


def backward(
    call: GroupedCall, dy: Tensor, saved: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """dX [M, K] in dY's dtype, dW in FP32 and in W's layout, dbias in FP32; None where not needed."""
    columns = call.weight.shape[1 if call.transposed else 2]
    signature = Signature(dy.device, dy.dtype, (dy.shape[0], columns), (columns, 1))
    plan, device = plan_of(call, signature), dy.device
    if not dy.shape[0]:
        shapes = signature.shape, tuple(call.weight.shape), (plan.groups, dy.shape[1])
        dtypes = dy.dtype, torch.float32, torch.float32
        return [
            dy.new_zeros(s, dtype=d) if need else None
            for s, d, need in zip(shapes, dtypes, needs, strict=True)
        ]
    dx = dw = db = None
    if needs[0] or needs[1]:
        rest = list(saved)
        tiles = GroupTiles(rest.pop(0), rest.pop(0), plan.height)
        roles = ("dgrad.lhs",) * bool(needs[0]) + ("wgrad.lhs",) * bool(needs[1])
        operands = list(_quantized(plan, call, dy, tiles, roles))
        if needs[0]:
            dx = _dgrad(plan, call, operands.pop(0), tiles, rest, dy)
        if needs[1]:
            dw = _wgrad(plan, call, operands.pop(0), tiles, rest)
    if needs[2]:
        db = column_sums(dy.shape[1], plan.groups, device)(dy, call.offsets)
    return [dx, dw, db]


def fake_saved(call: GroupedCall, needs: Sequence[bool]) -> list[Tensor]:
    """Empty tensors of the shapes of what `forward` saves."""
    x, weight = call.x, call.weight
    assert x is not None
    (M, K), groups = x.shape, weight.shape[0]
    parsed = table_from_text(call.table)
    if not any(needs):
        return []
    height = _height(parsed)
    tiles = most_tiles(M, groups, height)
    saved = [
        x.new_empty((tiles, 4), dtype=torch.int32),
        x.new_empty((groups + 1,), dtype=torch.int32),
    ]
    if needs[0] and parsed.shares_weight:
        high = _weight_height(parsed)
        rows = -(-weight.shape[1] // high) * high * groups
        saved += [_values(x, rows, weight.shape[2]), x.new_empty((groups,), dtype=torch.float32)]
    if needs[1]:
        saved += [_values(x, tiles * height, K), x.new_empty((groups,), dtype=torch.float32)]
    return saved


def reused_weight(state: LayerState, config: CallConfig) -> ReuseWeight | None:
    """The KeptWeight that keeps a weight's operand for later micro-batches, where set_step allows it."""
    counter = state.counter
    if counter is None or not config.observes:
        return None
    return lambda weight, plan, make: state.weight.operand(weight, plan, counter, make)


def plan_of(call: GroupedCall, x: Signature) -> ExpertsPlan:
    """The plan of a call, for an X of this signature."""
    stride = 0 if len(call.counters) == 1 else call.counters.stride(0)
    count, rows, columns = call.weight.shape
    bias = None if call.bias is None else call.bias.dtype
    shape = Shape(x, (count, rows, columns), call.weight.dtype, call.transposed, bias, stride)
    return _plan(call.table, shape)


@functools.lru_cache(maxsize=1 << 12)
def _plan(table: str, shape: Shape) -> ExpertsPlan:
    parsed, (count, rows, _) = table_from_text(table), shape.weight
    height, device = _height(parsed), shape.x.device
    maps = tile_map(shape.x.shape[0], count, height, device)
    weights = equal_groups(count, rows, _weight_height(parsed), device)
    return ExpertsPlan(parsed, shape, height, maps, weights)


def _quantized(
    plan: ExpertsPlan, call: GroupedCall, x: Tensor, tiles: GroupTiles, roles: tuple[str, ...]
) -> tuple[GroupedOperand, ...]:
    """Operands of rows of experts."""
    if not roles:
        return ()
    streams = tuple(call.layer * 8 + OPERAND_ROLES.index(role) for role in roles)
    return plan.quantizer(signature_of(x), *roles)(x, tiles, call.counters, streams)


def _quantized_weight(plan: ExpertsPlan, call: GroupedCall, role: str) -> GroupedOperand:
    """An operand of the experts' weights, which are quantized as one tensor of equal groups of rows."""
    weight = call.weight.detach().contiguous().flatten(0, 1)
    stream = call.layer * 8 + OPERAND_ROLES.index(role)
    (operand,) = plan.quantizer(signature_of(weight), role)(weight, plan.weights, call.counters, (stream,))
    return operand


def _dgrad(
    plan: ExpertsPlan,
    call: GroupedCall,
    lhs: GroupedOperand,
    tiles: GroupTiles,
    saved: list[Tensor],
    dy: Tensor,
) -> Tensor:
    """dX, from Fprop's operand W where Dgrad shares it, else from a separate one."""
    axis = _axis("dgrad.rhs", call.transposed)
    if plan.table.shares_weight:
        rhs = GroupedOperand(saved.pop(0), saved.pop(0), axis, plan.table.dgrad.rhs)
    else:
        rhs = _quantized_weight(plan, call, "dgrad.rhs")
    if plan.dgrad is None:
        sizes = plan.shape.x.shape[1], dy.shape[1]
        plan.dgrad = rows_gemm(lhs, rhs, plan.groups, sizes, dy.dtype, None)
    return plan.dgrad(lhs, rhs, plan.gemm_map(plan.dgrad.height, tiles, call.offsets), None)


def _wgrad(
    plan: ExpertsPlan, call: GroupedCall, of_dy: GroupedOperand, tiles: GroupTiles, saved: list[Tensor]
) -> Tensor:
    """dW in the layout of W."""
    of_x = GroupedOperand(saved.pop(0), saved.pop(0), 0, plan.table.wgrad.rhs)
    a, b = (of_x, of_dy) if call.transposed else (of_dy, of_x)
    if plan.wgrad is None:
        plan.wgrad = sums_gemm(a, b, plan.groups, plan.shape.weight[1:], plan.height)
    return plan.wgrad(a, b, (of_dy.scale, of_x.scale), tiles)


def _request(table: GemmTable, role: str, transposed: bool) -> OperandRequest:
    return OperandRequest(table.operand(role), _axis(role, transposed), False, "own", KEY_FIELDS[role])


def _axis(role: str, transposed: bool) -> int:
    """The contraction axis in the tensor that an operand is of: W may be stored transposed."""
    axis = _ROLE_AXES[role]
    return 1 - axis if transposed and role in ("fprop.rhs", "dgrad.rhs") else axis


def _height(table: GemmTable) -> int:
    """Rows of a tile of the map of rows of experts."""
    return height_of([table.operand(role) for role in ("fprop.lhs", "dgrad.lhs", "wgrad.lhs", "wgrad.rhs")])


def _weight_height(table: GemmTable) -> int:
    """Rows of a tile of the map of W."""
    return height_of([table.fprop.rhs, table.dgrad.rhs])


def _values(like: Tensor, rows: int, columns: int) -> Tensor:
    return like.new_empty((rows, -(-columns // 16) * 16), dtype=torch.bfloat16)
