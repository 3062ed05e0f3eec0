"""The fused quantizers compiled for every GPU: instructions that must be there, and that must not."""

import re
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from fourbits.quant.kernels import launch_dequantize, launch_packed, launch_stats, launch_unpack
from fourbits.quant.kernels.kernel_config import FP8_FORMATS, kernel_config
from fourbits.quant.kernels.packing_triton import code_words
from fourbits.quant.kernels.quantizers import kernel_quantizer
from fourbits.quant.operand import OperandSpec
from fourbits.quant.request import OperandInputs, OperandRequest, StatsTarget
from fourbits.quant.tensor import QuantizedTensor
from support.fused_cases import PAIRS
from support.gpus import planning_for
from support.kernel_builds import Start, on_gpu, recording, registers, signature, stack_bytes

ARCHITECTURES = [90, 100, 120]
KEY = torch.zeros(5, dtype=torch.int64)
AMAX = torch.ones(512)
#: bytes of a thread's stack that registers may be spilled to
SPILLED = 64
SR_PAIR = OperandSpec(rounding="sr"), OperandSpec(rounding="sr", rht=16)


@pytest.fixture(autouse=True)
def a_hopper_gpu():
    """Plans are those of sm_90; what is built for other GPUs is built from them."""
    with planning_for(90):
        yield


def launches(x, *requests, amax: torch.Tensor | None = AMAX, stats=None):
    """What would be launched for these operands: no amax pass where an amax is given."""
    given = tuple(r._replace(amax="own" if amax is None else "given") for r in requests)
    plan = kernel_quantizer(signature(x), given)
    with recording(launch_stats) as starts:
        made = plan(x, (OperandInputs(KEY, 0, amax),) * len(given), stats)
    return starts, made


def ptx_of(starts, sm):
    (start,) = starts
    built = start.build(sm)
    assert built.asm["cubin"]
    return built.asm["ptx"]


def both(row, column, **options):
    return OperandRequest(row, 1), OperandRequest(column, 0, **options)


def stats_target():
    return StatsTarget(torch.zeros(6), torch.zeros(6, 4, dtype=torch.int64), (4, 5))


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_both_operands_of_a_gradient_round_as_written(sm):
    starts, _ = launches(on_gpu(64, 2048), *both(*SR_PAIR))
    ptx = ptx_of(starts, sm)
    assert not re.search(r"\bfma\.", ptx), "a multiplication and an addition were contracted"
    assert ".ftz" not in ptx, "subnormals are flushed"
    assert "div.rn.f32" in ptx
    assert "div.full" not in ptx, "a division is approximate"
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx), "loads are narrower than 16 bytes"


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_recording_stats_needs_no_second_operand(sm):
    """A reduction over the column operand made the compiler transform twice, in another arrangement."""
    additions = []
    for stats in (None, stats_target()):
        (quantizing, *rest), _ = launches(on_gpu(64, 2048), *both(*SR_PAIR), stats=stats)
        additions.append(len(re.findall(r"\b(?:add|sub)\.(?:rn\.)?f32", ptx_of([quantizing], sm))))
    assert additions[0] >= 64 * 4, "a thread's 64 values take four rounds of additions and subtractions"
    assert additions[1] == additions[0]
    assert ptx_of(rest, sm)


def test_six_programs_that_record_stats_share_an_sm():
    starts, _ = launches(on_gpu(64, 2048), *both(*SR_PAIR), stats=stats_target())
    built = starts[0].build(90)
    assert 6 * starts[0].arguments["num_warps"] * 32 * registers(built) <= 65536
    assert stack_bytes(built) <= 4 * 8, "more than a few registers are spilled for the sixth program"


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_weights_choose_four_or_six(sm):
    choosing = OperandSpec(block=(16, 16), source="bf16", scale_rule="4over6-mse")
    starts, _ = launches(on_gpu(64, 2048, dtype=torch.float32), OperandRequest(choosing, 1))
    assert not re.search(r"\bfma\.", ptx_of(starts, sm)), "a multiplication and an addition were contracted"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("block", "axes"), [((1, 16), (1,)), ((1, 16), (0,)), ((16, 16), (1, 0))], ids=str)
def test_sixteen_scales_are_searched_in_a_loop_without_spilling(block, axes, dtype):
    """Each of sixteen candidates takes three divisions per block of 16, if its code is not the loop's."""
    spec = OperandSpec(block=block, scale_rule="search-mse")
    starts, _ = launches(on_gpu(64, 2048, dtype=dtype), *(OperandRequest(spec, axis) for axis in axes))
    tile = starts[0].arguments
    built = starts[0].build(90)
    elements = tile["ROWS"] * tile["COLUMNS"] // (32 * tile["num_warps"])
    assert built.asm["ptx"].count("div.rn.f32") < len(axes) * elements, "candidates are written out"
    assert not re.search(r"\bfma\.", built.asm["ptx"]), "a multiplication and an addition were contracted"
    assert ".ftz" not in built.asm["ptx"], "subnormals are flushed"
    assert 16 * 32 * registers(built) <= 65536, "fewer than sixteen warps"
    assert stack_bytes(built) == 0


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_scales_are_corrected_by_sums_as_written(sm):
    request = OperandRequest(OperandSpec(rounding="ms-eden", rht=128, rht_signs="per-call"), 0)
    x = on_gpu(256, 2048)
    starts = [*launches(x, request)[0], *launches(x, request._replace(packed=True))[0]]
    assert [start.kernel.fn.__name__ for start in starts] == [
        "rotate_kernel",
        "rotation_kernel",
        "packed_kernel",
    ]
    for start in starts:
        built = start.build(sm)
        assert not re.search(r"\bfma\.", built.asm["ptx"]), "a multiplication and an addition were contracted"
        assert built.metadata.shared <= 99 << 10, "more shared memory than sm_120 has"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_rotation_stays_in_registers(axis, dtype):
    """A transform takes 14 instructions an element if a thread has it whole; what is spilled takes more."""
    request = OperandRequest(OperandSpec(rounding="ms-eden", rht=128, rht_signs="per-call"), axis)
    (rotate, quantize), _ = launches(on_gpu(256, 2048, dtype=dtype), request)
    assert stack_bytes(rotate.build(90)) == 0
    built = quantize.build(90)
    assert 12 * 32 * registers(built) <= 65536, "fewer than twelve warps"
    assert stack_bytes(built) <= 16 * 4


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_packed_operands_are_unpacked_by_wide_accesses(sm):
    starts = unpacking(
        OperandSpec(), on_gpu(64, 1024, dtype=torch.uint8), on_gpu(64, 128, dtype=torch.uint8), 1
    )
    assert re.search(r"st\.global\S*\.v4\.b32", ptx_of(starts, sm)), "stores are narrower than 16 bytes"


def unpacking(spec, codes, scales, axis):
    """What would be launched to unpack an operand."""
    shape = (codes.shape[0], 2 * codes.shape[1])
    scale = scales.as_subclass(torch.Tensor).view(torch.float8_e4m3fn)
    q = QuantizedTensor(codes, scale, torch.ones(()), axis, shape if axis else shape[::-1], spec)
    with recording() as starts:
        launch_unpack.unpacked(q)
    return starts


def test_values_are_dequantized_and_codes_transposed_by_words_on_every_gpu():
    square = OperandSpec(block=(16, 16))
    q = QuantizedTensor(
        on_gpu(64, 1024, dtype=torch.uint8),
        torch.zeros(4, 128).to(torch.float8_e4m3fn),
        *(torch.ones(()), 1, (64, 2048), square),
    )
    column = replace(q, axis=0, shape=(2048, 64))
    with recording() as starts:
        for of in (q, column):
            launch_dequantize.dequantized(of, torch.bfloat16)
            launch_dequantize.dequantized(of, torch.float32)
        launch_dequantize.transposed(q)
    for start, sm in zip(starts, (80, 89, 90, 100, 120), strict=True):
        built = start.build(sm)
        assert re.search(r"ld\.global\S*\.(v\d\.b32|b32|b64|b16)", built.asm["ptx"]), (
            "codes are read by bytes"
        )
        assert stack_bytes(built) == 0


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_an_input_that_stays_packed_is_written_by_words(sm):
    starts, _ = launches(on_gpu(64, 2048), *both(OperandSpec(), OperandSpec(rht=16), packed=True))
    assert "st.global.b8" not in ptx_of(starts, sm), "codes are written a byte at a time"


@pytest.mark.parametrize("sm", [*ARCHITECTURES, 103, 121])
def test_codes_are_converted_in_hardware_where_it_can(sm, monkeypatch):
    monkeypatch.setattr(launch_packed, "_converts", lambda device: sm >= 100)
    starts, _ = launches(on_gpu(64, 1024), OperandRequest(OperandSpec(), 1, packed=True))
    assert ("cvt.rn.satfinite.e2m1x2.f32" in ptx_of(starts, sm)) == (sm >= 100)


PACKED = [
    pytest.param(spec, axis, sm, id=f"{name}, axis {axis}, sm_{sm}")
    for i, (name, pair) in enumerate(PAIRS.items())
    for axis, spec in enumerate(reversed(pair))
    if spec is not None
    for sm in [(90, 100, 120, 89)[(i + axis) % 4]]
]


@pytest.mark.parametrize(("spec", "axis", "sm"), PACKED)
def test_every_packed_operand_compiles_for_its_tile_and_spills_next_to_nothing(spec, axis, sm, monkeypatch):
    monkeypatch.setattr(launch_packed, "_converts", lambda device: sm >= 100)
    kept = spec.format not in FP8_FORMATS  # FP8's kernel writes the same codes for both forms
    starts, _ = launches(on_gpu(64, 2048), OperandRequest(spec, axis, packed=kept))
    built = starts[-1].build(sm)
    assert built.metadata.shared <= 99 << 10, "more shared memory than sm_89 and sm_120 have"
    assert stack_bytes(built) <= SPILLED, f"{stack_bytes(built)} bytes of registers are spilled"


def test_an_ampere_gpu_runs_the_same_tiles():
    for spec, axis in ((OperandSpec(), 1), (OperandSpec(rht=16), 0)):
        starts, _ = launches(on_gpu(64, 2048), OperandRequest(spec, axis, packed=True))
        assert stack_bytes(starts[-1].build(80)) <= SPILLED


@triton.jit
def word_kernel(values_ptr, out_ptr, GRID: tl.constexpr):
    values = tl.load(values_ptr + tl.arange(0, 8))[None, :]
    words = code_words(values, values, 1, GRID, True, 1, 8, True)
    tl.store(out_ptr + tl.arange(0, 1)[None, :], words)


def test_hardware_too_puts_the_first_of_two_codes_into_the_low_half_of_a_byte():
    """The manual of PTX says of cvt d, a, b to .e2m1x2 that a is in the upper half of d."""
    values, word = torch.zeros(8), torch.zeros(1, dtype=torch.int32)
    grid = kernel_config(OperandSpec(), 1, packed=True).element
    start = Start(word_kernel, {"values_ptr": values, "out_ptr": word, "GRID": grid})
    ptx = ptx_of([start], 100)
    loaded = re.findall(r"ld\.global\S*\.b32 \{ (%r\d+), (%r\d+), (%r\d+), (%r\d+) \}", ptx)
    first, second = loaded[0][:2]
    assert f"cvt.rn.satfinite.e2m1x2.f32 b0, {second}, {first};" in ptx


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_the_amax_pass_keeps_copies_in_flight(sm):
    (amaxes, _), _ = launches(on_gpu(64, 2048), *both(OperandSpec(), OperandSpec(rht=16)), amax=None)
    ptx = ptx_of([amaxes], sm)
    assert "cp.async" in ptx
    assert "max.NaN" in ptx, "a NaN is lost"


def test_fp8_codes_are_converted_in_hardware():
    fp8 = OperandSpec(format="fp8")
    starts, _ = launches(on_gpu(256, 256), *both(fp8, fp8))
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx_of(starts, 90)


@pytest.mark.parametrize("shape", [(1, 1), (16, 1), (0, 32), (32, 0)])
def test_no_size_is_a_special_case(shape):
    """The compiler is given a 1 as a constant, which code may treat differently."""
    x, column = on_gpu(*shape), OperandRequest(OperandSpec(rht=16), 0)
    starts = [
        *launches(x, OperandRequest(OperandSpec(), 1), column, amax=None)[0],
        *launches(x, column._replace(packed=True), amax=AMAX[:1])[0],
        *launches(x, OperandRequest(OperandSpec(format="fp8"), 1))[0],
    ]
    assert len(starts) == (4 if x.numel() else 3)
    assert all(start.build(90).asm["cubin"] for start in starts)


def test_stats_of_an_operand_of_one_block_are_recorded_too():
    """Its number of blocks, a 1, reaches the compiler as a constant."""
    square = OperandRequest(OperandSpec(block=(16, 16)), 1)
    target = stats_target()._replace(places=(1,))
    starts, _ = launches(on_gpu(16, 16), square, stats=target)
    assert starts[1].kernel.arg_names[:3] == ["row_maxima_ptr", "row_entries", "row_blocks"]
    assert starts[1].build(90).asm["cubin"]
