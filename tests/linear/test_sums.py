"""Recipes with the sums of a tensor core: each GEMM of a layer is `fb.matmul` with these sums."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fourbits as fb
from fourbits.gemm.sums import unsupported_sums
from fourbits.linear.native_gemms import emulated_gemms, with_native_gemms
from fourbits.recipe.presets import RECIPES, get_recipe
from support.assertions import assert_same_bytes
from support.straight_through import RunPosition

HALF_QUANTIZED = replace(get_recipe("nvfp4").fprop, rhs=fb.OperandSpec(format="bf16"))
SUMS = ("exact", "sm_100", "sm_103", "sm_90", "sm_90_fp8")


def wide(rows: int, columns: int) -> torch.Tensor:
    """Magnitudes over the range of a block scale along both axes, so that sums depend on their order."""
    scale = torch.exp2(-torch.randint(0, 15, (rows // 16, columns // 16)).float())
    return torch.randn(rows, columns) * scale.repeat_interleave(16, 0).repeat_interleave(16, 1)


def weight_of(model: nn.Sequential) -> torch.Tensor:
    weight = model[0].weight
    assert isinstance(weight, torch.Tensor)
    return weight


def layer(recipe: fb.Recipe) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    weight_of(model).data.copy_(wide(48, 64))
    fb.convert(model, replace(recipe, keep_bf16=fb.KeepBF16(names=()), layers=()))
    fb.set_step(model, 3)
    return model


def supported(recipe: fb.Recipe, sums: str) -> bool:
    gemms = (recipe.fprop, recipe.dgrad, recipe.wgrad)
    known = all(gemm.high_precision or unsupported_sums(sums, gemm.lhs, gemm.rhs) is None for gemm in gemms)
    return known and not recipe.table.corrects


def as_read(
    x: torch.Tensor, spec: fb.OperandSpec, of_fprop: fb.OperandSpec
) -> tuple[torch.Tensor, fb.OperandSpec]:
    """What an operand is quantized from, and how: with source forward the values of Fprop's operand."""
    if spec.source != "forward":
        return x, spec
    return fb.quantize(x, of_fprop, 1).dequantize(), replace(spec, source="as_is")


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("name", [name for name in RECIPES if "eden" not in str(get_recipe(name).dgrad)])
def test_the_three_gemms_have_the_sums(name, sums):
    recipe = replace(get_recipe(name), layers=())
    if not supported(recipe, sums):
        reasons = [f"{sums} has no instruction for", *(["correction"] if recipe.table.corrects else [])]
        with pytest.raises(ValueError, match=f"sums: .*({'|'.join(reasons)}).* Set sums to fp32"):
            replace(recipe, sums=sums)
        return
    model = layer(replace(recipe, sums=sums))
    x, dy = wide(64, 64).requires_grad_(), wide(64, 48)
    y = model(x)
    y.backward(dy)
    weight, position = weight_of(model).detach(), RunPosition(step=3)
    expected = []
    for gemm, lhs, rhs, axes in (
        ("fprop", x.detach(), weight, (1, 1)),
        ("dgrad", dy, weight, (1, 0)),
        ("wgrad", dy, x.detach(), (0, 0)),
    ):
        specs = getattr(recipe, gemm)
        if specs.high_precision:
            expected.append(None)
            continue
        operands = [
            fb.quantize(
                *as_read(t, spec, recipe.fprop.lhs if t is not weight else recipe.fprop.rhs), axis,
                sr_key=position.sr_key(f"{gemm}.{side}"),
            )
            for t, spec, axis, side in zip(
                (lhs, rhs), (specs.lhs, specs.rhs), axes, ("lhs", "rhs"), strict=True
            )
        ]  # fmt: skip
        expected.append(fb.matmul(operands[0], operands[1], torch.float32, sums=sums))
    for found, wanted in zip((y, x.grad, weight_of(model).grad), expected, strict=True):
        if wanted is not None:
            assert found is not None
            assert_same_bytes(found.detach(), wanted)


def test_the_sums_show_in_fp32_gradients():
    """Wide scales: rounding toward zero after 64 products gives other bits than FP32 sums of the CPU."""
    gradients = []
    for sums in ("fp32", "sm_100"):
        torch.manual_seed(0)
        model = layer(replace(get_recipe("nvfp4-naive"), sums=sums))
        model(wide(128, 64)).backward(wide(128, 48))
        gradients.append(weight_of(model).grad)
    assert not torch.equal(*gradients)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4 * float(gradients[0].abs().max()))


@pytest.mark.parametrize("name", ["nvfp4", "quartet2"])
def test_a_compiled_layer_has_the_bits_of_an_eager_one(name):
    recipe = replace(get_recipe(name), sums="sm_100")
    torch.manual_seed(0)
    x, dy = wide(64, 64), wide(64, 48)
    results = []
    for compiled in (False, True):
        torch.manual_seed(1)
        model = layer(recipe)
        run = torch.compile(model, fullgraph=True) if compiled else model
        y = run(x)
        y.backward(dy)
        results.append((y.detach(), weight_of(model).grad))
    for eager, graph in zip(*results, strict=True):
        assert_same_bytes(graph, eager)


def test_packed_inputs_change_no_bit():
    gradients = []
    for saved in ("exact", "packed"):
        torch.manual_seed(0)
        model = layer(replace(get_recipe("nvfp4"), sums="sm_100", saved_inputs=saved))
        model(wide(64, 64)).backward(wide(64, 48))
        gradients.append(weight_of(model).grad)
    assert_same_bytes(*gradients)


def test_only_other_sums_change_a_recipes_digest():
    recipe = get_recipe("nvfp4")
    assert replace(recipe, sums="sm_100").digest != recipe.digest
    assert replace(recipe, sums="sm_100", epilogue="product").digest != replace(recipe, sums="sm_100").digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sums": "sm_80"}, "sums: must be one of"),
        ({"epilogue": "product"}, "epilogue: product needs sums other than fp32"),
        (
            {"sums": "sm_100", "fprop": HALF_QUANTIZED},
            r"sums: needs two quantized operands, got nvfp4 and bf16 \(fprop\)",
        ),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(get_recipe("nvfp4"), **change)


def test_the_summary_of_native_gemms_says_why_they_are_emulated():
    table = replace(get_recipe("nvfp4"), sums="sm_100").table
    assert with_native_gemms(table).native == ()
    assert emulated_gemms(table) == "fprop: sums sm_100, dgrad: sums sm_100, wgrad: sums sm_100"
