"""The precision map shows every linear layer once, in its block, with its reason."""

import re

import pytest

from fourbits.compare.report.colours import colour_of
from fourbits.compare.report.page import environment
from fourbits.compare.report.precision_map import bf16_reasons, by_block, precision_map
from support.fabricated_runs import PATTERN, fabricated_precision

COLOURS = {"bf16": "var(--a)", "nvfp4": "var(--b)", "mxfp8": "var(--c)"}


def render(precision: dict, pattern: str = PATTERN) -> str:
    """The map and its table as HTML."""
    parts = environment().from_string('{% import "parts.html" as parts %}{{ parts.precision_map(map) }}')
    return parts.render(map=precision_map("nvfp4", precision, pattern, COLOURS))


def test_every_linear_layer_is_one_cell_with_its_reason():
    precision = fabricated_precision("nvfp4")
    page = render(precision)
    titles = re.findall(r'title="([^"]+)"', page)
    assert len(titles) == len(precision["linears"])
    for title, row in zip(titles, precision["linears"], strict=True):
        assert title.startswith(f"{row['name']}, ")
        assert title.endswith(f"{row['precision']}, {row['reason']}")


def test_blocks_are_in_order_with_their_kind_and_the_head_last():
    page = render(fabricated_precision("nvfp4"))
    labels = re.findall(r'class="number">([^<]+)<', page)
    assert labels == [*(f"{at} {kind}" for at, kind in enumerate(PATTERN)), "head"]


def test_layers_in_bf16_look_different_from_quantized_ones():
    precision = fabricated_precision("nvfp4")
    kept = sum(row["precision"] == "bf16" for row in precision["linears"])
    page = render(precision)
    assert page.count('class="cell kept"') == kept
    assert page.count('class="cell"') == len(precision["linears"]) - kept


def test_a_deep_model_has_cells_without_names():
    linears = [
        {"name": f"blocks.{at}.mixer.up", "shape": [8, 8], "precision": "nvfp4", "reason": "recipe nvfp4"}
        for at in range(62)
    ]
    page = render({"linears": linears, "share_of_flops": 1.0}, "-" * 62)
    assert 'class="blocks dense"' in page
    assert ">up<" not in page


def test_the_reasons_for_bf16_are_counted():
    assert bf16_reasons(fabricated_precision("fp8")) == "output head or embedding (1 layer)"
    assert "(2 layers)" in bf16_reasons(fabricated_precision("nvfp4"))


def test_the_table_of_reasons_has_every_linear_layer():
    precision = fabricated_precision("nvfp4")
    assert render(precision).count("<tr>") == len(precision["linears"]) + 1


@pytest.mark.parametrize(
    ("precision", "colour"),
    [
        ("nvfp4", "var(--b)"),
        ("nvfp4/mxfp8/mxfp8", "var(--b)"),
        ("nvfp4xbf16", "var(--b)"),
        ("e2", "var(--muted)"),
    ],
)
def test_a_mixed_precision_has_the_colour_of_its_fprop(precision: str, colour: str):
    assert colour_of(precision, COLOURS) == colour


def test_layers_outside_blocks_are_a_separate_group():
    rows = [{"name": "blocks.0.up"}, {"name": "blocks.10.up"}, {"name": "head"}]
    assert list(by_block(rows)) == ["0", "10", "outside"]
