"""convert: apply a recipe to the linear layers of any PyTorch model, in place, and report the conversion.

A layer keeps its identity: parameters, hooks, name, state_dict and every reference to it stay; only its class
changes. The same holds for groups of linear layers in one parameter, such as experts.
"""

from typing import Any, Literal

import torch
from torch import nn

from fourbits.device import Device, native_unsupported, probe
from fourbits.gemm.native.self_check import why_not_trusted
from fourbits.linear.checkpoint_state import open_books
from fourbits.linear.grouped import QuantizedGroup, is_group, stacked_weights
from fourbits.linear.layer_state import LayerState
from fourbits.linear.module import QuantizedLinear
from fourbits.linear.native_gemms import emulated_gemms, made_native
from fourbits.linear.placement import Decider
from fourbits.linear.summary import ConversionSummary, LinearReport, precision_of
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe

_conversions = [0]


def convert(
    model: nn.Module,
    recipe: str | Recipe = "nvfp4",
    seed: int = 0,
    backend: Literal["emulated", "native"] = "emulated",
) -> ConversionSummary:
    """Convert the model's linear layers to a recipe, in place; "bf16" restores the nn.Linear layers.

    model: any module tree, on any device, meta included. recipe: a shipped name, a YAML file or a Recipe.
    seed: the seed of all random bits, in [0, 2**32). backend: the GEMM backend; "native" uses Blackwell FP4
    tensor cores for the GEMMs they support, after a self-check. Returns the precision of each layer, with the
    reason. Raises ValueError for an unknown recipe, and for native on a GPU without FP4 tensor cores or one
    that fails the self-check.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"convert: model must be an nn.Module, got {type(model).__name__}. Pass the model itself."
        )
    chosen = get_recipe(recipe)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"convert: seed must be an int in [0, 2**32), got {seed!r}. Pass such an int.")
    if backend not in ("emulated", "native"):
        raise ValueError(
            f"convert: backend must be emulated or native, got {backend!r}. The default is emulated."
        )
    if backend == "native":
        require_native()
    linears: list[tuple[str, Any]] = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or is_group(module)
    ]
    for name, linear in linears:
        _restore(name, linear)
    decider = Decider(model, chosen)
    reports: list[LinearReport] = []
    layer = 0
    for name, linear in linears:
        table, reason = decider.decide(name, linear)
        if table is not None and backend == "native":
            table = made_native(table)
            if others := emulated_gemms(table):
                reason = f"{reason}; emulated: {others}"
        precision = "bf16" if table is None else precision_of(table)
        count = len(linear.weight) if is_group(linear) else 1
        shape = (count * linear.out_features, linear.in_features)
        reports.append(LinearReport(name, shape, precision, reason))
        if table is not None:
            _adopt(linear, LayerState(type(linear), table, layer, seed, chosen.quantize_eval))
        layer += count
    reports += [LinearReport(name, shape, "bf16", why) for name, shape, why in stacked_weights(model)]
    open_books(model)
    parameters = sum(p.numel() for p in model.parameters())
    return ConversionSummary(chosen.name, chosen.digest, tuple(reports), parameters)


def conversions() -> int:
    """How many layers this process has converted or restored; a cache made at another count is stale."""
    return _conversions[0]


def require_native(device: Device | None = None) -> None:
    """Raises ValueError unless the device has FP4 tensor cores that passed the self-check."""
    device = device or probe()
    reason = native_unsupported(device)
    if reason is None and (wrong := why_not_trusted(torch.device(device.torch_device))):
        reason = f"the self-check failed on {device.name}: {wrong}"
    if reason is not None:
        raise ValueError(f"backend native: {reason}. Use emulated, which quantizes to the same bits.")


def _adopt(linear: Any, state: LayerState) -> None:
    _conversions[0] += 1
    linear.__class__ = QuantizedGroup if is_group(linear) else QuantizedLinear
    linear.quantization = state  # type: ignore[assignment]


def _restore(name: str, linear: Any) -> None:
    if not isinstance(linear, QuantizedLinear | QuantizedGroup):
        return
    if type(linear) not in (QuantizedLinear, QuantizedGroup):
        raise ValueError(
            f"convert: {name!r} was wrapped after its conversion and is now {type(linear).__name__}, whose "
            "class cannot be changed. Apply fully_shard and similar wrappers to blocks, not to single layers."
        )
    _conversions[0] += 1
    original = linear.quantization.original
    del linear.quantization
    linear.__class__ = original  # type: ignore[assignment]
