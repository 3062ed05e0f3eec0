"""The launches of a linear layer on FP4 tensor cores, forward and backward, and the time they should take.

Bytes and FLOPs are counted from the code as it is; times are predicted from a data sheet and from the
declared shares of `rates.py`, never measured. docs/blackwell.md shows them beside BF16's.
"""

from typing import NamedTuple

from fourbits.plan.gpus import Gpu
from fourbits.plan.rates import DECLARED, Rates
from fourbits.quant.operand import OperandSpec
from fourbits.recipe.presets import get_recipe

#: the recipe that is planned, all of whose GEMMs run on FP4 tensor cores
RECIPE = "nvfp4"
#: role -> the tensor it is quantized from, and the bytes of its elements
_SOURCES = {
    "fprop.lhs": ("X", 2.0),
    "fprop.rhs": ("W", 4.0),
    "dgrad.lhs": ("dY", 2.0),
    "dgrad.rhs": ("W", 4.0),
    "wgrad.lhs": ("dY", 2.0),
    "wgrad.rhs": ("X", 2.0),
}
#: bytes moved per block scale between the quantizer and cuBLAS: padded by zeros and a copy, then permuted
_SWIZZLED = 5.0


class Launch(NamedTuple):
    """Kernels of one kind, one after the other."""

    name: str
    kernels: int
    #: read plus written
    bytes: float
    flops: float = 0.0
    #: the format of the tensor cores, and whether random bits are drawn
    unit: str = ""
    stochastic: bool = False


class Shape(NamedTuple):
    """The shape of a linear layer and its input."""

    tokens: int
    inputs: int
    outputs: int

    def elements(self, tensor: str) -> int:
        """Number of elements of X, W or dY."""
        tokens, inputs, outputs = self
        return {"X": tokens * inputs, "W": inputs * outputs, "dY": tokens * outputs}[tensor]


def native_launches(shape: Shape) -> list[Launch]:
    """What a step of the layer launches natively, in order."""
    table = get_recipe(RECIPE).table
    found: list[Launch] = []
    for gemm in ("fprop", "dgrad", "wgrad"):
        for side in ("lhs", "rhs"):
            found += _operand(f"{gemm}.{side}", table.operand(f"{gemm}.{side}"), shape)
        found.append(_gemm(gemm, shape, "nvfp4"))
    return found


def bf16_launches(shape: Shape) -> list[Launch]:
    """What the same layer launches in BF16 with FP32 weights and gradients."""
    cast = Launch("W to BF16", 1, 6.0 * shape.elements("W"))
    return [cast, *(_gemm(gemm, shape, "bf16") for gemm in ("fprop", "dgrad", "wgrad"))]


def seconds(launch: Launch, gpu: Gpu, rates: Rates = DECLARED) -> float:
    """Predicted seconds: the longer of the times of bytes and FLOPs, and the time between kernels."""
    copying = gpu.bandwidth * rates.copy
    if launch.unit:
        peak = gpu.peak(launch.unit)
        assert peak is not None, f"{gpu.name} has tensor cores for {launch.unit}"
        return rates.launch + max(
            launch.bytes / copying, launch.flops / (peak * rates.gemm_share(launch.unit))
        )
    quantizing = rates.quantize_stochastic if launch.stochastic else rates.quantize
    share = quantizing if launch.name.startswith("codes") else 1.0
    return launch.kernels * rates.launch + launch.bytes / (copying * share)


def predicted(shape: Shape, gpu: Gpu, rates: Rates = DECLARED) -> tuple[float, float]:
    """Seconds of a step in BF16 and on FP4 tensor cores."""
    bf16, native = (
        sum(seconds(launch, gpu, rates) for launch in launches)
        for launches in (bf16_launches(shape), native_launches(shape))
    )
    return bf16, native


def _operand(role: str, spec: OperandSpec, shape: Shape) -> list[Launch]:
    tensor, width = _SOURCES[role]
    elements, size = shape.elements(tensor), spec.block_size
    assert size is not None
    rows = elements / 16  # scales as cuBLAS takes them, one per row of a block
    repeats = size[0] > 1
    where = f"{tensor} for {role.partition('.')[0].capitalize()}"
    return [
        Launch(f"amax of {where}", 1, width * elements),
        Launch(
            f"codes of {where}",
            1,
            (width + 0.5 + 1 / (size[0] * size[1])) * elements,
            stochastic=spec.rounding == "sr",
        ),
        Launch(f"scales of {where}, swizzled", 3 + repeats, (_SWIZZLED + 2.0 * repeats) * rows),
    ]


def _gemm(name: str, shape: Shape, unit: str) -> Launch:
    tensors = {"fprop": ("X", "W", "dY"), "dgrad": ("dY", "W", "X"), "wgrad": ("dY", "X", "W")}[name]
    read = sum((2.0 if unit == "bf16" else 0.5 + 1 / 16) * shape.elements(tensor) for tensor in tensors[:2])
    written = (4.0 if name == "wgrad" else 2.0) * shape.elements(tensors[2])
    tokens, inputs, outputs = shape
    return Launch(f"GEMM of {name.capitalize()}", 1, read + written, 2.0 * tokens * inputs * outputs, unit)
