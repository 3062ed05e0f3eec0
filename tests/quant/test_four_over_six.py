"""The C++ of Four Over Six gives the reference's bytes, or leaves the tensor to it."""

import functools
import itertools
import math
from typing import cast

import pytest
import torch
from torch._inductor import config as inductor

from fourbits.quant.cpu import compiled as compiler
from fourbits.quant.cpu import four_over_six
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import exact_operand, quantize
from fourbits.quant.scale_hierarchy import encode_levels
from support.adversarial import FINITE, NON_FINITE
from support.assertions import assert_same_bytes

METRICS = ("mse", "mae", "max")
BLOCKS = ((1, 16), (16, 16))
AMAXES = (0.0, 7e-36, 1e-3, 3.4e38)


def finite(kind: str, shape: tuple[int, int], number: int) -> torch.Tensor:
    """BF16, which the largest numbers of FP32 would leave."""
    largest = torch.finfo(torch.bfloat16).max
    return FINITE[kind](shape, number).clamp(-largest, largest).to(torch.bfloat16)


def chosen(
    x: torch.Tensor, spec: OperandSpec, axis: int, amax: torch.Tensor | None
) -> four_over_six.StoredBlocks | None:
    return four_over_six.chosen_codes(x, spec, axis, amax)


def assert_reference_bytes(x: torch.Tensor, spec: OperandSpec, axis: int, amax: torch.Tensor | None) -> None:
    """x: so small that `quantize` runs the reference."""
    assert x.numel() < compiler.COMPILE_FROM
    found, expected = chosen(x, spec, axis, amax), quantize(x, spec, axis, amax)
    assert found is not None
    assert_same_bytes(found.codes, expected.codes, "codes")
    assert_same_bytes(
        encode_levels((found.block_scale,), spec.block_format), expected.block_scale, "block_scale"
    )
    assert_same_bytes(found.global_scale, expected.global_scale, "global_scale")
    made = four_over_six.chosen_values(x, spec, axis, amax)
    assert made is not None
    exact = exact_operand(x, spec, axis, amax)
    assert_same_bytes(made[0], exact.values, "values")
    assert_same_bytes(made[1], exact.scale, "scale")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("metric", METRICS)
def test_bytes_are_the_references_for_adversarial_input(metric: str, block: tuple[int, int]):
    for bound, te_compat, fp32_scale in ((0, True, "exact"), (448, False, "exact"), (0, False, "pow2")):
        spec = OperandSpec(
            scale_rule=f"4over6-{metric}",
            block=block,
            scale_bound=bound,
            te_compat=te_compat,
            fp32_scale=fp32_scale,  # pyright: ignore[reportArgumentType]
        )
        for number, (kind, axis) in enumerate(itertools.product(FINITE, (0, 1))):
            assert_reference_bytes(finite(kind, (48, 144), number), spec, axis, None)


@pytest.mark.parametrize("amax", AMAXES)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_given_amax_is_used_however_stale(block: tuple[int, int], amax: float):
    for metric, axis in itertools.product(METRICS, (0, 1)):
        spec = OperandSpec(scale_rule=f"4over6-{metric}", block=block)
        for kind in ("normal", "spread", "huge"):
            assert_reference_bytes(finite(kind, (32, 48), 5), spec, axis, torch.tensor(amax))


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_of_a_larger_tensor_are_read_where_they_lie(axis: int):
    whole = finite("normal", (80, 640), 6)
    part = whole[16:64, 32:624]  # more columns than are read at a time
    spec = OperandSpec(scale_rule="4over6-mse")
    assert four_over_six.unsupported(part, spec, axis) is None
    assert_reference_bytes(part, spec, axis, None)


def test_non_finite_numbers_are_left_to_the_reference():
    spec = OperandSpec(scale_rule="4over6-mse")
    for number, make in enumerate(NON_FINITE.values()):
        x = make((48, 144), number).to(torch.bfloat16)
        assert torch.isfinite(x).all() or chosen(x, spec, 1, torch.tensor(3.0)) is None
        assert torch.isfinite(x).all() or chosen(x, spec, 1, None) is None
    x = finite("normal", (32, 32), 1)
    for amax in (math.inf, math.nan):
        assert chosen(x, spec, 0, torch.tensor(amax)) is None


@pytest.mark.parametrize(
    "spec",
    [
        OperandSpec(),
        OperandSpec(scale_rule="search-mse"),
        OperandSpec(scale_rule="4over6-mse", rounding="sr"),
        OperandSpec(scale_rule="4over6-mse", scale_rounding="sr"),
        OperandSpec(scale_rule="4over6-mse", block=(1, 32)),
        OperandSpec(scale_rule="4over6-mse", format="nvfp4-double"),
    ],
    ids=lambda spec: f"{spec.format}-{spec.scale_rule}-{spec.rounding}-{spec.scale_rounding}-{spec.block}",
)
def test_what_it_has_no_rule_for_is_not_taken(spec: OperandSpec):
    assert four_over_six.unsupported(torch.zeros(32, 64, dtype=torch.bfloat16), spec, 1)


def test_shapes_it_would_have_to_complete_are_not_taken():
    spec = OperandSpec(scale_rule="4over6-mse")
    taken = torch.zeros(32, 64, dtype=torch.bfloat16)
    assert four_over_six.unsupported(taken, spec, 0) is None
    for x in (taken.float(), taken.t(), taken[:15], taken[:, :40], taken[:0]):
        assert four_over_six.unsupported(x, spec, 1)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_large_tensor_goes_through_it_on_several_threads(
    block: tuple[int, int], axis: int, monkeypatch: pytest.MonkeyPatch
):
    x = finite("rows_apart", (128, 1024), 9)
    spec = OperandSpec(scale_rule="4over6-mse", block=block)
    taken: list[object] = []
    own = four_over_six.chosen_codes
    monkeypatch.setattr(four_over_six, "chosen_codes", lambda *args: taken.append(own(*args)) or taken[-1])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = quantize(x, spec, axis)
    finally:
        torch.set_num_threads(threads)
    assert len(taken) == 1
    assert taken[0] is not None
    monkeypatch.setattr(compiler, "COMPILE_FROM", 1 << 62)
    expected = quantize(x, spec, axis)
    assert_same_bytes(found.codes, expected.codes, "codes")
    assert_same_bytes(found.block_scale, expected.block_scale, "block_scale")


def test_it_is_not_taken_where_a_caller_is_compiled():
    """torch.compile cannot follow into C++; the stages are what it then compiles."""
    x, spec = finite("normal", (32, 32), 1), OperandSpec(scale_rule="4over6-mse")

    def taken(x: torch.Tensor) -> torch.Tensor:
        return x + (four_over_six.unsupported(x, spec, 1) is None)

    assert torch.equal(taken(x), x + 1)
    assert torch.equal(torch.compile(taken, backend="eager", fullgraph=True)(x), x)


def test_arithmetic_that_a_user_relaxed_for_other_code_stays_exact(monkeypatch: pytest.MonkeyPatch):
    """The compiler may then cancel what rounding adds and takes away, and flush subnormal numbers."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        large = x * 2.0**22
        return large - (large - x)

    x, subnormal = torch.tensor([1.3, 2.7, 5.2]), torch.tensor([0x200000], dtype=torch.int32)
    build, run = four_over_six._function.__wrapped__, cast(compiler.Runner, compiler.compiled)
    monkeypatch.setattr(four_over_six, "native", compiler.native.__wrapped__)
    monkeypatch.setattr(four_over_six, "_function", functools.cache(build))
    with inductor.patch({"cpp.enable_unsafe_math_opt_flag": True}):
        assert_reference_bytes(finite("normal", (48, 64), 3), OperandSpec(scale_rule="4over6-mse"), 1, None)
        assert torch.equal(run(rounded)(x), torch.tensor([1.5, 3.0, 6.0]))
    assert torch.equal((subnormal.view(torch.float32) * 1.0).view(torch.int32), subnormal)


def test_where_it_cannot_be_built_the_reference_runs_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(compiler, "_broken", [])
    with pytest.warns(UserWarning, match="nothing runs in stages, about twice as slow.* Install g\\+\\+ 9"):
        assert compiler.native("this is not C++", "nothing", ()) is None
    monkeypatch.setattr(compiler, "_broken", ["no compiler at all, which was said already"])
    assert compiler.native("nor is this", "nothing", ()) is None
    monkeypatch.setattr(four_over_six, "_function", lambda: None)
    assert chosen(finite("normal", (32, 32), 1), OperandSpec(scale_rule="4over6-mse"), 1, None) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_memory_of_another_type_is_refused_before_it_is_written(dtype):
    with pytest.raises(ValueError, match=r"needs 4 elements of torch\.float32 on the CPU, got 4 of"):
        four_over_six.address(torch.empty(4, dtype=dtype), torch.float32, 4)


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(3), torch.empty(8)[::2], torch.empty(4, device="meta")],
    ids=["short", "strided", "elsewhere"],
)
def test_memory_of_another_size_stride_or_device_is_refused(tensor):
    with pytest.raises(ValueError, match=r"needs 4 elements of torch\.float32"):
        four_over_six.address(tensor, torch.float32, 4)


@pytest.mark.parametrize(
    "change",
    [
        {"lines": 8},
        {"elements": 24},
        {"lines": -16},
        {"stride": 8},
        {"metric": 3},
        {"threads": 0},
        {"x": None},
    ]
    + [{"scales": None}, {"words": None}, {"values": 1}],
    ids=str,
)
def test_the_function_itself_refuses_sizes_and_pointers_it_cannot_take(change):
    """Nothing is read or written then; the last two: neither or both of the two outputs."""
    function = four_over_six._function()
    assert function is not None
    x, scales, words = torch.zeros(16, 16).bfloat16(), torch.zeros(16), torch.zeros(16, dtype=torch.int64)
    given = {
        "x": x.data_ptr(),
        "lines": 16,
        "elements": 16,
        "stride": 16,
        "axis": 1,
        "square": 0,
        "metric": 0,
    }
    given |= {"te": 1, "encode": 1.0, "decode": 1.0, "shift": 1.0, "factor": 1.0, "target": 6.0}
    given |= {"scales": scales.data_ptr(), "words": words.data_ptr(), "values": None, "threads": 1}
    assert function(*given.values()) == 0
    scales.fill_(7.0)
    assert function(*{**given, **change}.values()) == 2
    assert (scales == 7.0).all()
