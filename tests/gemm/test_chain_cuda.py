"""The kernels with an FP4 tensor core's sums, without a GPU: the bytes of the reference in Triton's
interpreter, and compiled for every GPU that has TMA.
"""

import pytest
import torch

import fourbits as fb
from fourbits.gemm.kernels import launch_chain
from fourbits.gemm.reference.tensor_core import TENSOR_CORES
from fourbits.gemm.sums import without_host
from support.every_kernel import chains
from support.gpus import SHARED_MEMORY, planning_for
from support.kernel_builds import GPU, registers, stack_bytes
from support.triton_interpreter import run

MATRIX_INSTRUCTION = {
    90: "wgmma.mma_async",
    100: "tcgen05.mma",
    103: "tcgen05.mma",
    120: "mma.sync",
    121: "mma.sync",
}


def test_the_kernels_give_the_bytes_of_the_reference():
    result = run("chain_cases")
    assert result.returncode == 0, result.stdout + result.stderr


def build(name: str, capability: int):
    with planning_for(capability):
        (_, starts), *_ = chains()
        start = next(start for start in starts if start.kernel.__name__ == name)
        return start.build(capability)


@pytest.mark.parametrize("sm", MATRIX_INSTRUCTION)
def test_the_short_way_is_one_dot_from_zero_and_one_addition_toward_zero(sm):
    built = build("chain_kernel", sm)
    ptx = built.asm["ptx"]
    assert "cp.async.bulk.tensor" in ptx
    assert MATRIX_INSTRUCTION[sm] in ptx
    assert "add.rz.f32" in ptx
    assert "fma.rn" not in ptx, "scales are not fused into additions"
    assert built.metadata.shared <= SHARED_MEMORY[sm]
    if sm == 90:
        assert stack_bytes(built) <= 64
        assert registers(built) <= 128, "two programs of 256 threads an SM"


@pytest.mark.parametrize("name", ["chain_operand_kernel", "chain_terms_kernel"])
def test_the_other_kernels_compile(name):
    assert build(name, 90).asm["cubin"]


@pytest.mark.slow
@pytest.mark.parametrize("sm", [90, 100, 120])
def test_every_launch_compiles(sm):
    with planning_for(sm):
        starts = [start for _, of_case in chains() for start in of_case]
        for start in starts:
            assert start.build(sm).metadata.shared <= SHARED_MEMORY[sm]


def test_gpus_without_tma_and_other_instructions_take_the_reference():
    with planning_for(80):
        assert "TMA" in (launch_chain.unsupported_core(TENSOR_CORES["sm_100-fp4"], GPU) or "")
        assert not without_host("sm_100", fb.OperandSpec(), fb.OperandSpec(), GPU)
    with planning_for(90):
        assert launch_chain.unsupported_core(TENSOR_CORES["sm_103-fp4"], GPU) is None
        assert "tensor cores have one" in (
            launch_chain.unsupported_core(TENSOR_CORES["sm_90-bf16"], GPU) or ""
        )
        assert without_host("sm_100", fb.OperandSpec(), fb.OperandSpec(), GPU)
        assert not without_host("exact", fb.OperandSpec(), fb.OperandSpec(), GPU)
        assert without_host("fp32", fb.OperandSpec(), fb.OperandSpec(), torch.device("cpu"))
