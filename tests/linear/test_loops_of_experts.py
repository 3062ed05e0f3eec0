"""Experts that no grouped kernel serves are a loop of linear layers: the summary says so, and why."""

import pytest

from fourbits.linear.stacked import fused
from fourbits.recipe.presets import get_recipe
from fourbits.settings import override
from linear.test_experts import EXPERTS, everywhere, mixture


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("nvfp4", "grouped kernels do not run on cpu"),
        ("fp8", "fp8 rne has no grouped kernel"),
        ("quartet2", "transformed weights have no grouped kernels"),
        ("nvfp4-fwd", "grouped kernels multiply quantized operands only"),
        (override(get_recipe("nvfp4"), {"saved_inputs": "packed"}), "packed inputs have no grouped kernels"),
        (override(get_recipe("nvfp4"), {"gradient_rows": "limited"}), "limited rows have no grouped kernels"),
    ],
    ids=["nvfp4", "fp8", "quartet2", "nvfp4-fwd", "packed inputs", "limited rows"],
)
def test_the_summary_says_where_experts_are_a_loop_and_why(recipe, why):
    summary = everywhere(mixture("gate and up"), recipe)
    reasons = {row.name: row.reason for row in summary.rows}
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        assert reasons[name].endswith(f"; loop of {EXPERTS} linear layers, because {why}")
    assert "loop of" not in reasons["before"]
    assert f"2 groups of {EXPERTS} linear layers" in str(summary)


@pytest.mark.parametrize("missing", [None, "grouped GEMMs load tiles by TMA, from sm_90 on"])
def test_the_summary_names_a_loop_on_a_gpu_only_if_a_part_is_missing_such_as_tma_on_sm_80(
    missing, monkeypatch
):
    """The device's part of the answer is replaced; no kernel runs."""
    fused.unsupported_table.cache_clear()
    monkeypatch.setattr(fused, "unsupported_groups", lambda device, specs: None)
    monkeypatch.setattr(fused, "unsupported_grouped_gemms", lambda device: missing)
    reasons = {row.reason for row in everywhere(mixture("gate and up"), "nvfp4").rows if row.layers > 1}
    fused.unsupported_table.cache_clear()
    loop = f"; loop of {EXPERTS} linear layers, because {missing}" if missing else ""
    assert reasons == {f"recipe nvfp4{loop}"}


def test_a_group_counts_as_its_linear_layers_and_stands_in_the_columns_of_the_others():
    """Two groups of 5 are quantized, two layers are not."""
    summary = everywhere(mixture("gate and up"), "nvfp4", include=["experts"])
    assert summary.share_of_linears == 10 / 12
    one, several = str(summary).splitlines()[1:3]
    assert one.startswith("     2 linear layers             bf16     not in include")
    assert several.startswith("     2 groups of 5 linear layers nvfp4    recipe nvfp4")
