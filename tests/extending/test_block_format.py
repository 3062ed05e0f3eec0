"""A block format from outside: three levels of scales and FP32 scales of INT4, as docs/extending.md shows."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import nn

import fourbits as fb
from fourbits.formats.codes import decode, encode
from fourbits.formats.descriptors import BLOCK_FORMATS, E2M1, E4M3, E8M0, INT8, BlockFormat
from fourbits.gemm.reference import matmul as reference_gemm
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.quant import quantize as dispatch
from fourbits.quant.cpu import compiled as compiler
from fourbits.quant.kernels import support
from fourbits.quant.quantize import exact_operand
from fourbits.quant.reference import quantize as reference
from fourbits.quant.request import OperandRequest, Signature
from fourbits.quant.scale_hierarchy import SCALE_HIERARCHIES
from fourbits.quant.tensor import QuantizedTensor, unpacked
from fourbits.recipe.recipe import GemmSpec, KeepBF16, Recipe
from support.adversarial import FINITE, NON_FINITE
from support.assertions import assert_same_bytes, assert_same_operand
from support.documented import names_of
from support.straight_through import (
    assert_layer_follows,
    exact_gemm,
    grad_of,
)

KEY = torch.tensor([1234, 44, 17, 48, 3])


@pytest.fixture(scope="module")
def page():
    return names_of("A block format")


@pytest.fixture
def spec(page):
    return fb.OperandSpec(format=page["NVFP4_E8M0"].name)


@pytest.fixture
def square(page):
    """Blocks of 16x16, of which 8x8 share a power of two, stored once for each row of blocks."""
    three, name = page["THREE_LEVELS"], "nvfp4-e8m0-square"
    if name not in BLOCK_FORMATS:

        def store(levels):
            scale, shared = levels
            return three.encode((scale, shared.repeat_interleave(8, 0)[: scale.shape[0]]))

        def load(stored):
            scale, shared = three.decode(stored)
            return scale, shared[::8]

        groups = {"scale": name, "block": (16, 16), "scale_groups": ((8, 8),)}
        fb.register_block_format(
            replace(page["NVFP4_E8M0"], name=name, **groups),
            replace(three, name=name, encode=store, decode=load),
        )
    return fb.OperandSpec(format=name)


def spread(rows: int, columns: int) -> torch.Tensor:
    """Every 128 columns 2**-12 times as large as those before."""
    return torch.randn(rows, columns) * torch.exp2(torch.arange(columns) // 128 * -12.0)


def levels_of(q: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale, shared = SCALE_HIERARCHIES[q.spec.block_format.scale or ""].decode(q.block_scale)
    return scale, shared


def test_each_level_is_the_nearest_that_its_grid_holds(spec):
    """By brute force over all codes, in float64, from the stored FP32 scale."""
    x = spread(5, 300)
    q = fb.quantize(x, spec)
    (scale, shared), blocks = levels_of(q), torch.nn.functional.pad(x, (0, 4)).double().unflatten(1, (19, 16))
    ideal = blocks.abs().amax(2) / (6 * q.global_scale.double())
    per_block = shared.double().repeat_interleave(8, 1)[:, :19]
    groups = torch.nn.functional.pad(ideal, (0, 5)).unflatten(1, (3, 8)).amax(2)
    assert (shared.log2() == shared.log2().round()).all()
    assert (groups / shared <= 448 * (1 + 2**-20)).all()
    assert (groups / shared >= 224 * (1 - 2**-20)).all()
    scales = decode(torch.arange(0x7F).to(torch.uint8), E4M3).double()
    nearest = (ideal[..., None] / per_block[..., None] - scales).abs().amin(2)
    assert ((ideal / per_block - scale.double()).abs() <= nearest + 448 * 2**-20).all()
    elements = decode(torch.arange(16).to(torch.uint8), E2M1).double()
    step = scale.double() * per_block * q.global_scale.double()
    in_steps = blocks / step[..., None]
    found = q.dequantize().double()
    found = torch.nn.functional.pad(found, (0, 4)).unflatten(1, (19, 16)) / step[..., None]
    nearest = (in_steps[..., None] - elements).abs().amin(3)
    assert ((in_steps - found).abs() <= nearest + 2**-18).all()


def test_a_third_level_keeps_what_the_range_of_e4m3_loses(spec):
    x = spread(16, 512)
    kept = fb.quantize(x, spec).dequantize()
    lost = fb.quantize(x, fb.OperandSpec()).dequantize()
    assert not lost[:, 384:].any()
    errors = ((kept - x).square().mean(0) / x.square().mean(0)).unflatten(0, (4, 128)).mean(1).sqrt()
    assert (errors < 0.15).all(), "E2M1 under a scale of 4 significant bits leaves about 0.1"


@pytest.mark.parametrize("axis", [0, 1])
def test_exact_operands_hold_the_values_of_codes_and_scales(spec, axis):
    for number, make in enumerate({**FINITE, **NON_FINITE}.values()):
        x = make((21, 150), number)
        packed, exact = fb.quantize(x, spec, axis), exact_operand(x, spec, axis)
        values = exact.values.t() if axis == 0 else exact.values
        rows, size = packed.rows, packed.contraction_size
        assert torch.equal(
            values.float()[:rows, :size].nan_to_num(7), packed.block_values()[:, :size].nan_to_num(7)
        )
        assert_same_bytes(exact.scale, packed.global_scale)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rounding", ["rne", "sr"])
def test_the_cpu_gives_the_bytes_of_the_reference(spec, axis, rounding, monkeypatch):
    monkeypatch.setattr(compiler, "COMPILE_FROM", 0)
    spec = replace(spec, rounding=rounding, rht=16 if rounding == "sr" else 0)
    for number, make in enumerate({**FINITE, **NON_FINITE}.values()):
        x = make((40, 150), number)
        expected = reference.quantize(x, spec, axis, None, KEY)
        assert_same_operand(fb.quantize(x, spec, axis, sr_key=KEY), expected)
        values = reference.exact_operand(x, spec, axis, None, KEY).values
        assert_same_bytes(exact_operand(x, spec, axis, sr_key=KEY).values, values)


@pytest.mark.parametrize("name", ["nvfp4-e8m0", "int4-fp32"])
def test_matmul_is_the_product_of_dequantized_values(page, name):
    spec = fb.OperandSpec(format=name)
    a, b = fb.quantize(spread(24, 300), spec), fb.quantize(torch.randn(300, 17), spec, axis=0)
    expected = exact_gemm(a.dequantize().double(), b.dequantize().double().t())
    expected.assert_near(fb.matmul(a, b, torch.float32))
    expected.assert_near(reference_gemm.matmul(a, b, torch.float32, None))


def test_the_transpose_needs_square_groups(spec, square):
    with pytest.raises(ValueError, match=r"needs square blocks, got one scale for 16x128 el.*other axis"):
        fb.quantize(torch.randn(160, 144), replace(spec, block=(16, 16))).t()
    for shape in [(160, 144), (37, 300), (300, 20)]:
        x = spread(*shape)
        assert_same_operand(fb.quantize(x, square).t(), fb.quantize(x.t().contiguous(), square))


def recipe_of(spec, weight, saved: Literal["exact", "packed"] = "exact") -> Recipe:
    row = GemmSpec(lhs=spec, rhs=weight)
    wgrad_spec = GemmSpec(lhs=replace(spec, rounding="sr"), rhs=spec)
    keep = KeepBF16(names=())
    return Recipe(name="mine", fprop=row, dgrad=row, wgrad=wgrad_spec, saved_inputs=saved, keep_bf16=keep)


@pytest.mark.parametrize("kind", ["three levels", "square weight", "FP32 scales"])
def test_a_linear_layer_multiplies_operands_of_the_format(spec, square, kind):
    rows = fb.OperandSpec(format="int4-fp32") if kind == "FP32 scales" else spec
    recipe = recipe_of(rows, square if kind == "square weight" else rows)
    assert recipe.table.shares_weight == (kind == "square weight")
    assert_layer_follows(recipe)


def gradients(recipe: Recipe, x: torch.Tensor, compiled: bool = False):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(x.shape[1], 96))
    convert(model, recipe)
    set_step(model, 2, first_token=32)
    x, saved = x.clone().requires_grad_(), []
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = run(x)
    y.square().sum().backward()
    return [grad_of(leaf) for leaf in (x, *model.parameters())], {tuple(t.shape): t.dtype for t in saved}


@pytest.mark.parametrize("compiled", [False, True])
def test_saved_inputs_are_packed_at_4_5625_bits(spec, compiled):
    """Codes of 4 bits, 8 bits per 16 elements, 8 bits per 128."""
    x = torch.randn(384, 48)
    wanted, _ = gradients(recipe_of(spec, spec), x)
    found, saved = gradients(recipe_of(spec, spec, "packed"), x, compiled)
    assert saved[48, 192] == saved[48, 24 + 3] == torch.uint8
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_shard_by_features_must_not_cut_a_group(spec):
    """16 features are whole blocks, and part of the 8 that share a power of two."""
    model = nn.Sequential(nn.Linear(128, 64))
    convert(model, recipe_of(spec, spec))
    with pytest.raises(
        ValueError, match="first_in must be a multiple of 128 from 0 on, so that no block is split"
    ):
        fb.shard_features(model[0], first_in=16)


def test_fp32_scales_refuse_to_be_saved_packed(page):
    spec = fb.OperandSpec(format="int4-fp32")
    with pytest.raises(ValueError, match=r"saved_inputs: packed .* int4-fp32 .* Set it to exact"):
        recipe_of(spec, spec, "packed")


def test_training_with_the_format_reduces_the_loss_as_bf16_does(spec, square):
    """A linear map of 32 features is learnt to within the noise that 4 bits leave, a tenth of the signal."""
    losses = {}
    for name, recipe in (("bf16", "bf16"), ("mine", recipe_of(spec, square))):
        torch.manual_seed(0)
        model, target = nn.Sequential(nn.Linear(32, 16)), torch.randn(16, 32)
        convert(model, recipe)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for step in range(120):
            set_step(model, step)
            x = torch.randn(64, 32)
            loss = (model(x) - x @ target.t()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.setdefault(name, []).append(loss.item())
    assert losses["mine"][0] > 20
    assert losses["mine"][-1] < losses["bf16"][-1] + 0.1 * losses["mine"][0]


def test_a_gpu_runs_the_reference_and_says_why(spec, monkeypatch):
    monkeypatch.setattr(support, "unsupported_device", lambda device: None)
    signature = Signature(torch.device("cuda"), torch.bfloat16, (64, 64), (64, 1))
    dispatch._warn_of_reference.cache_clear()
    with pytest.warns(UserWarning, match="format nvfp4-e8m0 has no kernel"):
        dispatch.quantizer.__wrapped__(signature, (OperandRequest(spec, 1),))


def mutated(**changes):
    def of(page):
        return replace(page["NVFP4_E8M0"], name="wrong", scale="wrong"), replace(
            page["THREE_LEVELS"], name="wrong", **changes
        )

    return of


def descriptor(**changes):
    return lambda page: (replace(page["NVFP4_E8M0"], name="wrong", **changes), None)


def shapeless(page):
    return mutated(derive=lambda *a: (page["derive"](*a)[0], torch.ones(1)))(page)


def one_level(page):
    return mutated(derive=lambda *a: (page["derive"](*a)[0][:1], page["derive"](*a)[1]))(page)


def forgetful(page):
    return mutated(encode=lambda levels: page["store"]((levels[0], torch.ones_like(levels[1]))))(page)


def blind_to_the_axis(page):
    def derive(block_amax, ideal, level, words, spec, axis):
        return page["derive"](block_amax, ideal, level, words, spec, 1)

    return mutated(derive=derive)(page)


WRONG = {
    "taken": (lambda page: (replace(page["NVFP4_E8M0"], block=(1, 32)), None), "'nvfp4-e8m0'.*another name"),
    "shipped": (
        lambda page: (BlockFormat(name="nvfp4", element=E2M1, scale="e4m3", block=(1, 8)), None),
        "Choose",
    ),
    "unnamed": (
        lambda page: (BlockFormat(name="", element=E2M1, scale="e4m3", block=(1, 8)), None),
        "not be empty",
    ),
    "no element": (descriptor(element=None), "'wrong': element must have 4 or 8 bits"),
    "no blocks": (descriptor(block=None), "block must be"),
    "unknown scales": (
        descriptor(scale="e5m10"),
        "no scale hierarchy is called 'e5m10'. Known: e4m3.*as scales",
    ),
    "two scales": (descriptor(scale_in_epilogue=True), "only scales"),
    "not exact": (
        lambda page: (BlockFormat(name="wrong", element=INT8, scale="e4m3", block=(1, 16)), None),
        "8 significant bits of BF16.*scale_in_epilogue",
    ),
    "wrong shape": (shapeless, r"'wrong': derive must return one encode factor per block.*got .* \[1\]"),
    "one level": (one_level, "derive must return 2 levels, got 1"),
    "wrong dtype": (mutated(dtype=torch.float32), "encode must return what stored_shape and dtype say"),
    "e8m0 dtype": (mutated(dtype=torch.float8_e8m0fnu), "Store bytes"),
    "zeros": (mutated(of_zeros=(0.0,)), "of_zeros must have a number for each of the 2 levels"),
    "forgetful": (forgetful, r"decode\(encode\(levels\)\) must give the levels back"),
    "no axis": (blind_to_the_axis, "level 1 with a number per"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_format_is_refused_and_leaves_nothing_behind(page, name):
    make, message = WRONG[name]
    formats, hierarchies = set(BLOCK_FORMATS), set(SCALE_HIERARCHIES)
    with pytest.raises(ValueError, match=message):
        fb.register_block_format(*make(page))
    assert (set(BLOCK_FORMATS), set(SCALE_HIERARCHIES)) == (formats, hierarchies)


def test_registering_the_same_again_changes_nothing(page):
    before = SCALE_HIERARCHIES["e4m3-e8m0"]
    fb.register_block_format(page["NVFP4_E8M0"], page["THREE_LEVELS"])
    assert SCALE_HIERARCHIES["e4m3-e8m0"] is before


def test_a_format_that_is_not_registered_here_is_named_with_the_remedy():
    with pytest.raises(
        ValueError, match=r"no block format is called 'elsewhere'.*register_block_format first, in every"
    ):
        fb.OperandSpec(format="elsewhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_rounding": "sr"}, "scale_rounding: sr needs E4M3 or UE5M3 scales, got nvfp4-e8m0"),
        ({"amax_policy": "delayed"}, "amax_policy: delayed counts saturated E4M3, UE5M3 or FP32 scales"),
        ({"scale_rule": "4over6-mse"}, "4over6-mse needs E2M1 elements with E4M3 block scales"),
        ({"scale_bound": 256}, "no E4M3 scales to bound"),
    ],
)
def test_what_shipped_scales_alone_can_do_is_refused(spec, change, message):
    with pytest.raises(ValueError, match=message):
        replace(spec, **change)


def test_a_saved_operand_is_read_by_what_its_bytes_say(spec):
    """The E4M3 codes, then one E8M0 code per 8 blocks: written by hand, read by the format."""
    scale, shared = torch.tensor([[1.0, 2.0, 448.0]]), torch.tensor([[2.0**-9]])
    stored = torch.cat([encode(scale, E4M3), encode(shared, E8M0)], 1)
    codes = torch.full((1, 24), 0x72, dtype=torch.uint8)  # elements 1 and 6
    q = QuantizedTensor(codes, stored, torch.tensor(3.0), 1, (1, 48), spec)
    expected = torch.tensor([1.0, 6.0]).repeat(8) * scale[0, :, None] * 3.0 * 2.0**-9
    assert torch.equal(q.dequantize().view(3, 16), expected)
    assert torch.equal(unpacked(q).values.float().view(3, 16) * 3.0, expected)
