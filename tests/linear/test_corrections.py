"""Corrections: the shipped mean over tokens and one from outside are removed, and added back in FP32."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourbits.linear.amax_policy import HISTORY
from fourbits.linear.checkpoint_state import recipe_states_of
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.model.experts import GroupedLinear
from fourbits.quant.correction import Correction, correction_of, register_correction
from fourbits.quant.fake_quantize import fake_quantize
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.recipe.overrides import gemms_with_both_sides, with_both_sides
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import GemmSpec, GemmTable, Recipe
from fourbits.settings import override
from support.assertions import assert_same_bytes
from support.straight_through import ExactGemm, RunPosition, dgrad, fprop, grad_of, linears, wgrad

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def split_halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x minus the mean of its half of the tokens, both means [2, F])."""
    halves = x.float().unflatten(0, (2, -1))
    means = halves.mean(1)
    return (halves - means[:, None]).flatten(0, 1), means


TOKEN_MEAN = correction_of("token-mean")
HALF_MEANS = Correction(
    split=split_halves,
    product=lambda means, weight, tokens: (means @ weight.t()).repeat_interleave(tokens // 2, 0),
    outer_product=lambda of_dy, of_x, tokens: tokens / 2 * (of_dy.t() @ of_x),
)
KNOWN = {"token-mean": TOKEN_MEAN, "half-means": HALF_MEANS}
register_correction("half-means", HALF_MEANS)
CORRECTED = ("fprop.lhs", "dgrad.lhs", "wgrad.lhs", "wgrad.rhs")
M, K, N = 64, 48, 80


def corrected(name: str, **changes: Any) -> Recipe:
    """nvfp4 for all layers, with a correction of X and dY."""
    where = {f"{role}.correction": name for role in CORRECTED}
    whole = {"keep_bf16.first_blocks": 0, "keep_bf16.last_blocks": 0}
    return override(get_recipe("nvfp4"), {**where, **whole, **changes})


def layer_of(recipe: Recipe, bias: bool = True) -> nn.Linear:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(K, N, bias=bias))
    convert(model, recipe, seed=3)
    set_step(model, 2, 64)
    return linears(model)[0]


def tensors(mean: float = 4.0) -> tuple[Tensor, Tensor]:
    """X and dY with a mean per feature, equal for all tokens."""
    generator = torch.Generator().manual_seed(11)
    x, dy = (torch.randn(M, width, generator=generator) for width in (K, N))
    means = [mean * torch.randn(width, generator=generator) for width in (K, N)]
    return x + means[0], dy + means[1]


def run(layer: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(Y, dX, dW)."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy.to(y.dtype))
    return y.detach(), grad_of(leaf), next(p.grad.clone() for p in layer.parameters() if p.dim() == 2)


def plus(result: ExactGemm, part: Tensor, bound: Tensor) -> ExactGemm:
    """A product plus an FP32 one: sums of both, and the rounding of their sum."""
    return ExactGemm(result.value + part, result.bound + bound + 2.0**-23 * (result.value.abs() + part.abs()))


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("saved", ["exact", "packed"])
def test_all_three_gemms_are_those_of_residuals_plus_the_removed_part_in_fp32(name, saved):
    recipe = corrected(name, saved_inputs=saved)
    layer, (x, dy) = layer_of(recipe), tensors()
    y, dx, dw = run(layer, x, dy)
    bare, position = get_recipe("nvfp4").table, RunPosition(seed=3, step=2, first_token=64)
    split = KNOWN[name].split
    (rx, _), (rdy, _) = split(x), split(dy)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    px, pdy = (t.double() - r.double() for t, r in ((x, rx), (dy, rdy)))
    w = weight.double()
    ulp = 2.0**-23

    plus(fprop(rx, weight, bias, bare, position), px @ w.t(), K * ulp * (px.abs() @ w.abs().t())).assert_near(
        y
    )
    plus(dgrad(rdy, weight, bare, position), pdy @ w, N * ulp * (pdy.abs() @ w.abs())).assert_near(dx)
    # the removed parts are means of FP32 sums over M tokens
    plus(wgrad(rdy, rx, bare, position), pdy.t() @ px, M * ulp * (pdy.abs().t() @ px.abs())).assert_near(dw)


def grid(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Entries 7 * (an E2M1 number), pairs of rows that cancel, and the largest in each block along both axes.

    Its amax is 42, so that the FP32 scale is 2^-6 and all block scales are 448: quantizing changes nothing.
    """
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    half = levels[torch.randint(8, (rows // 2, columns), generator=generator)]
    half = half * (2 * torch.randint(2, half.shape, generator=generator) - 1)
    half[::8], half[:, ::16] = 6.0, 6.0
    return 7.0 * torch.stack((half, -half), 1).flatten(0, 1)


@pytest.mark.parametrize("name", KNOWN)
def test_where_residuals_are_representable_the_result_is_the_unquantized_product(name):
    """Also with stochastic rounding: a value on the grid does not move."""
    recipe = corrected(name, **{"wgrad.lhs.rht": 0, "wgrad.rhs.rht": 0})
    layer, generator = layer_of(recipe, bias=False), torch.Generator().manual_seed(1)
    with torch.no_grad():
        layer.weight.copy_(grid(N, K, generator))
    x, dy = (
        grid(M, width, generator) + torch.randint(-9, 10, (width,), generator=generator) for width in (K, N)
    )
    w = layer.weight.detach().double()
    expected = (x.double() @ w.t(), dy.double() @ w, dy.double().t() @ x.double())
    for actual, product in zip(run(layer, x, dy), expected, strict=True):
        assert_same_bytes(actual, product.float())
    plain = layer_of(corrected("", **{"wgrad.lhs.rht": 0, "wgrad.rhs.rht": 0}), bias=False)
    plain.load_state_dict(layer.state_dict())
    for actual, product in zip(run(plain, x, dy), expected, strict=True):
        assert not torch.equal(actual, product.float()), "the mean is what makes the tensors representable"


def test_a_common_mean_no_longer_costs_precision():
    """Its steps of rounding grow with the mean: 32 times the deviation, and at least 8 times the error."""
    x, dy = tensors(mean=32.0)
    errors = []
    for name in ("token-mean", ""):
        layer = layer_of(corrected(name), bias=False)
        w = layer.weight.detach().double()
        expected = (x.double() @ w.t(), dy.double() @ w, dy.double().t() @ x.double())
        errors.append([float((a - e).norm()) for a, e in zip(run(layer, x, dy), expected, strict=True)])
    for with_correction, without in zip(*errors, strict=True):
        assert with_correction < without / 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_token_mean_is_summed_in_fp32_whatever_the_dtype_and_layout(dtype):
    x = tensors()[0].to(dtype).t().contiguous().t()
    residual, mean = TOKEN_MEAN.split(x)
    assert residual.is_contiguous()
    assert_same_bytes(residual, x.float() - mean)
    torch.testing.assert_close(mean.double(), x.double().mean(0), rtol=1e-6, atol=1e-6)


def test_averis_is_nvfp4_with_the_token_mean_and_without_transform_and_bf16_blocks():
    names = {"wgrad.lhs.rht": 0, "wgrad.rhs.rht": 0}
    assert replace(corrected("token-mean", **names), name="averis").digest == get_recipe("averis").digest


def test_packed_and_exact_saved_inputs_give_equal_bytes():
    x, dy = tensors()
    runs = [
        run(layer_of(corrected("token-mean", saved_inputs=saved)), x, dy) for saved in ("exact", "packed")
    ]
    for exact, packed in zip(*runs, strict=True):
        assert_same_bytes(packed, exact)


@pytest.mark.parametrize("saved", ["exact", "packed"])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_layers_give_the_bytes_of_eager_ones(saved, autocast):
    layer, (x, dy) = layer_of(corrected("half-means", saved_inputs=saved)), tensors()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for actual, expected in zip(run(compiled, x, dy), run(layer, x, dy), strict=True):
            assert_same_bytes(actual, expected)


def test_a_gemm_may_be_corrected_alone():
    """Fprop only, or both backward GEMMs only: the others compute as without."""
    x, dy = tensors()
    plain = run(layer_of(corrected("")), x, dy)
    whole = run(layer_of(corrected("token-mean")), x, dy)
    for roles, expected in (
        (("fprop.lhs",), (whole[0], *plain[1:])),
        (("dgrad.lhs",), (plain[0], whole[1], plain[2])),
        (("wgrad.lhs", "wgrad.rhs"), (*plain[:2], whole[2])),
    ):
        recipe = override(corrected(""), {f"{role}.correction": "token-mean" for role in roles})
        for actual, wanted in zip(run(layer_of(recipe), x, dy), expected, strict=True):
            assert_same_bytes(actual, wanted)


def test_layers_that_read_one_input_share_it_only_under_the_same_correction():
    x, dy = tensors()
    layers = [layer_of(corrected(name)) for name in ("token-mean", "token-mean", "", "half-means")]
    expected = [run(layer, x, dy) for layer in layers]
    leaf = x.clone().requires_grad_()
    shared = leaf * 1.0  # computed by a graph, so that sibling layers may share its operands
    for layer, (y, *_) in zip(layers, expected, strict=True):
        assert_same_bytes(layer(shared).detach(), y)


def test_amax_policies_follow_the_residual():
    recipe = corrected("token-mean", **{"fprop.lhs.amax_policy": "history"})
    layer, (x, dy) = layer_of(recipe), tensors()
    run(layer, x, dy)
    set_step(layer, 3)
    (tracked,) = recipe_states_of(layer)
    assert_same_bytes(tracked.amaxes[0, 0, HISTORY], TOKEN_MEAN.split(x)[0].abs().amax())


def test_an_empty_batch_gives_an_empty_result():
    layer = layer_of(corrected("token-mean"))
    y, dx, dw = run(layer, torch.zeros(0, K), torch.zeros(0, N))
    assert (y.shape, dx.shape) == ((0, N), (0, K))
    assert not dw.any()


def test_a_correction_set_on_one_operand_of_wgrad_applies_to_both():
    changes = {"wgrad.lhs.correction": "token-mean"}
    recipe = override(get_recipe("nvfp4"), with_both_sides(changes))
    assert recipe.wgrad.rhs.correction == "token-mean"
    assert gemms_with_both_sides(
        {"wgrad": {"rhs": {"correction": "a"}}, "fprop": {"lhs": {"correction": "a"}}}
    ) == {
        "wgrad": {"lhs": {"correction": "a"}, "rhs": {"correction": "a"}},
        "fprop": {"lhs": {"correction": "a"}, "rhs": {}},
    }


def test_a_recipe_without_a_correction_keeps_its_digest():
    assert get_recipe("nvfp4").digest == "2cb0b0fe22f75ccb"
    assert corrected("token-mean").digest != corrected("").digest


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: OperandSpec(correction="median"),
            "no correction is called 'median'. Registered: .*token-mean",
        ),
        (lambda: OperandSpec(correction=None), "must be text"),  # pyright: ignore[reportArgumentType]
        (lambda: table(fprop=(ROW, MEAN)), "fprop.rhs.correction: a weight has no tokens"),
        (lambda: table(dgrad=(ROW, MEAN)), "dgrad.rhs.correction: a weight has no tokens"),
        (lambda: table(wgrad=(MEAN, ROW)), "dY and X must have the same correction"),
        (lambda: table(fprop=(MEAN, ROW), wgrad=(ROW, FORWARD)), "wgrad.rhs.source: forward re-quantizes"),
        (lambda: table(fprop=(MEAN, ROW), wgrad=(ROW, ROW), saved_inputs="packed"), "needs one correction"),
        (lambda: register_correction("token-mean", HALF_MEANS), "registered already"),
        (lambda: register_correction("", HALF_MEANS), "must not be empty"),
        (lambda: quantize(torch.ones(2, 16), MEAN), "added back by a linear layer only"),
        (lambda: fake_quantize(torch.ones(2, 16), MEAN), "added back by a linear layer only"),
    ],
)
def test_a_wrong_use_is_an_error(build, message):
    with pytest.raises(ValueError, match=message):
        build()


ROW, MEAN = OperandSpec(), OperandSpec(correction="token-mean")
FORWARD = OperandSpec(source="forward")


def table(saved_inputs: Any = "exact", **gemms: tuple[OperandSpec, OperandSpec]) -> GemmTable:
    specs: Any = {name: GemmSpec(lhs=lhs, rhs=rhs) for name, (lhs, rhs) in gemms.items()}
    return GemmTable(saved_inputs=saved_inputs, **specs)


def test_a_residual_of_another_dtype_is_an_error():
    wrong = replace(TOKEN_MEAN, split=lambda x: (x.bfloat16(), x.float().mean(0)))
    with pytest.raises(ValueError, match="the residual must be contiguous fp32"):
        register_correction("bf16-residual", wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"product": None}, "the functions of 'wrong' must work on fp32"),
        ({"split": lambda x: (x, x.mean(0))}, "residual \\+ product must be the tensor"),
        ({"split": lambda x: (x - x[:1], x[0].clone())}, "must be orthogonal"),
        ({"outer_product": lambda a, b, rows: a[:, None] * b}, "outer_product must be the product"),
    ],
    ids=["no function", "nothing removed", "another part", "rows forgotten"],
)
def test_a_correction_whose_functions_contradict_each_other_is_refused(change, message):
    mean = Correction(
        lambda x: (x - x.mean(0), x.mean(0)),
        lambda removed, weight, rows: removed @ weight.t(),
        lambda a, b, rows: rows * a[:, None] * b,
    )
    with pytest.raises(ValueError, match=message):
        register_correction("wrong", replace(mean, **change))


def test_a_part_that_is_orthogonal_only_to_the_rest_of_its_own_tensor_is_refused():
    """Wgrad multiplies what is left of dY with what is removed of X, whose largest directions are others."""

    def without_largest(x):
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        part = s[0] * u[:, :1] @ v[:1]
        return x - part, part

    largest = Correction(
        without_largest, lambda part, weight, rows: part @ weight.t(), lambda a, b, rows: a.t() @ b
    )
    with pytest.raises(ValueError, match="orthogonal to the removed part of any other"):
        register_correction("largest", largest)


def test_experts_with_a_correction_are_a_loop_and_the_summary_says_so():
    (row,) = convert(nn.Sequential(GroupedLinear(3, 32, 48)), corrected("token-mean"), stacks=[]).rows
    assert row.reason.endswith("; loop of 3 linear layers, because corrections have no grouped kernels")
