"""The evaluations of a run as tables of its report."""

from pathlib import Path
from typing import Any

from fourbits.harness.results import read_results
from fourbits.harness.score_rows import score_rows


def evaluation_sections(run: Path) -> list[dict[str, Any]]:
    """For each evaluated step its number, its precisions, rows of text and rows of tasks."""
    return [
        {
            "step": evaluation.step,
            "names": list(evaluation.precisions),
            "text": _text_rows(evaluation.precisions),
            "tasks": score_rows(evaluation.precisions),
        }
        for evaluation in read_results(run)
    ]


def _text_rows(precisions: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each source and precision."""
    rows: list[dict[str, Any]] = []
    for name, part in precisions.items():
        text = part.get("text")
        if text is None:
            continue
        sources = text["sources"] | ({"all text": text["all"]} if len(text["sources"]) > 1 else {})
        for source, values in sources.items():
            rows.append(
                {"source": source, "precision": name, "agreement": None, "divergence": None, **values}
            )
    return rows
