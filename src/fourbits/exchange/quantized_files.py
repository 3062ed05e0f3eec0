"""Reads quantized checkpoints as floating-point weights, as a starting point for training.

NVFP4 in the formats of modelopt and compressed-tensors, and E4M3 in blocks with FP32 scales, as DeepSeek-V3
and others publish it. Each weight is decoded on access, in FP32; scales of inputs and of caches are skipped.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fourbits.exchange.files import WeightFiles
from fourbits.exchange.nvfp4_checkpoints import (
    BLOCK,
    COMPRESSED_TENSORS,
    MODELOPT,
    CheckpointFormat,
    PackedWeight,
)
from fourbits.exchange.shown import shown

FP8_SCALE = "weight_scale_inv"
_MODELOPT_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
#: scales of quantized KV caches, which training does not use
_CACHE_SCALES = (".k_scale", ".v_scale")
_PACKED = "nvfp4-pack-quantized"


class DecodedFiles(Mapping[str, Tensor]):
    """The weights of quantized files by their names without quantization, fp32 where they were quantized.

    described: the same on the meta device. Raises ValueError naming a tensor whose scales are missing, or
    have a type or shape that does not fit its codes.
    """

    def __init__(self, files: WeightFiles, scheme: "CheckpointFormat | tuple[int, int]") -> None:
        """scheme: a checkpoint format of NVFP4, or the block of E4M3."""
        self._files, self._scheme = files, scheme
        ends = scheme.suffixes if isinstance(scheme, CheckpointFormat) else ("weight", FP8_SCALE)
        self._codes, scales = ends[0], ends[1:]
        marks = (f".{self._codes}", *(f".{end}" for end in scales))
        self._modules = {name.rpartition(".")[0] for name in files if name.endswith(f".{scales[0]}")}
        self._modules |= {
            name.rpartition(".")[0]
            for name, tensor in files.described.items()
            if name.endswith(f".{self._codes}") and tensor.dtype in (torch.uint8, torch.float8_e4m3fn)
        }
        plain = {
            name: tensor
            for name, tensor in files.described.items()
            if not name.endswith(_CACHE_SCALES)
            and (name.rpartition(".")[0] not in self._modules or not name.endswith(marks))
        }
        decoded = {f"{module}.weight": self._shape(module) for module in self._modules}
        self.described = plain | {
            name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in decoded.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        if module == name or module not in self._modules:
            return self._files[name]
        if isinstance(self._scheme, CheckpointFormat):
            return self._scheme.weight(module, self._files).dequantize()
        codes, scales = (self._files[f"{module}.{end}"] for end in (self._codes, FP8_SCALE))
        return codes.float() * _spread(scales.float(), self._scheme, codes.shape)

    @property
    def kind(self) -> str:
        """The name of the checkpoint format, or fp8."""
        return self._scheme.name if isinstance(self._scheme, CheckpointFormat) else "fp8"

    def packed(self, name: str) -> "tuple[PackedWeight, Tensor | None] | None":
        """The codes and scales of a weight, and the scale of its input, fp32 scalar, if the files have one.

        None for a weight that is not stored as NVFP4. name: without quantization.
        """
        module = name.removesuffix(".weight")
        if not isinstance(self._scheme, CheckpointFormat) or module == name or module not in self._modules:
            return None
        scale = f"{module}.{self._scheme.input_scale}"
        of_input = self._scheme.factor(scale, self._files) if scale in self._files else None
        return self._scheme.weight(module, self._files), of_input

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)

    def _shape(self, module: str) -> torch.Size:
        """The shape of a decoded weight."""
        if isinstance(self._scheme, CheckpointFormat):
            codes = self._require(module, self._codes, torch.uint8)
            shape = torch.Size((codes.shape[0], codes.shape[-1] * 2))
            self._require(
                module, self._scheme.block_scale, torch.float8_e4m3fn, (shape[0], shape[1] // BLOCK)
            )
            self._require(module, self._scheme.global_scale, torch.float32, (), (1,))
            return shape
        codes = self._require(module, self._codes, torch.float8_e4m3fn)
        grid = tuple(-(-size // block) for size, block in zip(codes.shape, self._scheme, strict=False))
        self._require(module, FP8_SCALE, torch.float32, grid)
        return codes.shape

    def _require(self, module: str, end: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Tensor:
        """The description of one of a module's tensors. shapes: the shapes allowed; empty: any matrix."""
        name = f"{module}.{end}"
        found = self._files.described.get(name)
        if found is None:
            raise ValueError(
                f"exchange: {name!r} is missing, without which {module!r} has no values. Download or export "
                "the model again."
            )
        fits = tuple(found.shape) in shapes if shapes else found.dim() == 2
        if found.dtype != dtype or not fits:
            wanted = " or ".join(str(list(shape)) for shape in shapes) or "a matrix"
            raise ValueError(
                f"exchange: {name!r} must be {dtype}, {wanted}, got {found.dtype} {list(found.shape)}. "
                "Download or export the model again."
            )
        return found


def scheme_of(config: object) -> "CheckpointFormat | tuple[int, int] | None":
    """The scheme of a model's `quantization_config`; None for a null or empty one.

    Raises ValueError for a scheme that is not supported.
    """
    if not config:
        return None
    found: Mapping[str, Any] = config if isinstance(config, Mapping) else {}
    method = found.get("quant_method")
    if method == "compressed-tensors" and found.get("format") == _PACKED:
        return COMPRESSED_TENSORS
    if method == "modelopt" and found.get("quant_algo") in _MODELOPT_ALGORITHMS:
        return MODELOPT
    if method == "fp8" and (block := _fp8_block(found)) is not None:
        return block
    raise ValueError(
        f"exchange: weights must be floating-point, NVFP4 of compressed-tensors ({_PACKED}) or of modelopt "
        f"({', '.join(_MODELOPT_ALGORITHMS)}), or fp8 with weight_block_size, got {shown(config)}. "
        "Dequantize them first."
    )


def _fp8_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    size = config.get("weight_block_size")
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return (size[0], size[1])
    return None


def _spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    rows, columns = block
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]
