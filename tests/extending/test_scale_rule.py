"""Scale rules from outside, as docs/extending.md shows: a percentile, and maxima that map to 4."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import fourbits as fb
from fourbits.cli.main import main
from fourbits.formats.codes import decode, encode
from fourbits.formats.descriptors import E2M1, E4M3
from fourbits.quant import quantize as dispatch
from fourbits.quant.cpu import compiled as compiler
from fourbits.quant.kernels import support
from fourbits.quant.reference import quantize as reference
from fourbits.quant.reference.scale_search import IDEAL_SCALES
from fourbits.quant.request import OperandRequest, Signature
from fourbits.quant.scale_rules import SCALE_RULES, ScaleRule
from fourbits.recipe.presets import get_recipe
from support.adversarial import FINITE, NON_FINITE
from support.assertions import assert_same_bytes, assert_same_operand
from support.documented import blocks_of, names_of
from support.straight_through import assert_layer_follows

KEY = torch.tensor([1234, 44, 17, 48, 3])


@pytest.fixture(scope="module")
def page():
    return names_of("A scale rule")


@pytest.fixture
def recipe_file(page, tmp_path):
    (text,) = blocks_of("A scale rule", "yaml")
    path = tmp_path / "mine.yaml"
    path.write_text(text + "\nkeep_bf16: {names: []}\n")
    return path


def test_a_rule_decides_the_block_scale_and_the_codes_follow(page):
    """The second largest of 16 is the 90th percentile; scales and codes by brute force in float64."""
    x = torch.randn(8, 64)
    q = fb.quantize(x, fb.OperandSpec(scale_rule="percentile"))
    second = x.view(8, 4, 16).abs().sort(dim=2).values[..., -2].double()
    ideal = second / 6 / q.global_scale.double()
    assert torch.equal(q.block_scale.float(), decode(encode(ideal.float(), E4M3), E4M3))
    step = q.block_scale.double().repeat_interleave(16, 1) * q.global_scale.double()
    elements = decode(torch.arange(16).to(torch.uint8), E2M1).double()
    nearest = (x.double()[..., None] / step[..., None] - elements).abs().amin(2)
    assert ((x.double() / step - q.dequantize().double() / step).abs() <= nearest + 2**-18).all()


def test_maxima_map_to_4_under_a_bound_that_leaves_room(page):
    """A scale rounded to 4 bits moves 4 by at most 1/16, and everything from 3.5 to 5 rounds to 4."""
    x = torch.randn(32, 64)
    q = fb.quantize(x, fb.OperandSpec(scale_rule="max-to-4"))
    elements = decode(q.element_codes(), E2M1).abs().view(32, 4, 16)
    assert (elements.amax(2) == 4).all()
    assert q.block_scale.float().amax() == 384  # 256 * 6 / 4: the tensor's largest block


@pytest.mark.parametrize("rule", ["percentile", "max-to-4"])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_cpu_gives_the_bytes_of_the_reference(page, rule, axis, monkeypatch):
    monkeypatch.setattr(compiler, "COMPILE_FROM", 0)
    for block, rounding in (((1, 16), "rne"), ((16, 16), "sr")):
        spec = fb.OperandSpec(scale_rule=rule, block=block)
        spec = replace(spec, rounding=rounding, scale_rounding=rounding)
        for number, make in enumerate({**FINITE, **NON_FINITE}.values()):
            x = make((40, 80), number)
            assert_same_operand(
                fb.quantize(x, spec, axis, sr_key=KEY), reference.quantize(x, spec, axis, None, KEY)
            )
            exact = dispatch.exact_operand(x, spec, axis, sr_key=KEY)
            assert_same_bytes(exact.values, reference.exact_operand(x, spec, axis, None, KEY).values)


def test_a_recipe_file_takes_the_words_and_a_layer_follows_them(recipe_file):
    recipe = get_recipe(recipe_file)
    assert recipe.fprop.lhs == replace(get_recipe("nvfp4").fprop.lhs, scale_rule="percentile")
    assert recipe.table.shares_weight
    assert_layer_follows(recipe)


def test_recipes_show_prints_the_words(recipe_file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["recipes", "show", str(recipe_file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "X: nvfp4 1x16 rne, percentile" in printed
    assert "W: nvfp4 16x16 rne, max-to-4" in printed


def test_a_process_that_did_not_register_says_which_word_and_what_to_call(recipe_file):
    shown = subprocess.run(
        [sys.executable, "-c", "import sys; from fourbits.cli.main import main; sys.exit(main(sys.argv[1:]))"]
        + ["recipes", "show", str(recipe_file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode != 0
    message = " ".join(shown.stderr.split())
    assert "scale_rule: no scale rule is called 'percentile'." in message
    assert "call fourbits.register_scale_rule first, in every process" in message
    assert "Traceback" not in message


def test_a_gpu_runs_the_reference_and_says_why(page, monkeypatch):
    monkeypatch.setattr(support, "unsupported_device", lambda device: None)
    signature = Signature(torch.device("cuda"), torch.bfloat16, (64, 64), (64, 1))
    dispatch._warn_of_reference.cache_clear()
    with pytest.warns(UserWarning, match="scale_rule percentile has no kernel"):
        dispatch.quantizer.__wrapped__(
            signature, (OperandRequest(fb.OperandSpec(scale_rule="percentile"), 1),)
        )


def test_a_rule_may_serve_a_registered_hierarchy(page):
    names_of("A block format")
    if "max-to-3" not in SCALE_RULES:
        rule = ScaleRule(name="max-to-3", scales=("e4m3-e8m0",))
        fb.register_scale_rule(rule, lambda *a: 2 * IDEAL_SCALES["max"](*a))
    spec = fb.OperandSpec(format="nvfp4-e8m0", scale_rule="max-to-3")
    x = torch.randn(16, 256) * torch.arange(1, 17)[:, None] / 64
    x[0, 0] = 4.0  # the largest block saturates; others have room for a doubled scale
    largest = decode(fb.quantize(x, spec).element_codes(), E2M1).abs().view(16, 16, 16).amax(2)
    assert (largest.flatten()[1:] == 3).all()


WRONG = {
    "taken": (ScaleRule(name="max-to-4"), None, "'max-to-4': the name is already taken.*another name"),
    "shipped": (ScaleRule(name="search-mse"), None, "Choose another name"),
    "unnamed": (ScaleRule(name=""), None, "must not be empty"),
    "powers of two": (ScaleRule(name="wrong", scales=("e8m0",)), None, "scales must be some of e4m3, ue5m3"),
    "all scales": (ScaleRule(name="wrong", scales=None), None, "follow from the maxima of blocks"),
    "no format": (ScaleRule(name="wrong", elements=("e9m9",)), None, "no format has E9M9 elements"),
    "wrong shape": (
        ScaleRule(name="wrong"),
        lambda blocks, *_: blocks.abs().amax(dim=3),
        r"'wrong': its function must return one scale per block, torch.float32 \[.*reduced over dimensions",
    ),
    "wrong dtype": (ScaleRule(name="wrong"), lambda b, amax, *_: amax.double(), r"got torch\.float64"),
    "fails": (ScaleRule(name="wrong"), lambda b, amax, *_: amax[10**6], "out of bounds"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_refused_and_leaves_nothing_behind(page, name):
    rule, function, message = WRONG[name]
    before = set(SCALE_RULES), set(IDEAL_SCALES)
    with pytest.raises((ValueError, IndexError), match=message):
        fb.register_scale_rule(rule, function or page["max_to_4"])
    assert (set(SCALE_RULES), set(IDEAL_SCALES)) == before


def test_what_a_function_returns_is_checked_at_every_call(page):
    """It may be right for the small tensor that it is tried out on, and wrong later."""
    if "narrow" not in SCALE_RULES:
        fb.register_scale_rule(ScaleRule(name="narrow"), lambda b, amax, *_: amax[:, :64])
    with pytest.raises(ValueError, match=r"'narrow': .* \[1, 65\], got torch.float32 \[1, 64\]"):
        fb.quantize(torch.randn(1, 65 * 16), fb.OperandSpec(scale_rule="narrow"))


def test_every_rule_has_a_function():
    assert set(SCALE_RULES) == set(IDEAL_SCALES)


def test_a_rule_is_refused_where_it_does_not_serve(page):
    with pytest.raises(
        ValueError, match=r"percentile needs E4M3 or UE5M3 block scales, got mxfp4\. Use nvfp4"
    ):
        fb.OperandSpec(format="mxfp4", scale_rule="percentile")


def test_registering_the_same_again_changes_nothing(page):
    before = IDEAL_SCALES["percentile"]
    fb.register_scale_rule(ScaleRule(name="percentile", clips=True), page["percentile"])
    assert IDEAL_SCALES["percentile"] is before
