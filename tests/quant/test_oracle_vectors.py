"""The worked vectors of docs/nvfp4.md (section 15) and its constants, from the oracle and from fourbits."""

from fractions import Fraction

import pytest
import torch

from oracle.bridge import raw_bits
from oracle.floats import FP32
from oracle.noise import byte, key_of, philox
from oracle.operand import Operand
from oracle.scales import encode_of
from oracle.spec import Spec, constants
from oracle.transform import ROOT, signs
from support.agreement import by_fourbits, by_oracle

BLOCK_0 = [6, -0.0, 0.1, -0.1, 0.25, 0.74, 1.1, -1.26, 1.76, 2.4, 2.6, -3.4, 3.6, 4.9, 5.1, 0]
BLOCK_1 = [0.003, -0.001, 0.002] + [0.0] * 13
CODES = [7, 8, 0, 8, 0, 1, 2, 11, 4, 4, 5, 13, 6, 6, 7, 0, 7, 12, 6] + [0] * 13
PACKED = "878010b244d56607c706000000000000"
KEY = (1234, 5 * 8 + 4, 17, 0, 0)


def worked_example() -> tuple[torch.Tensor, Operand]:
    x = torch.tensor([BLOCK_0 + BLOCK_1])
    return x, by_oracle(x, Spec(), amax=6.0)


def test_the_oracle_gives_the_worked_nvfp4_bytes():
    _, o = worked_example()
    assert o.codes == [CODES]
    assert bytes(o.packed()[0]).hex() == PACKED
    assert o.block_scale == [[0x7E, 0x26]]
    assert o.global_scale == 0x3B124925


def test_the_product_gives_the_worked_nvfp4_bytes():
    x, _ = worked_example()
    q = by_fourbits(x, Spec(), amax=6.0)
    assert bytes(q.codes[0].tolist()).hex() == PACKED
    assert raw_bits(q.block_scale) == [[0x7E, 0x26]]
    assert raw_bits(q.global_scale) == 0x3B124925


def test_the_scales_of_the_worked_example_pass_through_the_stated_values():
    encode = encode_of(FP32.of(6), constants(Spec()), Spec())
    assert (encode.enc, encode.dec, encode.k) == (0x43E00000, 0x3B124925, 0x42955556)
    p = FP32.mul(FP32.of(Fraction(0.003)), encode.k)
    assert round(FP32.value(p), 8) == Fraction("0.22400002")


WORDS = {
    (0, 0, 0, 0, 0, 0): "5f6fb709 0d893f64 4f121f81 4f730a48",
    (
        0x243F6A88,
        0x85A308D3,
        0x13198A2E,
        0x03707344,
        0xA4093822,
        0x299F31D0,
    ): "4dfccaba 190a87f0 c47362ba b6b5242a",
    (0xFFFFFFFF,) * 6: "5207ddc2 45165e59 4d8ee751 8c52f662",
    (17, 3, 9, 0, 1234, 44): "1dac170b 2b6612d2 c0981b9d bba3895e",
    (17, 3, 9, 1, 1234, 44): "e99d1100 25acc1d9 3dbcea73 baacfc5e",
    (17, 3, 9, 4, 1234, 44): "636a9a85 e6bb8042 645c1d55 834e8dfa",
}


@pytest.mark.parametrize(("numbers", "words"), WORDS.items())
def test_philox_gives_its_known_answers(numbers, words):
    c0, c1, c2, c3, k0, k1 = numbers
    assert " ".join(f"{w:08x}" for w in philox((c0, c1, c2, c3), (k0, k1))) == words


def test_the_bytes_of_a_block_are_the_words_from_their_low_end():
    expected = [11, 23, 172, 29, 210, 18, 102, 43, 157, 27, 152, 192, 94, 137, 163, 187]
    assert [byte(key_of(KEY), 9, 3 * 16 + t) for t in range(16)] == expected


SIGNS = {
    ("te16", 16, KEY): "+++-+------+-+--",
    ("fixed:0", 16, None): "----+++---+++-+-",
    ("fixed:42", 32, None): "+--+---+-++++++-+--+-+--++++++++",
    ("per-layer", 16, KEY): "--+--++-+---+-++",
    ("per-call", 16, KEY): "+++--+---+---++-",
}


@pytest.mark.parametrize(("case", "expected"), SIGNS.items())
def test_sign_vectors_are_the_stated_ones(case, expected):
    rule, n, key = case
    minus = signs(rule, n, key_of(key) if key else None)
    assert "".join("-" if negative else "+" for negative in minus) == expected


CONSTANTS = [
    (Spec(), FP32.of(2688), 0x3E2AAAAB),
    (Spec(scale_bound=256), FP32.of(1536), 0x3E2AAAAB),
    (Spec(scale_rule="4over6-mse"), FP32.of(1536), 0x3E2AAAAB),
    (Spec(format="nve1m2"), FP32.of(784), 0x3F124925),
    (Spec(format="nve1m2", scale_bound=256), FP32.of(448), 0x3F124925),
    (Spec(format="nvint4"), FP32.of(3136), 0x3E124925),
    (Spec(format="nvint4", scale_bound=256), FP32.of(1792), 0x3E124925),
    (Spec(rounding="sr", sr_headroom=True), 0x451E1E1E, 0x3E355555),
    (Spec(rounding="ms-eden", rht=16), 0x44C24CC0, 0x3E28A3D7),
]


@pytest.mark.parametrize(("spec", "t", "kappa"), CONSTANTS)
def test_two_level_constants_are_the_stated_ones(spec, t, kappa):
    c = constants(spec)
    assert (c.T, c.kappa) == (t, kappa)


def test_the_factor_of_the_transform_is_the_rounded_root():
    for n, pattern in ROOT.items():
        root = FP32.value(pattern)
        ulp = FP32.value(pattern + 1) - root
        assert (root - ulp / 2) ** 2 * n < 1 < (root + ulp / 2) ** 2 * n
