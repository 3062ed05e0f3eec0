"""The weights of a run that an export quantizes, their scales, and the exports that must be refused."""

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fourbits.exchange.fused import differing, fused_groups
from fourbits.exchange.nvfp4_checkpoints import CHECKPOINT_FORMATS, PackedWeight
from fourbits.exchange.outgoing import Quantization, linear_layers
from fourbits.train.forward_weights import (
    ForwardWeight,
    forward_weights,
    input_scale_of,
    packed_weight,
    unsupported_inputs,
    unsupported_nvfp4,
)
from fourbits.train.input_amaxes import input_amaxes
from fourbits.train.load_run import StoredModel

Format = Literal["hf", "compressed-tensors", "modelopt"]
Scales = Literal["trained", "shared", "separate"]
FORMATS: tuple[Format, ...] = ("hf", "compressed-tensors", "modelopt")
SCALES: tuple[Scales, ...] = ("trained", "shared", "separate")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_Weights = dict[str, ForwardWeight]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How a run is exported. Raises ValueError for options that contradict each other."""

    format: Format = "hf"
    #: dtype of all weights that are not quantized
    dtype: str = "bf16"
    #: global scales of projections that servers fuse: those of training, which must agree; one for each
    #: group, by quantizing again; or those of training even if they differ
    scales: Scales = "trained"
    #: validation sequences per source that calibrate the scales of inputs; 0: only weights are quantized
    calibration: int = 32
    #: patterns of layers that are written in dtype although training quantized them
    keep_bf16: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.format not in FORMATS or self.scales not in SCALES or self.dtype not in DTYPES:
            raise ValueError(
                f"export: format must be one of {', '.join(FORMATS)}, scales one of {', '.join(SCALES)}, "
                f"dtype one of {', '.join(DTYPES)}, got {self.format!r}, {self.scales!r}, {self.dtype!r}. "
                "Choose one of each."
            )
        if self.format != "hf" and self.dtype != "bf16":
            raise ValueError(
                f"export: dtype must be bf16 in the {self.format} format, got {self.dtype}. Remove --dtype."
            )
        if self.format == "hf" and (self.keep_bf16 or self.scales != "trained"):
            raise ValueError(
                "export: --keep-bf16 and --scales are for quantized formats, got hf, in which no layer is "
                "quantized. Remove them, or choose another --format."
            )
        if self.calibration < 0:
            raise ValueError(
                f"export: calibration must be at least 0, got {self.calibration}. Pass 0 for no calibration."
            )


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """How an export stores its weights.

    quantization: None for an unquantized export; notes: sentences for the user and the model card.
    """

    quantization: Quantization | None = None
    notes: tuple[str, ...] = ()


def weights_to_export(
    stored: StoredModel, options: ExportOptions, input_scales: Mapping[str, Tensor] | None = None
) -> ExportedWeights:
    """The weights to export. input_scales: those of an earlier export, to check it without measuring again.

    Raises ValueError naming the first layer that the format cannot express, fused projections whose scales
    differ, a pattern that matches nothing, and text that cannot be read for calibration.
    """
    if options.format == "hf":
        return ExportedWeights()
    weights = _expressible(stored, options)
    weights, notes = _with_shared_scales(stored, weights, options)
    reason = unsupported_inputs(weights)
    if options.calibration == 0:
        reason = "calibration is 0"
    if reason is not None:
        notes = (f"W4A16: only weights are quantized, because {reason}", *notes)
    elif input_scales is None:
        found = input_amaxes(stored, options.calibration)
        input_scales = {name: input_scale_of(weight, found[name]) for name, weight in weights.items()}

    def pack(name: str, master: Tensor) -> PackedWeight:
        return packed_weight(weights[name], master)

    def values(name: str, master: Tensor) -> Iterator[Tensor]:
        return (q.dequantize(torch.float32) for q in weights[name].quantized(master))

    quantization = Quantization(
        format=CHECKPOINT_FORMATS[options.format],
        weights=frozenset(weights),
        pack=pack,
        values=values,
        input_scales=None if reason is not None else input_scales,
    )
    return ExportedWeights(quantization, notes)


def _expressible(stored: StoredModel, options: ExportOptions) -> _Weights:
    """The weights to quantize, all of which the formats can express."""
    found = forward_weights(stored.converted("meta"))
    for pattern in options.keep_bf16:
        if not any(fnmatch.fnmatchcase(name, f"{pattern}.weight") for name in found):
            names = ", ".join(name.removesuffix(".weight") for name in list(found)[:3])
            raise ValueError(
                f"export: keep_bf16 must match quantized layers, got {pattern!r}, which matches none of "
                f"{names}, ..."
            )
    kept = [
        name for name in found if any(fnmatch.fnmatchcase(name, f"{p}.weight") for p in options.keep_bf16)
    ]
    weights = {name: weight for name, weight in found.items() if name not in kept}
    reasons = {
        name.removesuffix(".weight"): reason
        for name, weight in weights.items()
        if (reason := unsupported_nvfp4(weight.spec, stored.masters[name].shape[1]))
    }
    if reasons:
        name, reason = next(iter(reasons.items()))
        others = f" (and {len(reasons) - 1} more layers)" if len(reasons) > 1 else ""
        raise ValueError(
            f"export: the {options.format} format cannot express {name}{others}: {reason}. Write such layers "
            "in BF16 with --keep-bf16 NAMES, or everything with --format hf."
        )
    if not weights:
        raise ValueError(
            f"export: the recipe {stored.config.recipe.name!r} leaves no layer to quantize in the "
            f"{options.format} format. Use --format hf."
        )
    return weights


def _with_shared_scales(
    stored: StoredModel, weights: _Weights, options: ExportOptions
) -> tuple[_Weights, tuple[str, ...]]:
    """The weights with the amaxes of fused projections known and, if requested, shared; and notes."""
    groups = [
        tuple(f"{name}.weight" for name in group)
        for group in fused_groups(linear_layers(stored.config.model))
        if any(f"{name}.weight" in weights for name in group)
    ]
    weights = weights | {
        name: weights[name].with_amax(stored.masters[name])
        for group in groups
        for name in group
        if name in weights
    }
    group = differing(groups, _amaxes(weights))
    if group is None:
        return weights, ()
    if options.scales == "separate":
        return weights, (
            "projections that servers such as vLLM fuse (q, k, v; gate, up) have separate global scales: for "
            "readers that keep them apart",
        )
    names = ", ".join(name.removesuffix(".weight") for name in group)
    if not all(name in weights for name in group):
        raise ValueError(
            f"export: {names} are one matrix to servers and must be all quantized or all in BF16. Extend "
            "--keep-bf16, or pass --scales separate for readers that keep them apart."
        )
    if options.scales == "trained":
        raise ValueError(
            f"export: {names} are one matrix with one global scale to servers such as vLLM, and were trained "
            "with different ones. Pass --scales shared to quantize them again with one, or --scales separate "
            "for readers that keep them apart, such as transformers."
        )
    shared = 0
    for group in groups:
        amaxes = [amax for name in group if (amax := weights[name].amax) is not None]
        shared += len(group)
        weights |= {name: replace(weights[name], amax=torch.stack(amaxes).amax()) for name in group}
    return weights, (
        f"{shared} projections that servers fuse (q, k, v; gate, up) were quantized again with one global "
        "scale for each group: their codes and scales are not those of training",
    )


def _amaxes(weights: _Weights) -> dict[str, float]:
    return {name: float(weight.amax) for name, weight in weights.items() if weight.amax is not None}
