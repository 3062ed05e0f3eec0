"""The fused products without a card: within the bound in Triton's interpreter, compiled for every card."""

import re
from types import SimpleNamespace

import pytest
import torch

from fourbits.gemm.kernels import start as matmul_triton
from fourbits.gemm.kernels import tiles as matmul_tiles
from support.kernel_builds import on_card, recording
from support.triton_interpreter import run

MATRIX_INSTRUCTION = {90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
SHARED_MEMORY = {90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
ONE = torch.ones(())


@pytest.fixture(params=[90, 100, 120])
def card(request, monkeypatch):
    facts = SimpleNamespace(
        multi_processor_count=132,
        major=request.param // 10,
        shared_memory_per_block_optin=SHARED_MEMORY[request.param],
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(matmul_triton, "card_of", matmul_triton.card_of.__wrapped__)
    monkeypatch.setattr(torch.Tensor, "device", SimpleNamespace(type="cuda"))
    return request.param


def test_fused_products_stay_within_the_bound():
    result = run("matmul_cases")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("a_axis", "b_axis", "out"), [(1, 1, torch.bfloat16), (0, 0, torch.float32)])
def test_tiles_arrive_by_bulk_copies_and_meet_the_matrix_instruction(card, a_axis, b_axis, out):
    with recording(matmul_triton) as starts:
        a, b = on_card(4096, 4096), on_card(4096, 4096)
        matmul_triton.matmul(a, a_axis, b, b_axis, (ONE, ONE), on_card(4096, 4096, dtype=out), None, False)
    (start,) = starts
    built = start.build(card)
    assert "cp.async.bulk.tensor" in built.asm["ptx"]
    assert MATRIX_INSTRUCTION[card] in built.asm["ptx"]
    assert built.metadata.shared <= SHARED_MEMORY[card]


def test_fp8_blocks_meet_the_fp8_matrix_instruction():
    a, b = (
        matmul_triton.Blocks(on_card(512, 512, dtype=torch.float8_e4m3fn), torch.ones(rows, 4), 512 // rows)
        for rows in (512, 4)
    )
    with recording(matmul_triton) as starts:
        matmul_triton.matmul_fp8(a, b, on_card(512, 512), None, False)
    (start,) = starts
    ptx = start.build(90).asm["ptx"]
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3") == 4, "128 of the contraction"
    of_a_thread = 128 * 128 // (8 * 32)
    assert len(re.findall(r"\badd\.(?:rn\.)?f32", ptx)) >= 3 * of_a_thread, "sums stay in the tensor core"


@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 40, 50), (16, 16, 1)])
def test_rows_that_bulk_copies_cannot_address_take_ordinary_loads(card, shape):
    M, N, K = shape
    with recording(matmul_triton) as starts:
        matmul_triton.matmul(on_card(K, M), 0, on_card(N, K), 1, (ONE, ONE), on_card(M, N), None, False)
    (start,) = starts
    assert start.build(card).asm["cubin"]
    assert "cp.async.bulk" not in start.build(card).asm["ptx"]


def test_a_long_contraction_is_cut_and_its_parts_are_added(card):
    with recording(matmul_triton) as starts:
        out = on_card(512, 2048, dtype=torch.float32)
        matmul_triton.matmul(on_card(32768, 512), 0, on_card(32768, 2048), 0, (ONE, ONE), out, None, True)
    product, addition = starts
    assert product.arguments["CUTS"] == addition.arguments["CUTS"] > 1
    assert product.build(card).metadata.shared <= SHARED_MEMORY[card]
    assert addition.build(card).asm["cubin"]


def test_the_tile_follows_the_shape_not_the_clock():
    card = matmul_tiles.Card(132, True, matmul_tiles._LARGE_MEMORY)
    divisions = {
        (8192, 4096, 4096): ((128, 256), 1),
        (4096, 512, 2048): ((128, 128), 1),
        (512, 512, 512): ((64, 128), 1),
        (512, 2048, 32768): ((128, 256), 4),  # the weight gradient of a narrow layer
    }
    for shape, (tile, cuts) in divisions.items():
        work = matmul_tiles.best_work(card, *shape)
        assert (work.tile[:2], work.cuts) == (tile, cuts), shape
