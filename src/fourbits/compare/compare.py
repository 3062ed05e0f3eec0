"""A comparison from its plan to its report."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourbits.compare.comparison import Comparison
from fourbits.compare.corpus import describe_corpus
from fourbits.compare.execute import make_runs
from fourbits.compare.jobs import Jobs
from fourbits.compare.plan import Plan
from fourbits.compare.progress import CompareReport
from fourbits.compare.report import Context, write_report
from fourbits.compare.sample import write_sample
from fourbits.compare.table import Row, final_table, table_record
from fourbits.data.stream.dataset import PreparedData
from fourbits.data.whole_file import write_json

# The recipe whose model writes the sample, where it takes part.
SAMPLED = "nvfp4"


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a comparison. record: the content of table.json; report: the path of report.html."""

    comparison: Comparison
    rows: list[Row]
    record: dict[str, Any]
    report: Path


def compare(plan: Plan, report: CompareReport, command: str, jobs: Jobs) -> Result:
    """Make the runs of a plan that are not there yet, and write table.json and report.html.

    command: what repeats it. Raises what `make_runs` raises.
    """
    comparison = make_runs(plan, report, command, jobs)
    rows = final_table(comparison)
    record = table_record(comparison, rows)
    write_json(plan.out / "table.json", record)
    page = write_report(comparison, _context(plan, comparison, command), plan.out / "report.html")
    return Result(comparison, rows, record, page)


def _context(plan: Plan, comparison: Comparison, command: str) -> Context:
    read = comparison.any_run.manifest["data"]
    data = PreparedData.open(read["folder"])
    sampled = SAMPLED if SAMPLED in comparison.runs else comparison.recipes[-1]
    run = comparison.runs[sampled][comparison.seeds[0]]
    return Context(
        commands=(command, f"fourbits train {run.path / 'config.yaml'} --out NEW"),
        corpus=describe_corpus(data, read["unigram_entropy"]),
        sample=write_sample(run.path, data) if run.finished else None,
    )
