"""Groups of rows without a GPU: the bytes of each group by itself in the interpreter, builds for GPUs."""

import pytest
import torch

from fourbits.quant.grouped import unsupported_groups
from fourbits.quant.grouped_layout import most_tiles
from fourbits.quant.kernels import support
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.grouped import group_tiles
from support.every_kernel import of_experts
from support.gpus import SHARED_MEMORY, planning_for
from support.kernel_builds import registers, stack_bytes
from support.triton_interpreter import run

MATRIX_INSTRUCTION = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
#: bytes of a thread's stack that registers may be spilled to
SPILLED = 64


def test_groups_have_the_bytes_of_each_group_by_itself():
    result = run("grouped_cases")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("counts", [(17, 0, 130, 5), (0, 0), (64, 64), (1,) * 9, (0, 63, 65)])
@pytest.mark.parametrize("height", [16, 64, 128])
def test_shapes_bound_the_number_of_tiles(counts, height):
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    most = most_tiles(sum(counts), len(counts), height)
    tiles = group_tiles(offsets, height, most)
    assert len(tiles.entries) == most >= int(tiles.starts[-1])
    assert int(tiles.entries[:, 2].sum()) == sum(counts)
    assert tiles.starts.diff().tolist() == [-(-count // height) for count in counts]


@pytest.mark.parametrize("sm", [90, 100])
def test_kernels_of_experts_are_built_without_spills_and_multiply_by_tma(sm):
    with planning_for(sm):
        launches = [(what, start) for what, starts in of_experts("nvfp4") for start in starts]
        kernels = {start.kernel.fn.__name__ for _, start in launches}
        assert len(kernels) == 6
        for what, start in launches:
            built = start.build(sm)
            ptx, name = built.asm["ptx"], f"{start.kernel.fn.__name__}, {what}"
            assert stack_bytes(built) <= SPILLED, name
            assert built.metadata.shared <= SHARED_MEMORY[sm], name
            if start.kernel.fn.__name__ in ("grouped_rows_kernel", "grouped_sums_kernel"):
                assert "cp.async.bulk.tensor" in ptx, name
                assert MATRIX_INSTRUCTION[sm] in ptx, name


def test_two_programs_that_sum_over_tokens_share_an_sm_of_hopper():
    with planning_for(90):
        (start,) = (
            start
            for _, starts in of_experts("nvfp4")
            for start in starts
            if start.kernel.fn.__name__ == "grouped_sums_kernel"
        )
        built = start.build(90)
    assert 2 * built.metadata.shared <= SHARED_MEMORY[90]
    assert 2 * registers(built) * built.metadata.num_warps * 32 <= 65536


@pytest.mark.parametrize(
    ("spec", "axis", "reason"),
    [
        (OperandSpec(format="fp8"), 1, "fp8 rne has no grouped kernel"),
        (OperandSpec(rounding="ms-eden", rht=32), 0, "ms-eden has no grouped kernel"),
        (OperandSpec(source="forward"), 0, "derived from other operands"),
        (OperandSpec(rht=16), 1, "a transposed copy"),
        (OperandSpec(format="nvfp4-double"), 1, "format nvfp4-double has no kernel"),
    ],
)
def test_what_has_no_grouped_kernel_is_named(monkeypatch, spec, axis, reason):
    monkeypatch.setattr("fourbits.quant.grouped.unsupported_device", lambda device: None)
    assert reason in (unsupported_groups(torch.device("cpu"), [(spec, axis)]) or "")


def test_a_cpu_has_no_grouped_kernels():
    assert support.unsupported_device(torch.device("cpu"))
    assert unsupported_groups(torch.device("cpu"), []) is not None
