"""The two public formats of NVFP4 checkpoints: modelopt's and compressed-tensors'.

Both hold uint8 codes [N, K/2] (even element in the low nibble), E4M3 scales [N, K/16] and an FP32 scale per
tensor. They differ in names and in the meaning of the FP32 scales:

                       modelopt                  compressed-tensors
    codes              X.weight                  X.weight_packed
    block scales       X.weight_scale            X.weight_scale
    of the weight      X.weight_scale_2 [],      X.weight_global_scale [1],
                       a factor                  a divisor
    of the input       X.input_scale [],         X.input_global_scale [1],
                       a factor                  a divisor
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

BLOCK = 16
#: E2M1 by code; the upper eight are negative
E2M1 = torch.tensor(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float32, device="cpu"
)
#: the two elements of a byte, [256, 2]
_PAIRS = torch.stack((E2M1.repeat(16), E2M1.repeat_interleave(16)), -1)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """An NVFP4 weight [N, K] in 1x16 blocks: value = E2M1 code * block_scale * global_scale."""

    #: uint8 [N, K / 2]
    codes: Tensor
    #: float8_e4m3fn [N, K / 16]
    block_scale: Tensor
    #: fp32 scalar; a factor, like all scales here
    global_scale: Tensor

    def rows(self, first: int, last: int) -> "PackedWeight":
        """Rows first to last - 1 of this weight."""
        return PackedWeight(self.codes[first:last], self.block_scale[first:last], self.global_scale)

    def dequantize(self) -> Tensor:
        """The values, fp32 [N, K]: fp32(fp32(code * block_scale) * global_scale)."""
        elements = _PAIRS[self.codes.int()].view(*self.block_scale.shape, BLOCK)
        scaled = elements * self.block_scale.float()[..., None]
        return scaled.view(len(self.codes), -1) * self.global_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFormat:
    """How a checkpoint stores NVFP4. Fields are suffixes of tensor names, after the module's and a dot."""

    name: Literal["modelopt", "compressed-tensors"]
    codes: str
    block_scale: str
    global_scale: str
    input_scale: str
    #: whether FP32 scales are stored as divisors, of shape [1]
    divides: bool

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of all tensor names."""
        return (self.codes, self.block_scale, self.global_scale, self.input_scale)

    def described(self, module: str, shape: torch.Size, with_input: bool) -> dict[str, Tensor]:
        """Names, dtypes and shapes, on the meta device, of a module's tensors. shape: [N, K]."""
        rows, columns = shape
        one = (1,) if self.divides else ()
        scales = [self.global_scale, *([self.input_scale] if with_input else [])]
        found = {
            self.codes: torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta"),
            self.block_scale: torch.empty(rows, columns // BLOCK, dtype=torch.float8_e4m3fn, device="meta"),
            **{scale: torch.empty(one, dtype=torch.float32, device="meta") for scale in scales},
        }
        return {f"{module}.{end}": tensor for end, tensor in found.items()}

    def tensors(self, module: str, weight: PackedWeight, input_scale: Tensor | None) -> dict[str, Tensor]:
        """A module's tensors by name, as in `described`. input_scale: fp32 scalar, a factor."""
        scales = {self.global_scale: weight.global_scale}
        if input_scale is not None:
            scales[self.input_scale] = input_scale
        stored = {
            end: _reciprocal(scale).reshape(1) if self.divides else scale for end, scale in scales.items()
        }
        found = {self.codes: weight.codes, self.block_scale: weight.block_scale, **stored}
        return {f"{module}.{end}": tensor for end, tensor in found.items()}

    def weight(self, module: str, tensors: Mapping[str, Tensor]) -> PackedWeight:
        """The weight that a module's tensors store."""
        codes, block_scale = (tensors[f"{module}.{end}"] for end in (self.codes, self.block_scale))
        return PackedWeight(codes, block_scale, self.factor(f"{module}.{self.global_scale}", tensors))

    def factor(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """A stored FP32 scale as a factor, fp32 scalar."""
        scale = tensors[name].float().reshape(())
        return 1.0 / scale if self.divides else scale


MODELOPT = CheckpointFormat(
    name="modelopt",
    codes="weight",
    block_scale="weight_scale",
    global_scale="weight_scale_2",
    input_scale="input_scale",
    divides=False,
)
COMPRESSED_TENSORS = CheckpointFormat(
    name="compressed-tensors",
    codes="weight_packed",
    block_scale="weight_scale",
    global_scale="weight_global_scale",
    input_scale="input_global_scale",
    divides=True,
)
CHECKPOINT_FORMATS = {each.name: each for each in (MODELOPT, COMPRESSED_TENSORS)}


def _reciprocal(scale: Tensor) -> Tensor:
    """1 / scale. Its reciprocal is exactly the scale again, because scales in training are reciprocals.

    Raises ValueError for the scale of a tensor with an amax below 7.9e-36.
    """
    if not (divisor := 1.0 / scale).isfinite():
        raise ValueError(
            f"the reciprocal of its global scale {float(scale)} must be finite in this format, which divides "
            "by it: its largest magnitude is below 7.9e-36. Export it in BF16, or in the format of modelopt."
        )
    return divisor


def quantization_config(
    checkpoint: CheckpointFormat, kept: Sequence[str], with_input: bool
) -> dict[str, Any]:
    """The `quantization_config` of config.json. kept: names of the linear layers in BF16.

    with_input: readers quantize the inputs of layers, too (W4A4); else only weights are quantized (W4A16).
    """
    if checkpoint is MODELOPT:
        group = _modelopt_args()
        groups = {"weights": group, **({"input_activations": group} if with_input else {})}
        return {
            "config_groups": {"group_0": {**groups, "targets": ["Linear"]}},
            "ignore": list(kept),
            "quant_algo": _algorithm(with_input),
            "producer": _PRODUCER,
            "quant_method": "modelopt",
        }
    args = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": BLOCK,
        "symmetric": True,
        "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": "torch.float8_e4m3fn",
    }
    group = {
        "targets": ["Linear"],
        "weights": args | {"dynamic": False},
        # Readers compute block scales from the tokens at hand; only the global scale is calibrated.
        "input_activations": args | {"dynamic": "local"} if with_input else None,
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }
    return {
        "config_groups": {"group_0": group},
        "format": "nvfp4-pack-quantized",
        "ignore": list(kept),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def hf_quant_config(kept: Sequence[str], with_input: bool) -> dict[str, Any]:
    """The content of modelopt's hf_quant_config.json, which older readers take in place of config.json's."""
    return {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": _algorithm(with_input),
            "kv_cache_quant_algo": None,
            "group_size": BLOCK,
            "exclude_modules": list(kept),
        },
    }


# The format's own name and version, which some readers require; the `fourbits` entry says who wrote it.
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def _algorithm(with_input: bool) -> str:
    return "NVFP4" if with_input else "W4A16_NVFP4"


def _modelopt_args() -> dict[str, Any]:
    return {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
