"""mmasim (arXiv:2511.10909), the model of its authors, live: every instruction, byte for byte."""

from typing import Any

import pytest
import torch

from fourbits.gemm.reference.tensor_core import TENSOR_CORES, tensor_core_dot
from support.peer_inputs import peer
from support.tensor_core_cases import E4M3, E5M2, E8M0, cancelling, like_data, random_bytes

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

CASES = 100_000
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
