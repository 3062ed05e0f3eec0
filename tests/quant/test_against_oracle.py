"""Every format, block, rounding and transform gives the oracle's bytes, on hard inputs."""

import pytest
import torch

from oracle.bridge import raw_bits
from oracle.floats import BF16, FP16, FP32, convert
from oracle.spec import FORMATS, Spec
from support.adversarial import FINITE
from support.agreement import assert_agree, assert_same_operand, by_fourbits, by_oracle

KEY = (1234, 5 * 8 + 4, 17, 48, 3)
SHAPES = [(3, 40), (17, 16), (5, 33), (1, 130)]
QUANTIZED = [name for name, kind in FORMATS.items() if kind.element]


def blocks_of(name: str) -> list[tuple[int, int]]:
    """The usual blocks of a format, and one that divides nothing."""
    kind = FORMATS[name]
    if kind.fp32 == "block":
        return [(1, 128), (128, 128), (0, 0), (3, 5)]
    if kind.fp32 == "outer":
        return [(1, 16), (1, 32)]
    return [(1, 16), (16, 16), (3, 5)] if kind.two_level else [(1, 32), (32, 32), (3, 5)]


CASES = [(name, block) for name in QUANTIZED for block in blocks_of(name)]


@pytest.mark.parametrize("rounding", ["rne", "sr", "sr32"])
@pytest.mark.parametrize(("name", "block"), CASES)
def test_codes_and_scales_equal_the_oracle(name, block, rounding):
    spec = Spec(format=name, block=block, rounding=rounding)
    for number, make in enumerate(FINITE.values()):
        shape = SHAPES[number % len(SHAPES)]
        assert_agree(make(shape, number), spec, axis=number % 2, sr_key=KEY)


@pytest.mark.parametrize("rht", [4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8", "nvint4"])
def test_transformed_operands_equal_the_oracle(name, rht):
    for number, kind in enumerate(["normal", "spread", "zeros", "subnormal", "huge"]):
        spec = Spec(format=name, rht=rht, rounding=["rne", "sr"][number % 2])
        rows_first = number % 4 < 2
        shape = (2, 17 + 4 * number) if rows_first else (17 + 4 * number, 2)
        assert_agree(FINITE[kind](shape, number), spec, axis=int(rows_first), sr_key=KEY)


SIGN_RULES = ["te16", "fixed:0", "fixed:42", "fixed:4294967295", "per-layer", "per-call", "none"]


@pytest.mark.parametrize("rule", SIGN_RULES)
def test_signs_equal_the_oracle(rule):
    x = FINITE["normal"]((3, 40), 0)
    assert_agree(x, Spec(rht=16, rht_signs=rule), sr_key=KEY)
    if rule != "te16":
        assert_agree(x, Spec(rht=64, rht_signs=rule), sr_key=(7, 3 * 8 + 1, 2, 0, 0))


@pytest.mark.parametrize("name", ["bf16", "fp32"])
@pytest.mark.parametrize("rht", [0, 16])
def test_unquantized_operands_equal_the_oracle(name, rht):
    for number, make in enumerate(FINITE.values()):
        assert_agree(make((3, 40), number), Spec(format=name, rht=rht), axis=number % 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", ["as_is", "bf16"])
def test_input_dtypes_and_the_bf16_source_equal_the_oracle(dtype, source):
    for number, make in enumerate(FINITE.values()):
        x = make((5, 33), number).to(dtype)
        for block in ((1, 16), (16, 16)):
            assert_agree(x, Spec(block=block, source=source), axis=number % 2)


@pytest.mark.parametrize("rounding", ["sr", "sr32"])
def test_a_key_of_two_and_entries_of_any_size_equal_the_oracle(rounding):
    x, top = FINITE["spread"]((3, 40), 1), 2**32 - 1
    for key in [(5, 9), (0, 0), (top, top, top, top - 1, top), (2**40 + 5, 8, 2**33, 0, 0)]:
        assert_agree(x, Spec(rounding=rounding), sr_key=key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantized_values_of_narrow_dtypes_are_rounded_once_more(dtype):
    binary = {torch.bfloat16: BF16, torch.float16: FP16}[dtype]
    for number, kind in enumerate(["normal", "spread", "tiny", "huge"]):
        x = FINITE[kind]((5, 33), number)
        for spec in (Spec(), Spec(format="mxfp8"), Spec(format="fp8", block=(16, 16))):
            values = by_oracle(x, spec).dequantize()
            expected = [[convert(p, FP32, binary) for p in row] for row in values]
            assert raw_bits(by_fourbits(x, spec).dequantize(dtype)) == expected


@pytest.mark.parametrize("spec", [Spec(), Spec(rounding="sr", rht=16)], ids=["rne", "sr, rht 16"])
def test_rows_of_a_large_tensor_equal_the_oracle(spec):
    """However a backend cuts a large tensor: sampled rows, which are independent once amax is given."""
    x = FINITE["rows_apart"]((1024, 320), 9)
    q = by_fourbits(x, spec, 1, 3.0, KEY)
    for i in (0, 127, 512, 1023):
        key = (*KEY[:3], KEY[3] + i, KEY[4])
        o = by_oracle(x[i : i + 1], spec, 1, 3.0, key)
        assert raw_bits(q.codes[i : i + 1]) == o.packed()
        assert raw_bits(q.block_scale[i : i + 1]) == o.block_scale


def test_strided_and_transposed_input_gives_the_bytes_of_its_values():
    x = FINITE["spread"]((24, 80), 3)
    for view in (x.t(), x[::2, 1::3], x[:, 5:6], x[0:1].expand(7, 80)):
        for axis in (0, 1):
            assert_agree(view, Spec(), axis=axis)


@pytest.mark.parametrize("name", ["nvfp4", "nve1m2", "nvint4", "nvfp4-ue5m3"])
def test_an_underflowed_block_without_te_compat_has_zero_codes(name):
    x = FINITE["normal"]((6, 48), 5)
    x[1:4] *= 1e-7
    o = assert_agree(x, Spec(format=name, te_compat=False))
    assert o.block_scale[1:4] == [[0, 0, 0]] * 3
    negative = 0 if name == "nvint4" else 8
    assert o.codes[1] == [negative if value < 0 else 0 for value in x[1].tolist()]


@pytest.mark.parametrize("name", [name for name in QUANTIZED if FORMATS[name].fp32 != "outer"])
def test_the_transpose_of_square_blocks_equals_the_oracle(name):
    block = (32, 32) if name.startswith("mx") else (16, 16)
    blocks = [block, (128, 128), (0, 0)] if FORMATS[name].fp32 == "block" else [block, (4, 4)]
    for number, shape in enumerate([(17, 40), (3, 65)]):
        x = FINITE["rows_apart"](shape, number)
        for spec in (Spec(format=name, block=b) for b in blocks):
            q, o = by_fourbits(x, spec, number).t(), by_oracle(x, spec, number).t()
            assert_same_operand(q, o)
            assert_same_operand(by_fourbits(x.t(), spec, number), o)
