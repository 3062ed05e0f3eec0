"""The oracle's own arithmetic against the processor's: fp32 and fp64 operations, casts, orders of sums."""

import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.floats import BF16, FP16, FP32, FP64, Binary, convert, halving_tree, row_sum, to_bf16

SPECIALS = [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x34000000, 0x3F800001]
fp32_patterns = st.one_of(
    st.integers(0, 0xFFFFFFFF), st.sampled_from(SPECIALS + [p | 0x80000000 for p in SPECIALS])
)


def number(p: int) -> np.float32:
    return np.uint32(p).view(np.float32)


def pattern(x: np.float32) -> int:
    return int(np.float32(x).view(np.uint32))


def same(ours: int, theirs: int, binary: Binary) -> bool:
    return ours == theirs or (binary.is_nan(ours) and binary.is_nan(theirs))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@given(a=fp32_patterns, b=fp32_patterns)
def test_fp32_operations_round_as_the_processor_does(name, a, b):
    operation = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name]
    with np.errstate(all="ignore"):
        theirs = pattern(operation(number(a), number(b)))
    assert same(getattr(FP32, name)(a, b), theirs, FP32)


@pytest.mark.parametrize("name", ["add", "mul", "div"])
@given(a=st.floats(width=64), b=st.floats(width=64).filter(lambda b: b != 0))
def test_fp64_operations_round_as_the_processor_does(name, a, b):
    bits = [struct.unpack("<Q", struct.pack("<d", x))[0] for x in (a, b)]
    with np.errstate(all="ignore"):
        x, y = np.float64(a), np.float64(b)
        theirs = int({"add": x + y, "mul": x * y, "div": x / y}[name].view(np.uint64))
    assert same(getattr(FP64, name)(*bits), theirs, FP64)


@given(p=fp32_patterns)
def test_narrowing_rounds_as_ml_dtypes_and_numpy_do(p):
    with np.errstate(all="ignore"):
        bf16 = int(number(p).astype(ml_dtypes.bfloat16).view(np.uint16))
        fp16 = int(number(p).astype(np.float16).view(np.uint16))
    assert same(convert(p, FP32, BF16), bf16, BF16)
    assert same(convert(p, FP32, FP16), fp16, FP16)


@given(p=fp32_patterns, q=fp32_patterns)
def test_order_is_that_of_numbers(p, q):
    assert FP32.less(p, q) == bool(number(p) < number(q))


@given(p=st.integers(0, 0x7F7FFFFF))
def test_a_pattern_and_its_exact_value_are_the_same_thing(p):
    assert FP32.value(p) == Fraction(float(number(p)))
    assert FP32.of(FP32.value(p)) == p


def test_bf16_of_a_large_finite_number_is_infinite():
    assert to_bf16(0x7F7F7FFF) == 0x7F7F0000
    assert to_bf16(0x7F7F8000) == FP32.inf


def test_the_two_orders_of_a_sum_differ_where_they_should():
    big, one = FP32.of(1 << 24), FP32.of(1)
    terms = [big, one, one, one]
    assert row_sum(terms) == FP32.of(1 << 24)  # every 1 is lost to the tie
    assert halving_tree(terms) == FP32.of((1 << 24) + 2)  # (big + 1) + (1 + 1)
    assert halving_tree([one, big, one]) == FP32.of((1 << 24) + 2)  # filled up: (1 + 1) + (big + 0)
