"""The fused quantizers compiled for every card: instructions that must be there, and that must not."""

import re

import pytest
import torch
import triton
import triton.language as tl

from fourbits.quant.kernels import start_exact as fused_triton
from fourbits.quant.kernels import start_packed as fused_codes_triton
from fourbits.quant.kernels import start_stats as fused_notes_triton
from fourbits.quant.kernels.kernel_config import NoiseKey, fp8_plan, plan
from fourbits.quant.kernels.words_triton import code_words
from fourbits.quant.operand import OperandSpec
from support.kernel_builds import Start, on_card, recording, registers, stack_bytes

CARDS = [90, 100, 120]
KEY = NoiseKey(torch.zeros(5, dtype=torch.int64))
AMAX = torch.ones(512)


def ptx_of(starts, card):
    (start,) = starts
    built = start.build(card)
    assert built.asm["cubin"]
    return built.asm["ptx"]


@pytest.mark.parametrize("card", CARDS)
def test_both_operands_of_a_gradient_round_as_written(card):
    row, column = plan(OperandSpec(rounding="sr"), 1), plan(OperandSpec(rounding="sr", rht=16), 0)
    with recording(fused_triton, fused_codes_triton) as starts:
        fused_triton.exact(on_card(64, 2048), row, column, (AMAX, AMAX), (KEY, KEY))
    ptx = ptx_of(starts, card)
    assert not re.search(r"\bfma\.", ptx), "a multiplication and an addition were contracted"
    assert ".ftz" not in ptx, "subnormals are flushed"
    assert "div.rn.f32" in ptx
    assert "div.full" not in ptx, "a division is approximate"
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx), "loads are narrower than 16 bytes"


@pytest.mark.parametrize("card", CARDS)
def test_what_policies_learn_needs_no_second_operand(card):
    """A reduction over the column operand made the compiler transform twice, in another arrangement."""
    row, column = plan(OperandSpec(rounding="sr"), 1), plan(OperandSpec(rounding="sr", rht=16), 0)
    additions = []
    for observe in (False, True):
        with recording(fused_triton) as starts:
            x = on_card(64, 2048)
            *_, seen = fused_triton.exact(x, row, column, (AMAX, AMAX), (KEY, KEY), observe=observe)
        additions.append(len(re.findall(r"\b(?:add|sub)\.(?:rn\.)?f32", ptx_of(starts, card))))
    assert additions[0] >= 64 * 4, "a thread's 64 values take four rounds of additions and subtractions"
    assert additions[1] == additions[0]
    with recording(fused_notes_triton) as starts:
        into = torch.zeros(6), torch.zeros(6, 4, dtype=torch.int64)
        assert seen is not None
        fused_notes_triton.notes(seen, (5, 7), (4, 5), into)
    assert ptx_of(starts, card)


def test_six_programs_that_learn_for_policies_share_a_processor():
    row, column = plan(OperandSpec(rounding="sr"), 1), plan(OperandSpec(rounding="sr", rht=16), 0)
    with recording(fused_triton) as starts:
        fused_triton.exact(on_card(64, 2048), row, column, (AMAX, AMAX), (KEY, KEY), observe=True)
    built = starts[0].build(90)
    assert 6 * starts[0].arguments["num_warps"] * 32 * registers(built) <= 65536
    assert stack_bytes(built) <= 4 * 8, "more than a few registers are spilled for the sixth program"


@pytest.mark.parametrize("card", CARDS)
def test_weights_choose_four_or_six(card):
    choosing = plan(OperandSpec(block=(16, 16), source="bf16", scale_rule="4over6-mse"), 1)
    with recording(fused_triton, fused_codes_triton) as starts:
        fused_triton.exact(on_card(64, 2048, dtype=torch.float32), choosing, None, (AMAX, None), (None, None))
    ptx = ptx_of(starts, card)
    assert not re.search(r"\bfma\.", ptx), "a multiplication and an addition were contracted"


@pytest.mark.parametrize("card", CARDS)
def test_scales_are_corrected_by_sums_as_written(card):
    spec = OperandSpec(rounding="ms-eden", rht=128, rht_signs="per-call")
    with recording(fused_triton, fused_codes_triton) as starts:
        x = on_card(256, 2048)
        fused_triton.amax_parts(x, None, plan(spec, 0), KEY)
        fused_triton.exact(x, None, plan(spec, 0), (None, AMAX), (None, KEY))
        fused_codes_triton.packed(x, plan(spec, 0, packed=True), AMAX, KEY, swizzled=True)
    for start in starts:
        built = start.build(card)
        assert not re.search(r"\bfma\.", built.asm["ptx"]), "a multiplication and an addition were contracted"
        assert built.metadata.shared <= 99 << 10, "more shared memory than sm_120 has"
        assert start.arguments["ROWS"] == 128


@pytest.mark.parametrize("card", CARDS)
def test_packed_operands_are_unpacked_by_wide_accesses(card):
    with recording(fused_triton, fused_codes_triton) as starts:
        codes, scales = on_card(64, 1024, dtype=torch.uint8), on_card(64, 128, dtype=torch.uint8)
        fused_codes_triton.unpacked(codes, scales, (1, 16), power_of_two=False)
    assert re.search(r"st\.global\S*\.v4\.b32", ptx_of(starts, card)), "stores are narrower than 16 bytes"


@pytest.mark.parametrize("card", CARDS)
def test_an_input_that_stays_packed_is_written_and_read_by_words(card):
    row, column = plan(OperandSpec(), 1), plan(OperandSpec(rht=16), 0, packed=True)
    with recording(fused_triton, fused_codes_triton) as starts:
        x = on_card(64, 2048)
        made = fused_triton.exact(x, row, column, (AMAX, AMAX), (None, None), packed_column=True)
        kept = made[1]
        assert isinstance(kept, fused_triton.TurnedCodes)
        codes = kept.codes.as_subclass(type(x))
        fused_codes_triton.unpacked_turned(codes, kept.scales, 16, power_of_two=False)
    writing, reading = (start.build(card).asm["ptx"] for start in starts)
    assert "st.global.b8" not in writing + reading, "codes are written a byte at a time"
    assert "ld.global.b8" not in reading, "codes are read a byte at a time"


@pytest.mark.parametrize("card", CARDS)
def test_codes_are_converted_in_hardware_where_it_can(card, monkeypatch):
    monkeypatch.setattr(fused_codes_triton, "_converts", lambda device: card >= 100)
    with recording(fused_triton, fused_codes_triton) as starts:
        fused_codes_triton.packed(
            on_card(64, 1024), plan(OperandSpec(), 1, packed=True), AMAX, None, swizzled=True
        )
    assert ("cvt.rn.satfinite.e2m1x2.f32" in ptx_of(starts, card)) == (card >= 100)


@triton.jit
def word_kernel(values_ptr, out_ptr, GRID: tl.constexpr):
    values = tl.load(values_ptr + tl.arange(0, 8))[None, :]
    words = code_words(values, values, 1, GRID, True, 1, 8, True)
    tl.store(out_ptr + tl.arange(0, 1)[None, :], words)


def test_hardware_too_puts_the_first_of_two_codes_into_the_low_half_of_a_byte():
    """The manual of PTX says of cvt d, a, b to .e2m1x2 that a is in the upper half of d."""
    values, word = torch.zeros(8), torch.zeros(1, dtype=torch.int32)
    grid = plan(OperandSpec(), 1, packed=True).element
    start = Start(word_kernel, {"values_ptr": values, "out_ptr": word, "GRID": grid})
    ptx = ptx_of([start], 100)
    loaded = re.findall(r"ld\.global\S*\.b32 \{ (%r\d+), (%r\d+), (%r\d+), (%r\d+) \}", ptx)
    first, second = loaded[0][:2]
    assert f"cvt.rn.satfinite.e2m1x2.f32 b0, {second}, {first};" in ptx


@pytest.mark.parametrize("card", CARDS)
def test_the_amax_pass_keeps_copies_in_flight(card):
    with recording(fused_triton, fused_codes_triton) as starts:
        fused_triton.amax_parts(on_card(64, 2048), plan(OperandSpec(), 1), plan(OperandSpec(rht=16), 0), None)
    ptx = ptx_of(starts, card)
    assert "cp.async" in ptx
    assert "max.NaN" in ptx, "a NaN is lost"


def test_fp8_codes_are_converted_in_hardware():
    both = fp8_plan(OperandSpec(format="fp8"))
    with recording(fused_triton, fused_codes_triton) as starts:
        fused_codes_triton.fp8(on_card(256, 256), both, both)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx_of(starts, 90)


@pytest.mark.parametrize("shape", [(1, 1), (16, 1), (0, 32), (32, 0)])
def test_no_size_is_a_special_case(shape):
    """The compiler is given a 1 as a constant, which code may treat differently."""
    x, row, column = on_card(*shape), plan(OperandSpec(), 1), plan(OperandSpec(rht=16), 0)
    with recording(fused_triton, fused_codes_triton) as starts:
        fused_triton.amax_parts(x, row, column, None)
        fused_triton.exact(x, row, column, (AMAX[:1], AMAX[:1]), (None, None))
        fused_codes_triton.packed(
            x, plan(OperandSpec(rht=16), 0, packed=True), AMAX[:1], None, swizzled=False
        )
        fused_codes_triton.fp8(x, fp8_plan(OperandSpec(format="fp8")), None)
    assert len(starts) == (4 if x.numel() else 3)
    assert all(start.build(90).asm["cubin"] for start in starts)


def test_an_operand_of_one_block_leaves_notes_too():
    """Its number of blocks, a 1, reaches the compiler as a constant."""
    square = plan(OperandSpec(block=(16, 16)), 1)
    with recording(fused_triton, fused_notes_triton) as starts:
        *_, seen = fused_triton.exact(on_card(16, 16), square, None, (AMAX, None), (None, None), observe=True)
        assert seen is not None
        into = torch.zeros(6), torch.zeros(6, 4, dtype=torch.int64)
        fused_notes_triton.notes(seen, (1, 0), (1, -1), into)
    assert starts[1].kernel.arg_names[:3] == ["row_maxima_ptr", "row_entries", "row_blocks"]
    assert starts[1].build(90).asm["cubin"]
