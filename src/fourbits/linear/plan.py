"""The execution plan of a quantized linear layer, created once per table, shapes, dtypes and device.

A plan holds the quantizer of each operand and, after its first call, the launch of each GEMM. Calls pass
tensors only. docs/nvfp4.md, section 2, has the table of the three GEMMs.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fourbits.gemm.matmul import Gemm
from fourbits.gemm.sums import Epilogue, Sums
from fourbits.linear.amax_reduction import reduction_for
from fourbits.linear.hot_channels import hot_count
from fourbits.linear.observer import has_policy
from fourbits.linear.sr_counter import KEY_FIELDS
from fourbits.quant.arguments import DTYPES
from fourbits.quant.correction import Correction, correction_of
from fourbits.quant.quantize import Quantizer, one_pass, quantizer
from fourbits.quant.request import OPERAND_ROLES, OperandRequest, Signature, signature_of
from fourbits.recipe.recipe import GemmTable, table_from_text

#: (role, contraction axis) of the operands that a backward pass may quantize from W and X
DGRAD_WEIGHT, WGRAD_INPUT = (("dgrad.rhs", 0),), (("wgrad.rhs", 0),)

#: the key by which a layer's eager calls find their plan
PlanKey = tuple[Any, ...]
#: plans that a layer keeps, which bounds memory where every input has a new shape
_PLANS_KEPT = 256


@dataclass(slots=True, eq=False)
class Side:
    """The operands quantized from one tensor: their roles, and their quantizer."""

    roles: tuple[str, ...]
    #: contraction axes, by role
    axes: tuple[int, ...]
    quantize: Quantizer
    #: indices of the roles in OPERAND_ROLES, which select their random streams
    places: tuple[int, ...]
    requests: tuple[OperandRequest, ...]
    #: the correction from whose residual all of these operands are quantized
    correction: Correction | None
    #: the registered function that reduces their amaxes over shards; empty for none
    reduction: str
    #: equal for sides whose operands of a tensor are equal
    key: object


@dataclass(slots=True, eq=False)
class GradientPlan:
    """The plan of a backward pass for one signature of dY: the GEMMs and operands of dX and dW."""

    #: one side, or two whose corrections differ
    dy: tuple[Side, ...]
    #: W for Dgrad, quantized from the weight; None if derived from Fprop's operand or not needed
    weight: Side | None
    #: X for Wgrad, quantized from X; None if derived from the forward operand or not needed
    input: Side | None
    dgrad: Gemm | None = None
    wgrad: Gemm | None = None


@dataclass(slots=True, eq=False)
class LinearPlan:
    """The forward and backward plan of a layer, for inputs of one signature."""

    table: GemmTable
    x: Signature
    weight_signature: Signature
    #: dtype of the output
    out_dtype: torch.dtype
    observed: bool
    bias: torch.dtype | None
    #: X for Fprop, and for Wgrad where the forward also quantizes that
    input: Side
    weight: Side
    #: whether dX will be needed
    needs_dx: bool
    #: whether the forward saves its operand W for the backward pass
    keeps_weight: bool
    #: whether Dgrad reuses Fprop's operand W; a GEMM of codes needs a transposed copy instead
    shares_weight: bool
    #: whether the forward saves an operand of X, the last that it quantizes, in the place of X
    keeps_input: bool
    #: whether the operands of X and W depend on more than the tensors, so that other calls cannot reuse them
    input_is_private: bool
    weight_is_private: bool
    #: how many features of X are hot, and whether a backward pass needs them
    hot: int
    keeps_hot: bool
    #: the sums and the epilogue of its GEMMs
    sums: tuple[Sums, Epilogue]
    fprop: Gemm | None = None
    _gradients: dict[tuple[Signature, bool, bool], GradientPlan] = field(default_factory=dict)

    def gradients(self, dy: Signature, dx: bool, dw: bool) -> GradientPlan:
        """The plan of a backward pass. dx, dw: whether the gradients of X and W are needed."""
        key = dy, dx, dw
        plan = self._gradients.get(key)
        if plan is None:
            plan = self._gradients[key] = self._new_gradients(dy, dx, dw)
        return plan

    def _new_gradients(self, dy: Signature, dx: bool, dw: bool) -> GradientPlan:
        table, observed = self.table, self.observed
        roles = [("dgrad.lhs", 1)] * dx + [("wgrad.lhs", 0)] * dw
        weight_again = dx and not self.shares_weight and table.dgrad.rhs.source != "forward"
        input_again = dw and not self.keeps_input and table.wgrad.rhs.source != "forward"
        return GradientPlan(
            dy=tuple(side(table, dy, part, observed) for part in _by_correction(table, roles)),
            weight=side(table, self.weight_signature, DGRAD_WEIGHT, observed) if weight_again else None,
            input=side(table, self.x, WGRAD_INPUT, observed) if input_again else None,
        )


@functools.lru_cache(maxsize=1 << 13)
def linear_plan(
    table: str,
    x: Signature,
    weight: Signature,
    out_dtype: torch.dtype,
    needs: tuple[bool, bool],
    bias: torch.dtype | None,
    observed: bool,
) -> LinearPlan:
    """The plan of a layer.

    table: as text; x: of [M, K]; weight: of [N, K]; needs: whether dX and dW will be needed; bias: whether
    the layer has one; observed: whether operands with an amax policy use a stored amax.
    """
    parsed = table_from_text(table)
    if x.dtype != out_dtype:
        parsed = _read_through_bf16(parsed)
    roles = _input_roles(parsed, x, needs[1], observed)
    return LinearPlan(
        table=parsed,
        x=x,
        weight_signature=weight,
        out_dtype=out_dtype,
        observed=observed,
        bias=bias,
        input=side(parsed, x, roles, observed),
        weight=side(parsed, weight, [("fprop.rhs", 1)], observed),
        needs_dx=needs[0],
        keeps_weight=needs[0] and parsed.keeps_weight and not multiplies_codes(parsed, "fprop.rhs"),
        shares_weight=parsed.shares_weight and not multiplies_codes(parsed, "dgrad.rhs"),
        keeps_input=len(roles) > 1 or (needs[1] and keeps_row(parsed)),
        input_is_private=observed
        or bool(parsed.amax_reduction or parsed.fprop.lhs.error_feedback)
        or any(_request(parsed, role, 1, observed).draws for role, _ in roles),
        weight_is_private=observed or _request(parsed, "fprop.rhs", 1, observed).draws,
        hot=(hot := hot_count(parsed.hot_channels, x.shape[1])),
        keeps_hot=hot > 0 and any(needs),
        sums=(parsed.sums, parsed.epilogue),
    )


def eager_plan(
    plans: dict[PlanKey, tuple[LinearPlan, bool]], key: PlanKey, x: Tensor, weight: Tensor, past: bool
) -> tuple[LinearPlan, bool]:
    """The plan of a layer's calls with this key, and whether autocast's cast precedes it; kept in `plans`.

    past: whether amaxes depend on past steps. Raises ValueError for a weight that cannot be used.
    """
    *_, bias, dtype, needs, table = key
    require_plain(weight)
    _require_usable(weight, needs[1])
    signature = signature_of(x)
    fused = (dtype, x.dtype) == (torch.bfloat16, torch.float32) and not past
    casts = dtype != x.dtype and not (fused and reads_through_bf16(table, signature, needs[1]))
    signature = signature._replace(dtype=dtype if casts else x.dtype)
    planned = linear_plan(table, signature, signature_of(weight), dtype, needs, bias, past), casts
    if len(plans) >= _PLANS_KEPT:
        plans.clear()
    plans[key] = planned
    return planned


def require_plain(tensor: Any) -> None:
    """Raises ValueError for a DTensor among plain tensors, of which this process may have a part."""
    if (placements := getattr(tensor, "placements", None)) is not None:
        raise ValueError(
            "QuantizedLinear: only a layer of nn.Linear takes DTensors, as input and as weight, which "
            "ColwiseParallel and RowwiseParallel place, got one with placements "
            f"{placements} {list(tensor.shape)}. Shard the layer with parallelize_module, pass plain "
            "tensors, or name the layer in exclude."
        )


def _require_usable(weight: Tensor, trains: bool) -> None:
    """Raises ValueError for a weight of a dtype it was not converted with, or that autograd cannot save."""
    if weight.dtype not in DTYPES:
        raise ValueError(
            f"QuantizedLinear: its weight must be float32, bfloat16 or float16, got {weight.dtype}. Cast the "
            'model back, or restore its layers with fourbits.convert(model, "bf16").'
        )
    if trains and weight.is_inference():
        raise ValueError(
            "QuantizedLinear: a weight that is trained must not be created in torch.inference_mode, got one "
            "that was. Build the model outside of it, or train a copy: copy.deepcopy(model)."
        )


def side(table: GemmTable, signature: Signature, roles: Sequence[tuple[str, int]], observed: bool) -> Side:
    """The operands (role, contraction axis) quantized from tensors of a signature; one correction for all."""
    requests = tuple(_request(table, role, axis, observed) for role, axis in roles)
    name = table.operand(roles[0][0]).correction
    if name:
        signature = _of_residual(signature)
    quantize = quantizer(signature, requests)
    return Side(
        roles=tuple(role for role, _ in roles),
        axes=tuple(axis for _, axis in roles),
        quantize=quantize,
        places=tuple(OPERAND_ROLES.index(role) for role, _ in roles),
        requests=requests,
        correction=correction_of(name) if name else None,
        reduction=reduction_for(table.amax_reduction, roles[0][0]),
        key=(quantize, name) if name else quantize,
    )


def multiplies_codes(table: GemmTable, role: str) -> bool:
    """Whether the GEMM of this role takes codes and scales: on FP4 tensor cores, or to model their sums."""
    gemm = role.partition(".")[0]
    return gemm in table.native or (table.sums != "fp32" and not getattr(table, gemm).high_precision)


def keeps_column(table: GemmTable, x: Signature, observed: bool) -> bool:
    """Whether a single pass over X quantizes it for both Fprop and Wgrad, so that the second is saved."""
    codes = multiplies_codes(table, "fprop.lhs") or multiplies_codes(table, "wgrad.rhs")
    if codes or table.wgrad.rhs.source == "forward":
        return False
    if table.fprop.lhs.correction != table.wgrad.rhs.correction:
        return False
    requests = tuple(_request(table, role, axis, observed) for role, axis in _BOTH)
    return one_pass(_of_residual(x) if table.fprop.lhs.correction else x, requests)


def keeps_row(table: GemmTable) -> bool:
    """Whether the forward saves Fprop's operand X, which Wgrad re-quantizes."""
    again = table.wgrad.rhs.source == "forward" and table.fprop.lhs.block_format.quantized
    return again and not table.fprop.lhs.correction and not multiplies_codes(table, "fprop.lhs")


@functools.lru_cache(maxsize=1024)
def weight_from_forward(table: GemmTable) -> GemmTable:
    """The table whose Dgrad re-quantizes Fprop's operand W, which it must where W arrives quantized."""
    return replace(table, dgrad=replace(table.dgrad, rhs=replace(table.dgrad.rhs, source="forward")))


@functools.lru_cache(maxsize=1024)
def shares_input(table: GemmTable) -> bool:
    """Whether the operands of X that a forward pass quantizes depend on nothing but X, so that layers that
    read the same tensor may share them. Not for amax policies, which belong to their layer.
    """
    private = bool(table.amax_reduction or table.corrects or table.fprop.lhs.error_feedback)
    private |= any(_request(table, role, axis, observed=False).draws for role, axis in _BOTH)
    return table.fprop.lhs.block_format.quantized and not private and not multiplies_codes(table, "fprop.lhs")


@functools.lru_cache(maxsize=1 << 12)
def input_side(table: str, x: Signature, needs_dw: bool) -> Side:
    """The operands of X that a forward pass quantizes, of a table that shares them."""
    parsed = table_from_text(table)
    return side(parsed, x, _input_roles(parsed, x, needs_dw, observed=False), observed=False)


def reads_through_bf16(table: str, x: Signature, needs_dw: bool) -> bool:
    """Whether kernels round an FP32 input to BF16 as they read it, which saves autocast's pass."""
    return _all_in_one_pass(table, x, needs_dw)


@functools.lru_cache(maxsize=1 << 13)
def _all_in_one_pass(table: str, x: Signature, needs_dw: bool) -> bool:
    parsed = _read_through_bf16(table_from_text(table))
    if parsed.corrects or any(multiplies_codes(parsed, x) or has_policy(parsed, x) for x in OPERAND_ROLES):
        return False
    roles = _input_roles(parsed, x, needs_dw, observed=False)
    requests = tuple(_request(parsed, role, axis, observed=False) for role, axis in roles)
    return (len(roles) > 1 or keeps_row(parsed) or not needs_dw) and one_pass(x, requests)


_BOTH = (("fprop.lhs", 1), ("wgrad.rhs", 0))


def _input_roles(
    table: GemmTable, x: Signature, needs_dw: bool, observed: bool
) -> tuple[tuple[str, int], ...]:
    """The operands that the forward quantizes from X."""
    packed = table.saved_inputs == "packed"
    return _BOTH if needs_dw and (packed or keeps_column(table, x, observed)) else _BOTH[:1]


def _request(table: GemmTable, role: str, axis: int, observed: bool) -> OperandRequest:
    spec = table.operand(role).of_residual
    packed = multiplies_codes(table, role) or (role == "wgrad.rhs" and table.saved_inputs == "packed")
    amax = "given" if reduction_for(table.amax_reduction, role) and spec.tensor_scaled else "own"
    if observed and has_policy(table, role):
        amax = "stored"
    return OperandRequest(spec, axis, packed, amax, KEY_FIELDS[role])


def _by_correction(
    table: GemmTable, roles: Sequence[tuple[str, int]]
) -> tuple[Sequence[tuple[str, int]], ...]:
    """The roles as one group where all have the same correction, else one by one."""
    if not roles:
        return ()
    same = len({table.operand(role).correction for role, _ in roles}) == 1
    return (roles,) if same else tuple([role] for role in roles)


def _of_residual(signature: Signature) -> Signature:
    """The signature of a tensor's residual after a correction."""
    return signature._replace(dtype=torch.float32, strides=(signature.shape[1], 1))


def _read_through_bf16(table: GemmTable) -> GemmTable:
    """The table for an FP32 input that is rounded to BF16 before it is quantized."""
    fprop, wgrad = table.fprop, table.wgrad
    as_bf16 = [
        spec if spec.source == "forward" else replace(spec, source="bf16") for spec in (fprop.lhs, wgrad.rhs)
    ]
    return replace(table, fprop=replace(fprop, lhs=as_bf16[0]), wgrad=replace(wgrad, rhs=as_bf16[1]))
