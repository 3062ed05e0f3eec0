"""The section about techniques shows what was measured, harm included, as a page and as a file."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fourbits.compare.number_format import NO_BREAK, percent
from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.comparison_report import render
from fourbits.compare.report.context import Context
from fourbits.compare.report.technique_section import measured_names, write_figure
from fourbits.compare.report.technique_summary import format_rows, headline, scale_bars
from fourbits.compare.report.technique_words import sentences
from fourbits.compare.techniques.findings import (
    NO_TENSOR_SCALE,
    GradientError,
    LargestElement,
    OperandError,
    RoundingBias,
    Techniques,
    TransformEffect,
    WeightMismatch,
)
from support.fabricated_runs import fabricate_comparison

RECIPES = {"fp8": 0.04, "mxfp4": 0.25, "nvfp4": 0.19, "nvfp4-naive": 0.17}
LAYERS = ("blocks.0.up", "blocks.0.down")


def gradients() -> tuple[GradientError, ...]:
    """Two batches, with errors 0.01 below and above RECIPES."""
    return tuple(
        GradientError(
            recipe=recipe,
            batch=batch,
            draws=4,
            error=error + 0.02 * (batch - 0.5),
            bias=error / 2,
            cosine=1 - error / 10,
            projection=1.0,
        )
        for recipe, error in RECIPES.items()
        for batch in range(2)
    )


def fabricated(ratios: tuple[float, float] = (0.9, 1.2)) -> Techniques:
    """Findings on two layers; ratios: of the transform's error to that without, by layer."""
    formats = ("fp8", "mxfp4", "nvfp4")
    return Techniques(
        run="runs/bf16",
        checkpoint="0",
        step=245,
        layers=LAYERS,
        tokens_per_batch=2048,
        batches=2,
        gradients=gradients(),
        operands=tuple(
            OperandError(layer=layer, operand=operand, recipe=name, error=0.1)
            for layer in LAYERS
            for operand in ("X", "W", "dY")
            for name in formats
        ),
        largest=tuple(
            LargestElement(
                layer=layer, operand=operand, format=name, error=1.0 if name == NO_TENSOR_SCALE else 0.02
            )
            for layer in LAYERS
            for operand in ("X", "W", "dY")
            for name in (*formats, NO_TENSOR_SCALE)
        ),
        rounding=tuple(
            RoundingBias(layer=layer, recipe=name, draws=64, nearest=0.08, one_draw=0.12, mean_of_draws=0.02)
            for layer in LAYERS
            for name in ("mxfp4", "nvfp4")
        ),
        weights=tuple(
            WeightMismatch(layer=layer, block=block, mismatch=mismatch, error=0.1)
            for layer in LAYERS
            for block, mismatch in (("1x16", 0.13), ("16x16", 0.0))
        ),
        transforms=tuple(
            TransformEffect(layer=layer, recipe=name, size=16, without=0.1, with_transform=0.1 * ratio)
            for name in ("mxfp4", "nvfp4")
            for layer, ratio in zip(LAYERS, ratios, strict=True)
        ),
    )


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return fabricate_comparison(tmp_path_factory.mktemp("runs"), ["bf16", "nvfp4"], [0], steps=64)


@pytest.fixture(scope="module")
def page(comparison: Comparison) -> str:
    return render(comparison, Context(commands=(), techniques=fabricated()))


def test_the_headline_has_the_error_of_each_format_and_no_loss(page: str):
    heading = page.split("<h1>")[1].split("</h1>")[0].replace(NO_BREAK, " ")
    assert "4.0 % (fp8), 19.0 % (nvfp4) and 25.0 % (mxfp4)" in heading
    assert "nats" not in heading
    assert headline(fabricated()).replace(NO_BREAK, " ").endswith("25.0 % (mxfp4).")


def test_charts_of_techniques_come_before_losses_and_losses_claim_nothing(page: str):
    techniques, losses = page.index("What each technique fixes"), page.index("<h2>Losses</h2>")
    assert techniques < losses
    assert "bf16 and nvfp4 trained with one seed: too few to compare their losses." in page[losses:]


def test_without_findings_there_is_no_section(comparison: Comparison):
    assert "What each technique fixes" not in render(comparison, Context(commands=()))


def test_a_row_has_the_mean_and_the_range_over_batches():
    row = next(row for row in format_rows(fabricated()) if row.recipe == "nvfp4")
    assert (row.lowest, row.error, row.highest) == pytest.approx((0.18, 0.19, 0.20))
    assert row.operands == pytest.approx((0.1, 0.1, 0.1))


def test_a_recipe_without_a_format_of_its_own_has_no_operands():
    row = next(row for row in format_rows(fabricated()) if row.recipe == "nvfp4-naive")
    assert row.operands == (None, None, None)


def test_harm_is_shown_layer_by_layer_and_counted(page: str):
    assert page.count("1.20 harm") == 2
    assert "raises it in 1 of 2 layers, most in blocks.0.down (1.20)" in page
    text = " ".join(sentences(fabricated((0.8, 0.9))))
    assert "raises it in 0 of 2 layers." in text


def test_what_the_tensor_scale_fixes_is_a_bar_of_the_gradients():
    bars = scale_bars(fabricated())
    assert [bar.value for bar in bars if bar.label == NO_TENSOR_SCALE] == [1.0]
    assert "loses 100 % of those elements" in sentences(fabricated())[0].replace(NO_BREAK, " ")


def test_the_figure_is_a_file_that_needs_no_page(tmp_path: Path):
    write_figure(fabricated(), tmp_path / "techniques.svg")
    text = (tmp_path / "techniques.svg").read_text()
    assert "var(" not in text
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    for title in ("Block and tensor scales", "Stochastic rounding", "2D scaling", "(RHT)"):
        assert title in text
    assert not re.search(r"(href|src)=\"(?!#)", text)
    assert len(text) < 60_000


def test_every_recipe_on_the_page_has_a_colour(page: str):
    used, given = set(re.findall(r"var\((--[\w-]+)\)", page)), set(re.findall(r"(--[\w-]+):", page))
    assert used <= given
    assert set(measured_names(fabricated())) == set(RECIPES)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (0.0025, "0.25 %"), (0.0204, "2.0 %"), (0.188, "18.8 %"), (1.0, "100 %")],
)
def test_a_share_has_about_three_digits(share: float, text: str):
    assert percent(share).replace(NO_BREAK, " ") == text
