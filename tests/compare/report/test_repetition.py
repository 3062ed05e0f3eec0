"""A report says which training text a run reads more than once."""

import json
from pathlib import Path

import pytest

from fourbits.compare.report.caveats import caveats
from fourbits.compare.report.run_details import repetition
from fourbits.compare.report.run_report import render_run
from fourbits.compare.report.runs import Run
from fourbits.compare.report.table import final_table
from support.fabricated_runs import fabricate_comparison, fabricate_run


def with_epochs(path: Path, epochs: dict[str, float]) -> Run:
    """A fabricated run whose plan reads its sources so often."""
    fabricate_run(path, "nvfp4")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["data"]["plan"]["sources"] = {name: {"epochs": count} for name, count in epochs.items()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return Run.read(path)


@pytest.mark.parametrize(
    ("epochs", "sentence"),
    [
        ({"code": 3.2, "prose": 15.04}, "all steps together read code 3.2 times and prose 15.0 times."),
        ({"code": 0.4, "prose": 15.04}, "all steps together read prose 15.0 times."),
    ],
)
def test_the_page_of_a_run_names_the_sources_that_repeat(tmp_path, epochs, sentence):
    run = with_epochs(tmp_path / "run", epochs)
    assert repetition(run) == f"Training text repeats: {sentence}"
    assert repetition(run) in render_run(run)


def test_text_that_is_read_once_is_not_mentioned(tmp_path):
    run = with_epochs(tmp_path / "run", {"code": 1.0, "prose": 0.2})
    assert repetition(run) == ""
    assert "repeats" not in render_run(run)


def test_a_comparison_warns_of_it(tmp_path):
    comparison = fabricate_comparison(tmp_path, ["bf16", "nvfp4"], [0], steps=64)
    assert not any("repeats" in sentence for sentence in caveats(comparison, final_table(comparison)))
    comparison.any_run.manifest["data"]["plan"]["sources"]["prose"]["epochs"] = 15.0
    assert any("prose 15.0 times" in sentence for sentence in caveats(comparison, final_table(comparison)))
