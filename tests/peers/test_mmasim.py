"""mmasim (arXiv:2511.10909), the model of its authors, live: every instruction, byte for byte."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fourbits.gemm.reference.tensor_core import TENSOR_CORES, tensor_core_dot
from support.peer_inputs import peer

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

CASES = 100_000
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
#: instruction of ours -> (class, architecture, name there), dtypes of a and b, dtype and number of the scales
INSTRUCTIONS: dict[str, tuple[tuple[str, str, str], tuple[torch.dtype, torch.dtype], Any]] = {
    "sm_100-fp4": (
        ("TCGen05MMABlockScale", "Blackwell", "m128n8k64.kind::mxf4nvf4.block16.f32.e2m1.e2m1.ue4m3"),
        (torch.uint8, torch.uint8),
        (E4M3, 4),
    ),
    "sm_100-fp4 mx": (
        ("TCGen05MMABlockScale", "Blackwell", "m128n8k64.kind::mxf4.block32.f32.e2m1.e2m1.ue8m0"),
        (torch.uint8, torch.uint8),
        (E8M0, 2),
    ),
    "sm_100-fp4 sm_120": (
        ("MMABlockScale", "RTX Blackwell", "m16n8k64.kind::mxf4nvf4.block16.f32.e2m1.e2m1.f32.ue4m3"),
        (torch.uint8, torch.uint8),
        (E4M3, 4),
    ),
    "sm_100-mxfp8": (
        ("TCGen05MMABlockScale", "Blackwell", "m128n8k32.kind::mxf8f6f4.block32.f32.e4m3.e5m2.ue8m0"),
        (E4M3, E5M2),
        (E8M0, 1),
    ),
    "sm_100-fp8": (("TCGen05MMA", "Blackwell", "m128n8k32.kind::f8f6f4.f32.e4m3.e5m2"), (E4M3, E5M2), None),
    "sm_100-bf16": (
        ("TCGen05MMA", "Blackwell", "m128n8k16.kind::f16.f32.bf16.bf16"),
        (torch.bfloat16, torch.bfloat16),
        None,
    ),
    "sm_90-bf16": (("WGMMA", "Hopper", "m64n8k16.f32.f16.f16"), (torch.float16, torch.float16), None),
    "sm_90-fp8": (("WGMMA", "Hopper", "m64n8k32.f32.e5m2.e4m3"), (E5M2, E4M3), None),
    "sm_89-fp8": (("MMA", "Ada Lovelace", "m16n8k16.f32.e4m3.e5m2.f32"), (E4M3, E5M2), None),
    "sm_89-bf16": (
        ("MMA", "Ada Lovelace", "m16n8k8.f32.bf16.bf16.f32"),
        (torch.bfloat16, torch.bfloat16),
        None,
    ),
    "sm_80-bf16": (("MMA", "Ampere", "m16n8k8.f32.bf16.bf16.f32"), (torch.bfloat16, torch.bfloat16), None),
}


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bit pattern, NaN and infinity included; of E2M1, any code."""
    found = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return found.squeeze(-1) & 15 if dtype == torch.uint8 else found.view(dtype).squeeze(-1)


def like_data(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype == torch.uint8:
        return torch.randint(0, 16, shape, dtype=torch.uint8)
    if dtype == E8M0:
        return torch.randint(118, 137, shape, dtype=torch.uint8).view(dtype)
    return torch.randn(shape).abs().to(dtype) if shape[-1] < 8 else torch.randn(shape).to(dtype)


def cancelling(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Few values with both signs, so that sums are far smaller than their terms; scales in any octave."""
    if dtype == torch.uint8:
        return torch.randint(0, 2, shape, dtype=torch.uint8) * 8 + 7
    if shape[-1] < 8:
        return random_bytes(shape, dtype)
    return (torch.randint(0, 2, shape) * 2.0 - 1.0).to(dtype)


@pytest.mark.parametrize("make", [random_bytes, like_data, cancelling])
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_results_are_equal_bytes(name, make):
    (kind, architecture, shape), dtypes, scales = INSTRUCTIONS[name]
    core = TENSOR_CORES[name.split()[0]]
    a, b = (make((CASES, core.products), dtype) for dtype in dtypes)
    c = random_bytes((CASES,), torch.float32) if make is random_bytes else torch.randn(CASES) * 100
    given = [make((CASES, scales[1]), scales[0]) for _ in range(2)] if scales else []
    # its operands hold two codes per byte, the first in the high nibble
    packed = [x[:, ::2] << 4 | x[:, 1::2] if x.dtype == torch.uint8 else x for x in (a, b)]
    expected = getattr(peer("mmasim.nv_ptx"), kind)(architecture, shape).dpa(*packed, c, *given)
    found = tensor_core_dot(a, b, c, core, *given)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
