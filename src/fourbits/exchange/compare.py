"""Reads an exported folder back and compares every tensor, bit for bit, with the weights to export.

The safetensors library reads the files, and a table of the sixteen E2M1 values decodes the codes; the export
uses neither.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fourbits.exchange.files import WeightFiles
from fourbits.exchange.outgoing import Outgoing, Quantization, slabs


@dataclass(frozen=True, slots=True)
class Compared:
    """Counts of weights that are equal. tensors: weights in floating point; quantized: weights in NVFP4."""

    tensors: int
    quantized: int


def compare(folder: Path, outgoing: Outgoing) -> Compared:
    """Read a folder's weights and compare them. Raises ValueError naming the first tensor that differs."""
    files, quantized = WeightFiles(folder), 0
    expected: dict[str, Tensor] = {}
    for name in outgoing.names:
        expected |= outgoing.described(name)
    for theirs in sorted({*files, *expected}):
        found = files.described.get(theirs)
        if theirs not in expected or found is None or _kind(found) != _kind(expected[theirs]):
            wanted = _kind(expected[theirs]) if theirs in expected else "no such tensor"
            got = "none" if found is None else _kind(found)
            raise ValueError(f"{folder}: {theirs!r} must be {wanted}, got {got}. Export the model again.")
    for name, theirs in outgoing.names.items():
        if outgoing.quantization is not None and outgoing.quantizes(name):
            _require_same_quantized(folder, files, outgoing, outgoing.quantization, name)
            quantized += 1
        else:
            found = files[theirs]
            first = 0
            for rows in slabs(outgoing.master(name)):
                last = first + len(rows)
                _require_same(folder, theirs, found[first:last], rows.to(outgoing.dtype))
                first = last
    return Compared(len(outgoing.names) - quantized, quantized)


def _require_same_quantized(
    folder: Path, files: WeightFiles, outgoing: Outgoing, quantization: Quantization, name: str
) -> None:
    checkpoint, module = quantization.format, outgoing.names[name].removesuffix(".weight")
    weight = checkpoint.weight(module, files)
    first = 0
    for values in quantization.values(name, outgoing.master(name)):
        last = first + len(values)
        _require_same(folder, module, weight.rows(first, last).dequantize(), values)
        first = last
    if quantization.input_scales is not None:
        scale = f"{module}.{checkpoint.input_scale}"
        _require_same(folder, scale, checkpoint.factor(scale, files), quantization.input_scales[name])


def _require_same(folder: Path, name: str, found: Tensor, expected: Tensor) -> None:
    """Whether the bits are equal: -0 differs from 0."""
    as_bits = torch.int32 if expected.dtype == torch.float32 else torch.int16
    differing = int((found.contiguous().view(as_bits) != expected.cpu().contiguous().view(as_bits)).sum())
    if differing:
        raise ValueError(
            f"{folder}: {name!r} differs from the model in {differing} of {expected.numel()} values. Export "
            "the model again."
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
