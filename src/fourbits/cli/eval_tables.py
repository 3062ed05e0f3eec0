"""The tables that `fourbits eval` prints."""

from rich.table import Table
from rich.text import Text

from fourbits.evaluation.evaluate_model import EvaluationResults
from fourbits.evaluation.evaluated_model import BF16
from fourbits.harness.score_rows import Precisions, score_rows


def text_table(precisions: Precisions) -> Table | None:
    """Loss and bits per byte of each source in each precision; None without text."""
    parts = {name: part["text"] for name, part in precisions.items() if "text" in part}
    if not parts:
        return None
    table = Table("source", title="text", title_justify="left")
    for name in parts:
        table.add_column(f"loss {name}", justify="right")
        table.add_column(f"bits/byte {name}", justify="right")
    compared = [name for name in parts if name != BF16]
    for header in ("loss more", "same top-1", "KL (nats)") if compared else ():
        table.add_column(header, justify="right")
    sources = list(parts[BF16]["sources"])
    for source in (*sources, *(["all"] if len(sources) > 1 else [])):
        rows = [
            part["all"] if source == "all" and source not in sources else part["sources"][source]
            for part in parts.values()
        ]
        cells = [text for row in rows for text in (f"{row['loss']:.4f}", f"{row['bits_per_byte']:.4f}")]
        if compared:
            plain, quantized = rows
            cells += [
                f"{quantized['loss'] / plain['loss'] - 1:+.2%}",
                f"{quantized['agreement']:.1%}",
                f"{quantized['divergence']:.5f}",
            ]
        table.add_row(Text(source), *cells)
    return table


def task_table(precisions: Precisions) -> Table | None:
    """The scores of the requested tasks; None without tasks."""
    rows = score_rows(precisions)
    if not rows:
        return None
    names = [name for name, part in precisions.items() if "tasks" in part]
    table = Table("task", "metric", "shots", "questions", title="tasks", title_justify="left")
    for name in names:
        table.add_column(name, justify="right")
    in_paper = any(row["paper"] for row in rows)
    for header in ("paper FP8 (%)", "paper NVFP4 (%)") if in_paper else ():
        table.add_column(header, justify="right")
    for row in rows:
        values = [row["values"].get(name, "") for name in names]
        if in_paper:
            values += [f"{value:.2f}" for value in row["paper"] or ()] or ["", ""]
        table.add_row(row["task"], row["metric"], row["shots"], f"{row['questions']:,}", *values)
    return table


def precision_note(found: EvaluationResults, recipe: str) -> list[str]:
    """Notes about the conditions of the numbers above."""
    notes: list[str] = []
    if found.layers:
        notes.append(
            f"{recipe}: {found.layers} layers quantized; scales of their inputs are held, so that no result "
            "depends on a batch"
        )
    scores = [score for part in found.precisions.values() for score in part.get("tasks", {}).values()]
    if any(score["limit"] is not None for score in scores):
        notes.append(
            "--limit: not all questions, so these scores are trials and are not stored in the run's folder"
        )
    if truncated := max((score["cut_prompts"] for score in scores), default=0):
        notes.append(
            f"{truncated} prompts lost their beginning, because with their answers they exceed max_seq_len"
        )
    return notes
