"""Error feedback: what a block loses is made up for in the later blocks of its span."""

from dataclasses import replace

import pytest
import torch

from fourbits import OperandSpec, fake_quantize, feedback_coefficients, quantize
from fourbits.quant.quantize import exact_operand
from support.assertions import assert_same_bytes
from support.triton_interpreter import run

SPEC = OperandSpec(error_feedback=64, scale_rule="4over6-mse")
PLAIN = replace(SPEC, error_feedback=0)
ZEROS = torch.zeros(64, 64, dtype=torch.int8)


def correlated(rows: int, columns: int) -> torch.Tensor:
    """A weight whose columns share one direction."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator) + 2 * torch.randn(rows, 1, generator=generator)


def tokens(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def test_kernels_give_the_references_bytes():
    result = run("feedback_cases")
    assert result.returncode == 0, result.stdout + result.stderr


def test_coefficients_of_zero_change_no_byte():
    x, none = tokens(33, 100), torch.zeros(100, 64, dtype=torch.int8)
    with_feedback, without = quantize(x, SPEC, coefficients=none), quantize(x, PLAIN)
    for name in ("codes", "block_scale", "global_scale"):
        assert_same_bytes(getattr(with_feedback, name), getattr(without, name))


def test_the_first_block_of_a_span_is_quantized_as_without():
    x, weight = tokens(33, 160), correlated(96, 160)
    found = quantize(x, SPEC, coefficients=feedback_coefficients(weight, 64)).dequantize()
    plain = quantize(x, PLAIN).dequantize()
    for first in (0, 64, 128):
        assert torch.equal(found[:, first : first + 16], plain[:, first : first + 16])
        assert not torch.equal(found[:, first + 16 : first + 32], plain[:, first + 16 : first + 32])


def test_the_product_errs_less_though_the_operand_errs_more():
    x, weight = tokens(256, 128), correlated(192, 128)
    found, plain = (
        quantize(x, spec, coefficients=coefficients).dequantize() - x
        for spec, coefficients in ((SPEC, feedback_coefficients(weight, 64)), (PLAIN, None))
    )
    assert found.norm() > plain.norm()
    # the shared direction holds 4/5 of the columns' square; there only a span's last of four blocks is left
    expected = (1 / 5 + 4 / 5 / 4) ** 0.5
    assert (found @ weight.t()).norm() < expected * (plain @ weight.t()).norm()


def test_coefficients_are_the_least_squares_shift_of_the_later_columns():
    weight = correlated(48, 64).double()
    gram = weight.t() @ weight
    gram += 0.01 * gram.diagonal().mean() * torch.eye(64, dtype=torch.float64)
    expected = torch.zeros(64, 64, dtype=torch.float64)
    for first in range(0, 48, 16):
        block, later = slice(first, first + 16), slice(first + 16, 64)
        expected[block, later] = torch.linalg.solve(gram[later, later], gram[later, block]).t()
    found = feedback_coefficients(weight.float(), 64)
    # half a unit of rounding, and what float32 loses in the products of columns
    assert (found.double() / 64 - expected.clamp(-127 / 64, 127 / 64)).abs().max() <= 0.51 / 64


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_weights_that_are_zero_or_not_finite_feed_nothing_back(value):
    assert not feedback_coefficients(torch.full((32, 64), value), 64).any()


def test_packed_and_exact_operands_hold_the_same_values():
    x, coefficients = tokens(18, 90), feedback_coefficients(correlated(64, 90), 64)
    exact = exact_operand(x, SPEC, 1, coefficients=coefficients)
    packed = quantize(x, SPEC, 1, coefficients=coefficients)
    assert torch.equal((exact.values.float() * exact.scale)[:, :90], packed.dequantize())


def test_a_row_that_is_not_finite_leaves_other_rows_alone_under_a_given_amax():
    x, coefficients = tokens(8, 64), feedback_coefficients(correlated(64, 64), 64)
    poisoned, amax = x.clone(), x.abs().amax()
    poisoned[3, 20] = torch.nan
    found, clean = (quantize(each, SPEC, 1, amax, None, coefficients).dequantize() for each in (poisoned, x))
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(found[others], clean[others])


def test_a_compiled_graph_gives_the_same_bytes():
    x, coefficients = tokens(32, 64), feedback_coefficients(correlated(64, 64), 64)

    def codes(x, coefficients):
        return quantize(x, SPEC, 1, coefficients=coefficients).codes

    assert torch.equal(torch.compile(codes, fullgraph=True)(x, coefficients), codes(x, coefficients))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: quantize(x, SPEC), "needs coefficients int8"),
        (lambda x: fake_quantize(x, SPEC), "needs coefficients int8"),
        (
            lambda x: quantize(x, SPEC, coefficients=ZEROS[:, :32]),
            "int8 \\[64, 64\\]",
        ),
        (lambda x: quantize(x, SPEC, coefficients=ZEROS.float()), "got torch.float32"),
        (lambda x: quantize(x, SPEC, 0, coefficients=ZEROS), "along axis 1"),
        (lambda x: quantize(x, PLAIN, coefficients=ZEROS), "Remove them"),
        (lambda x: feedback_coefficients(x, 40), "multiple of 16"),
        (lambda x: feedback_coefficients(x[0], 64), "weight \\[N, K\\]"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(64, 64))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"error_feedback": 48}, "error_feedback: must be one of"),
        ({"rounding": "sr"}, "rounding: error feedback needs 'rne'"),
        ({"rht": 16}, "rht: error feedback needs 0"),
        ({"format": "mxfp4", "scale_rule": "max"}, "format: error feedback needs 'nvfp4'"),
        ({"block": (16, 16)}, "block: error feedback needs"),
        ({"amax_policy": "delayed"}, "amax_policy: error feedback needs 'current'"),
        ({"feedback_interval": -1}, "feedback_interval: must be at least 0"),
    ],
)
def test_specs_that_cannot_have_it_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **fields)


def test_a_shift_beyond_fp32s_range_is_added_before_it_is_rounded():
    x = torch.full((1, 32), -3e38)
    x[0, 0], x[0, 1:16] = 3.2e38, 3.2e38 * 4.9 / 6  # 4.9 rounds to 4
    coefficients = torch.zeros(32, 32, dtype=torch.int8)
    coefficients[1:16, 16:] = 36
    spec = replace(SPEC, scale_rule="max")
    found = quantize(x, spec, coefficients=coefficients).dequantize()[0, 16:]
    shift = 15 * (x[0, 1].double() - 4 / 6 * 3.2e38) * 36 / 64
    assert shift > torch.finfo(torch.float32).max
    # an error is rounded by at most half of a 72nd, all 16 columns hold the block's maximum, and E4M3 rounds
    # its scale by a 16th
    assert (found.double() - (shift - 3e38)).abs().max() < shift / 144 + (shift - 3e38) / 16
