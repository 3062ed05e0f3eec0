"""What holds for every input: powers of two, transposes, shards, repetition, rotation, 4/6 choices."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.bridge import patterns, raw_bits
from oracle.choice import block_of, error
from oracle.floats import FP32
from oracle.grids import E4M3
from oracle.layout import Tiling, stored_rows
from oracle.scales import encode_of, largest_magnitude
from oracle.spec import Spec, constants
from oracle.transform import signs
from support.adversarial import normal
from support.agreement import by_fourbits
from support.assertions import assert_same_bytes, assert_same_operand

KEY = (1234, 5 * 8 + 4, 17, 32, 6)
FEW = settings(max_examples=20)


def integers(rows: int, columns: int, seed: int) -> Tensor:
    """No zeros, magnitudes in [2^3, 2^20], rows of different size: a power of two scales them exactly."""
    g = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(2**10, 2**20, (rows, columns), generator=g).float()
    sign = 1.0 - 2.0 * torch.randint(0, 2, (rows, columns), generator=g).float()
    return magnitude * sign * torch.exp2(-torch.randint(0, 8, (rows, 1), generator=g).float())


matrices = st.builds(integers, st.integers(1, 6), st.integers(1, 40), st.integers(0, 2**31))
places = st.integers(0, 64)


def exponent_at(place: int, x: Tensor) -> int:
    """Of a power of two that puts the magnitudes of x in [2^-100, 2^100]: place 0 lowest, 64 highest."""
    lowest = -100 - math.frexp(x.abs().min().item())[1] + 1
    highest = 100 - math.frexp(x.abs().max().item())[1]
    return lowest + (highest - lowest) * place // 64


TWO_LEVEL = [
    *[Spec(), Spec(block=(16, 16)), Spec(rounding="sr"), Spec(rounding="sr32", sr_headroom=True)],
    *[Spec(scale_rule="4over6-mse"), Spec(scale_rule="4over6-max"), Spec(scale_rule="search-mae")],
    *[Spec(scale_rounding="sr"), Spec(rounding="ms-eden", rht=32), Spec(rht=16), Spec(fp32_scale="pow2")],
    *[Spec(format="nvint4"), Spec(format="nve1m2"), Spec(format="nvfp4-double")],
]
FP32_SCALED = [
    Spec(format="fp8"),
    Spec(format="fp8-e5m2", block=(128, 128)),
    Spec(format="int8", block=(0, 0)),
]


def short(spec: Spec) -> str:
    changed = [f"{name}={value}" for name, value in vars(spec).items() if value != getattr(Spec(), name)]
    return "-".join(changed) or "default"


@pytest.mark.parametrize("spec", [*TWO_LEVEL, *FP32_SCALED], ids=short)
@given(x=matrices, place=places)
@FEW
def test_a_power_of_two_moves_fp32_scales_and_nothing_else(spec, x, place):
    factor = 2.0 ** exponent_at(place, x)
    one, other = by_fourbits(x, spec, sr_key=KEY), by_fourbits(x * factor, spec, sr_key=KEY)
    assert_same_bytes(other.codes, one.codes, "codes")
    if spec.kind.scale is None and spec.blocks != (0, 0):
        assert_same_bytes(other.block_scale, one.block_scale * factor, "block_scale")
    else:
        assert_same_bytes(other.block_scale, one.block_scale, "block_scale")
        assert_same_bytes(other.global_scale, one.global_scale * factor, "global_scale")


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxfp8-e5m2"])
@pytest.mark.parametrize("rule", ["max", "ceil"])
@given(x=matrices, place=places)
@FEW
def test_a_power_of_two_moves_the_exponents_of_mx_blocks(name, rule, x, place):
    spec, exponent = Spec(format=name, scale_rule=rule), exponent_at(place, x)
    one, other = by_fourbits(x, spec), by_fourbits(x * 2.0**exponent, spec)
    before, after = one.block_scale.view(torch.uint8).int(), other.block_scale.view(torch.uint8).int()
    assert torch.equal(after, before + exponent)
    assert_same_bytes(other.codes, one.codes, "codes")


SQUARE = [("nvfp4", 16), ("nvint4", 8), ("mxfp4", 32), ("mxfp8", 4), ("fp8", 128), ("fp8", 0)]


@pytest.mark.parametrize(("name", "block"), SQUARE)
@given(x=matrices)
@FEW
def test_square_blocks_quantize_the_transpose_to_the_transpose(name, block, x):
    spec = Spec(format=name, block=(block, block))
    q = by_fourbits(x, spec)
    assert_same_operand(q.t(), by_fourbits(x.t(), spec))
    assert_same_operand(q.t().t(), q)


SHARDED = [
    *[Spec(), Spec(rounding="sr"), Spec(rounding="sr32"), Spec(block=(16, 16), rounding="sr")],
    *[Spec(scale_rounding="sr"), Spec(scale_rule="search-mse"), Spec(rht=16, rht_signs="per-layer")],
    *[
        Spec(rht=16, rounding="sr"),
        Spec(rht=32, rounding="ms-eden"),
        Spec(scale_rule="4over6-mse", rounding="sr"),
    ],
    *[
        Spec(format="mxfp4", rounding="sr"),
        Spec(format="nvfp4-ue5m3", rounding="sr32"),
        Spec(format="nvint4"),
    ],
]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("spec", SHARDED, ids=short)
@given(
    rows=st.sets(st.integers(1, 4).map(lambda cut: 16 * cut)),
    columns=st.sets(st.integers(1, 2).map(lambda cut: 32 * cut)),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=6)
def test_any_split_over_ranks_gives_the_same_bytes(spec, axis, rows, columns, seed):
    """Cuts of rows and of the contraction; each shard has its offset in the key and the amax of the whole."""
    x = integers(80, 96, seed)
    x = x if axis == 1 else x.t()
    run_seed, stream, step, first_row, first_block = KEY
    y = by_fourbits(x, Spec(format="fp32", rht=spec.rht, rht_signs=spec.rht_signs), axis, sr_key=KEY).codes
    amax = y.abs().max().item() if spec.one_fp32_scale else None
    whole = by_fourbits(x, spec, axis, sr_key=KEY)
    br, bc = spec.blocks
    for top, bottom in pairwise([0, *sorted(rows), 80]):
        for left, right in pairwise([0, *sorted(columns), 96]):
            part = (slice(top, bottom), slice(left, right))
            key = (run_seed, stream, step, first_row + top, first_block + left // 16)
            shard = by_fourbits(x[part] if axis == 1 else x[part[::-1]], spec, axis, amax, key)
            assert_same_bytes(shard.codes, whole.codes[top:bottom, left // 2 : right // 2])
            scales = whole.block_scale[top // br : bottom // br, left // bc : right // bc]
            assert_same_bytes(shard.block_scale, scales)
            assert_same_bytes(shard.global_scale, whole.global_scale)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxfp8-e5m2"])
@given(x=matrices)
@FEW
def test_mx_blocks_are_fixed_points(name, x):
    """The largest code of a block keeps its binade, so a second pass finds the same exponent."""
    q = by_fourbits(x, Spec(format=name))
    assert_same_operand(by_fourbits(q.dequantize(torch.float32), Spec(format=name)), q)


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
@given(seed=st.integers(0, 2**31))
@FEW
def test_nvfp4_blocks_with_normal_scales_are_fixed_points_of_a_given_amax(block, seed):
    """A block's largest code is 6 again, p is within 2^-21 of s8 again, E4M3 steps are 2^-4."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.rand(20, 40, generator=g) + 0.01) * torch.exp2(
        -torch.randint(0, 6, (20, 1), generator=g).float()
    )
    q = by_fourbits(x, Spec(block=block), amax=1.1)
    assert (q.block_scale.view(torch.uint8) >= 8).all()
    assert_same_operand(by_fourbits(q.dequantize(torch.float32), Spec(block=block), amax=1.1), q)


def exact_rotation(x: list[int], minus: list[bool]) -> list[Fraction]:
    """sqrt(n) times the transform, without any rounding."""
    z = [Fraction(-v if m else v) for v, m in zip(x, minus, strict=True)]
    h = 1
    while h < len(z):
        for i in range(len(z)):
            if i & h == 0:
                z[i], z[i + h] = z[i] + z[i + h], z[i] - z[i + h]
        h *= 2
    return z


@pytest.mark.parametrize("n", [4, 8, 16, 32, 64, 128])
@given(seed=st.integers(0, 2**31))
@FEW
def test_rotating_both_operands_cancels_exactly_and_within_a_bound_after_bf16(n, seed):
    """Integers below 2^8 pass the butterfly unrounded; then each factor is off by 2^-8 + 2^-22 of itself."""
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-255, 256, (1, n), generator=g) for _ in range(2))
    dot = Fraction(int((a * b).sum()))
    minus = signs("fixed:3", n, None)
    exact = [exact_rotation(v[0].tolist(), minus) for v in (a, b)]
    products = [u * v for u, v in zip(*exact, strict=True)]
    assert sum(products) == n * dot
    spec = Spec(format="bf16", rht=n, rht_signs="fixed:3")
    rounded = [by_fourbits(v.float(), spec).codes[0].tolist() for v in (a, b)]
    ours = sum(Fraction(u) * Fraction(v) for u, v in zip(*rounded, strict=True))
    delta = Fraction(1, 2**8) + Fraction(1, 2**22)
    assert abs(ours - dot) <= (2 * delta + delta**2) * sum(map(abs, products)) / n


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
@pytest.mark.parametrize("metric", ["mse", "mae", "max"])
@given(
    x=st.builds(normal, st.tuples(st.sampled_from([1, 6, 16, 32]), st.integers(1, 40)), st.integers(0, 2**31))
)
@FEW
def test_four_over_six_is_never_worse_in_a_block_than_mapping_to_six(metric, block, x):
    """Under its own metric and the same S_enc, as the oracle measures both."""
    spec = Spec(scale_rule=f"4over6-{metric}", block=block)
    chosen = raw_bits(by_fourbits(x, spec).block_scale)
    rows, columns = x.shape
    y, c = stored_rows(patterns(x), (rows, columns), 1, 0), constants(spec)
    encode = encode_of(largest_magnitude([p for row in y for p in row]), c, spec)
    for box in Tiling(rows, -(-columns // 16) * 16, *block).boxes():
        b = block_of(y, box, encode, c, spec)
        ba = largest_magnitude([p for row in b.rows for p in row])
        six = E4M3.nearest(FP32.min(FP32.mul(FP32.div(ba, FP32.of(6)), encode.enc), c.smax))
        assert not FP32.less(error(six, b), error(chosen[box.bi][box.bj], b))


@pytest.mark.parametrize("rule", ["max", "4over6-mse"])
@pytest.mark.parametrize("rounding", ["sr", "sr32"])
@given(x=matrices)
@FEW
def test_with_headroom_nothing_is_clipped_under_a_normal_scale(rule, rounding, x):
    """A scale rounds down by at most 1 in 17, and maxima are mapped to 16/17: so every element has two
    neighbours and goes up as its distance says. Products and quotients are off by a few 2^-24.
    """
    q = by_fourbits(x, Spec(rounding=rounding, sr_headroom=True, scale_rule=rule), sr_key=KEY)
    block_scale = q.block_scale.double().repeat_interleave(16, 1)[:, : x.shape[1]]
    largest = 6 * block_scale * q.global_scale.double() * (1 + 2.0**-20)
    assert ((x.abs().double() <= largest) | (block_scale < 2.0**-6)).all()
