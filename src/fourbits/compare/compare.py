"""Runs a comparison: executes the runs of a matrix, then writes table.json and report.html."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourbits.compare.report.comparison import Comparison, read_comparison
from fourbits.compare.report.comparison_report import write_report
from fourbits.compare.report.context import Context, describe_corpus, generate_sample
from fourbits.compare.report.table import Row, final_table, table_record
from fourbits.compare.run.execute import execute_runs
from fourbits.compare.run.jobs import Jobs
from fourbits.compare.run.progress import MatrixProgress
from fourbits.compare.run.run_matrix import RunMatrix
from fourbits.data.stream.dataset import PreparedData
from fourbits.data.whole_file import write_json

# The recipe whose model generates the sample output, if it takes part.
SAMPLED = "nvfp4"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a comparison. record: the content of table.json; report: the path of report.html."""

    comparison: Comparison
    rows: list[Row]
    record: dict[str, Any]
    report: Path


def compare(matrix: RunMatrix, progress: MatrixProgress, command: str, jobs: Jobs) -> Result:
    """Execute the runs of a matrix that are not finished, and write table.json and report.html.

    command: the command line that reproduces the comparison. Raises what `execute_runs` raises, and
    ValueError for runs that are not comparable.
    """
    provenance = execute_runs(matrix, progress, command, jobs)
    comparison = read_comparison(matrix, provenance)
    rows = final_table(comparison)
    record = table_record(comparison, rows)
    write_json(matrix.out / "table.json", record)
    page = write_report(comparison, _context(comparison, command), matrix.out / "report.html")
    return Result(comparison, rows, record, page)


def _context(comparison: Comparison, command: str) -> Context:
    manifest = comparison.any_run.manifest["data"]
    data = PreparedData.open(manifest["folder"])
    sampled = SAMPLED if SAMPLED in comparison.runs else comparison.recipes[-1]
    run = comparison.runs[sampled][comparison.seeds[0]]
    return Context(
        commands=(command, f"fourbits train {run.path / 'config.yaml'} --out NEW"),
        corpus=describe_corpus(data, manifest["unigram_entropy"]),
        sample=generate_sample(run.path, data) if run.finished else None,
    )
