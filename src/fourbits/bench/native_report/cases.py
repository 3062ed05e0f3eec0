"""The cases of a report: operands and GEMMs from seeded inputs, which any machine can recreate."""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.quant.tensor import QuantizedTensor
from fourbits.recipe.presets import get_recipe

#: tokens, in_features and out_features: more than one tile each, with remainders
SHAPES = ((256, 384, 512), (272, 1040, 336), (512, 2048, 1024))
#: seed, stream, step, first row and first block of stochastic rounding
_KEY = (1234, 44, 17, 32, 2)
#: number of outputs of a GEMM whose bits are in the report
SAMPLES = 256


class Case(NamedTuple):
    """One GEMM of a linear layer: its operands' specs and contraction axes."""

    gemm: str
    shape: tuple[int, int, int]

    @property
    def name(self) -> str:
        """The case's name, such as `fprop 256x384x512`."""
        return f"{self.gemm} {'x'.join(map(str, self.shape))}"

    @property
    def sides(self) -> tuple[tuple[str, OperandSpec, int], tuple[str, OperandSpec, int]]:
        """(role, spec, axis) of both operands."""
        gemm = getattr(get_recipe("nvfp4"), self.gemm)
        axes = {"fprop": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}[self.gemm]
        return (f"{self.gemm}.lhs", gemm.lhs, axes[0]), (f"{self.gemm}.rhs", gemm.rhs, axes[1])


CASES = tuple(Case(gemm, shape) for shape in SHAPES for gemm in ("fprop", "dgrad", "wgrad"))


def operands(case: Case, device: torch.device) -> tuple[QuantizedTensor, QuantizedTensor]:
    """The operands of a GEMM, quantized on a device."""
    tokens, inputs, outputs = case.shape
    shapes = {
        "fprop": ((tokens, inputs), (outputs, inputs)),
        "dgrad": ((tokens, outputs), (outputs, inputs)),
        "wgrad": ((tokens, outputs), (tokens, inputs)),
    }[case.gemm]
    key = torch.tensor(_KEY, dtype=torch.int64, device=device)
    a, b = (
        quantize(_values(shape, seed).to(device), spec, axis, sr_key=key if spec.stochastic else None)
        for seed, (shape, (_, spec, axis)) in enumerate(zip(shapes, case.sides, strict=True))
    )
    return a, b


def operand_hash(q: QuantizedTensor) -> str:
    """Hash of codes, block scales and global scale."""
    parts = (q.codes, q.block_scale.view(torch.uint8), q.global_scale.reshape(1).view(torch.uint8))
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def output_hash(out: Tensor) -> str:
    """Hash of FP32 outputs."""
    return hashlib.sha256(out.cpu().contiguous().numpy().tobytes()).hexdigest()


def sampled_bits(out: Tensor) -> list[int]:
    """The bits of outputs spread over a GEMM's result, as int32."""
    flat = out.cpu().contiguous().view(torch.int32).flatten()
    step = max(1, flat.numel() // SAMPLES)
    return flat[::step][:SAMPLES].tolist()


def _values(shape: tuple[int, int], seed: int) -> Tensor:
    """Normal numbers in blocks of very different sizes, so that sums show their order: bf16."""
    generator = torch.Generator("cpu").manual_seed(1000 + seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    blocks = [-(-size // 16) for size in shape]
    octaves = torch.randint(-12, 1, blocks, generator=generator, dtype=torch.int32, device="cpu")
    sizes = torch.exp2(octaves.to(torch.float32))
    for axis, size in enumerate(shape):
        sizes = sizes.repeat_interleave(16, axis).narrow(axis, 0, size)
    return (values * sizes).to(torch.bfloat16)
