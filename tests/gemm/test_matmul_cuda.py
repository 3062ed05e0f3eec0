"""The GEMM kernels without a GPU: within the bound in Triton's interpreter, compiled for every GPU."""

import re

import pytest
import torch

from fourbits.gemm.kernels import launch_fp8, tiles
from fourbits.gemm.kernels.launch_bf16 import OperandLayout, PointerGemm, TmaGemm, bf16_gemm
from fourbits.quant.operand import OperandSpec
from fourbits.quant.tensor import ExactOperand
from support.gpus import SHARED_MEMORY, planning_for
from support.kernel_builds import GPU, on_gpu, recording
from support.triton_interpreter import run

MATRIX_INSTRUCTION = {90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
#: B300 and GB10, whose GEMMs are those of B200 and of RTX 50
VARIANTS = {103: "tcgen05.mma", 121: "mma.sync"}
ONE = torch.ones(())


@pytest.fixture(params=[90, 100, 120])
def sm(request):
    """The compute capability that is planned and built for."""
    with planning_for(request.param):
        yield request.param


def launches(a, a_axis, b, b_axis, out_dtype, bias=None):
    """The plan of a GEMM, and what it would launch."""
    layouts = (
        OperandLayout(tuple(x.shape), x.stride(0), axis, True) for x, axis in ((a, a_axis), (b, b_axis))
    )
    gemm = bf16_gemm(*layouts, out_dtype, None if bias is None else bias.dtype, GPU)
    with recording() as starts:
        gemm(a, b, ONE, ONE, bias)
    return gemm, starts


def test_gemms_stay_within_the_bound():
    result = run("matmul_cases")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("a_axis", "b_axis", "out"), [(1, 1, torch.bfloat16), (0, 0, torch.float32)])
def test_tiles_arrive_by_tma_and_meet_the_matrix_instruction(sm, a_axis, b_axis, out):
    gemm, (start,) = launches(on_gpu(4096, 4096), a_axis, on_gpu(4096, 4096), b_axis, out)
    assert isinstance(gemm, TmaGemm)
    built = start.build(sm)
    assert "cp.async.bulk.tensor" in built.asm["ptx"]
    assert MATRIX_INSTRUCTION[sm] in built.asm["ptx"]
    assert built.metadata.shared <= SHARED_MEMORY[sm]


@pytest.mark.parametrize("variant", VARIANTS)
def test_b300_and_gb10_have_the_matrix_instruction_of_their_generation(variant):
    with planning_for(variant):
        _, (start,) = launches(on_gpu(4096, 4096), 1, on_gpu(4096, 4096), 1, torch.bfloat16)
        built = start.build(variant)
    assert VARIANTS[variant] in built.asm["ptx"]
    assert built.metadata.shared <= SHARED_MEMORY[variant]


def test_fp8_blocks_meet_the_fp8_matrix_instruction():
    row, square = OperandSpec(format="fp8"), OperandSpec(format="fp8", block=(128, 128))
    a, b = (
        ExactOperand(on_gpu(512, 512, dtype=torch.float8_e4m3fn), torch.ones(rows, 4), 1, spec)
        for rows, spec in ((512, row), (4, square))
    )
    with planning_for(90), recording() as starts:
        launch_fp8.matmul(a, b, torch.bfloat16, None)
    (start,) = starts
    ptx = start.build(90).asm["ptx"]
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3") == 4, "128 of the contraction"
    of_a_thread = 128 * 128 // (8 * 32)
    assert len(re.findall(r"\badd\.(?:rn\.)?f32", ptx)) >= 3 * of_a_thread, "sums stay in the tensor core"


@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 40, 50), (16, 16, 1)])
def test_rows_that_tma_cannot_address_take_ordinary_loads(sm, shape):
    M, N, K = shape
    gemm, (start,) = launches(on_gpu(K, M), 0, on_gpu(N, K), 1, torch.bfloat16)
    assert isinstance(gemm, PointerGemm)
    built = start.build(sm)
    assert built.asm["cubin"]
    assert "cp.async.bulk" not in built.asm["ptx"]


def test_a_long_contraction_is_split_and_its_parts_are_added(sm):
    _, starts = launches(on_gpu(32768, 512), 0, on_gpu(32768, 2048), 0, torch.float32)
    product, addition = starts
    assert product.arguments["SPLIT_K"] == addition.arguments["SPLIT_K"] > 1
    assert product.build(sm).metadata.shared <= SHARED_MEMORY[sm]
    assert addition.build(sm).asm["cubin"]


def test_the_tile_follows_the_shape_not_the_clock():
    gpu = tiles.GpuModel(132, True, tiles._LARGE_MEMORY)
    divisions = {
        (8192, 4096, 4096): ((128, 256), 1),
        (4096, 512, 2048): ((128, 128), 1),
        (512, 512, 512): ((64, 128), 1),
        (32768, 640, 1792): ((128, 128), 1),  # two programs an SM: three columns of 256 would be half empty
    }
    for shape, (tile, parts) in divisions.items():
        work = tiles.best_work(gpu, *shape, columns=False)
        assert (work.tile[:2], work.split_k) == (tile, parts), shape


def test_weight_gradients_of_narrow_layers_are_split_so_that_they_fill_the_sms():
    gpu = tiles.GpuModel(132, True, tiles._LARGE_MEMORY)
    for shape, parts in {(512, 2048, 32768): 4, (640, 640, 32768): 8, (1792, 640, 32768): 3}.items():
        work = tiles.best_work(gpu, *shape, columns=True)
        assert (work.tile[:2], work.split_k) == ((128, 256), parts), shape
