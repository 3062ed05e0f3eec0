"""Runs a comparison: executes the runs of a matrix, measures, then writes table.json and report.html."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fourbits.compare.averaged import averaged_losses, check_average
from fourbits.compare.report import gap_figure
from fourbits.compare.report.comparison import Comparison, read_comparison
from fourbits.compare.report.comparison_report import write_report
from fourbits.compare.report.context import Context, describe_corpus, generate_sample
from fourbits.compare.report.side_table import SideTable
from fourbits.compare.report.side_tables import SideRows
from fourbits.compare.report.table import Row, final_table, table_record
from fourbits.compare.report.technique_section import FIGURE, write_figure
from fourbits.compare.run.execute import execute_runs
from fourbits.compare.run.forked import fork_rounds
from fourbits.compare.run.jobs import Jobs
from fourbits.compare.run.progress import MatrixProgress
from fourbits.compare.run.race import SeedRounds
from fourbits.compare.run.run_matrix import BASELINE, RunMatrix
from fourbits.compare.techniques.findings import Techniques
from fourbits.compare.techniques.measure import TECHNIQUES_JSON, measure_once
from fourbits.data.stream.dataset import PreparedData
from fourbits.data.whole_file import write_json

# The recipe whose model generates the sample output, if the comparison has it.
SAMPLED = "nvfp4"


@dataclass(frozen=True, slots=True)
class Commands:
    """Command lines. resume: continues the comparison; repeat: commands that repeat it in new folders."""

    resume: str
    repeat: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a comparison. tables: small ones to print below the rows; record: the content of
    table.json; report: the path of report.html.
    """

    comparison: Comparison
    rows: list[Row]
    tables: list[SideTable]
    record: dict[str, Any]
    report: Path


def compare(
    matrix: RunMatrix,
    progress: MatrixProgress,
    commands: Commands,
    jobs: Jobs,
    *,
    techniques: bool = False,
    stop_early: bool = False,
    average: int = 1,
) -> Result:
    """Execute the runs of a matrix that are not finished, and write table.json, gaps.svg and report.html.

    techniques: also measure what each technique fixes, on the BF16 model of the first seed, and write
    techniques.json and techniques.svg. stop_early: seed by seed, without the recipes that are decided
    (statistics/sequential.py). average: also compare the mean of the weights of the last checkpoints, if
    above 1. Raises what `execute_runs` raises, and ValueError for runs that are not comparable, for
    techniques without a BF16 run, for more checkpoints than runs have, and for stop_early with forks.
    """
    check_average(matrix, average)
    if techniques and BASELINE not in matrix.recipes:
        raise ValueError(
            f"--techniques: needs a trained {BASELINE} model, got {', '.join(matrix.recipes)}. "
            f"Add {BASELINE} to --recipes."
        )
    if stop_early and matrix.fork_step is not None:
        raise ValueError(
            "--fork-after: trains all seeds of the baseline before the other recipes, which --stop-early "
            "cannot. Remove one of them."
        )
    rounds = SeedRounds(matrix, progress, jobs.parallel) if stop_early else None
    provenance = execute_runs(matrix, progress, commands.resume, jobs, rounds or fork_rounds(matrix))
    ran, stops = (rounds.ran, rounds.race.stopped) if rounds else (None, None)
    comparison = read_comparison(matrix, provenance, ran, stops)
    if average > 1:
        comparison = replace(comparison, averaged=averaged_losses(comparison, average, progress))
    found = _measured(comparison, matrix.out, progress) if techniques else None
    rows = final_table(comparison)
    side = SideRows.of(comparison, rows)
    record = table_record(comparison, rows) | side.record()
    write_json(matrix.out / "table.json", record)
    title = f"Gap to {matrix.baseline} in nats per token, {matrix.name}: mean and 95 % interval over seeds"
    gap_figure.write_gaps(rows, matrix.baseline, title, matrix.out / gap_figure.FIGURE)
    page = write_report(comparison, _context(comparison, commands, found), matrix.out / "report.html")
    return Result(comparison, rows, side.printed(comparison), record, page)


def _measured(comparison: Comparison, out: Path, progress: MatrixProgress) -> Techniques | None:
    """Effects of each technique on the first BF16 run; None, with a note, if that did not finish."""
    run = comparison.runs[BASELINE][comparison.seeds[0]]
    if not run.finished:
        progress.note(f"{run.path}: did not finish, so its model is not measured")
        return None
    progress.note("measuring what each technique fixes on the trained bf16 model")
    found = measure_once(run.path, out / TECHNIQUES_JSON)
    write_figure(found, out / FIGURE)
    return found


def _context(comparison: Comparison, commands: Commands, techniques: Techniques | None) -> Context:
    manifest = comparison.any_run.manifest["data"]
    data = PreparedData.open(manifest["folder"])
    sampled = SAMPLED if SAMPLED in comparison.runs else comparison.recipes[-1]
    run = comparison.runs[sampled][comparison.seeds[0]]
    return Context(
        commands=commands.repeat,
        corpus=describe_corpus(data, manifest["unigram_entropy"]),
        sample=generate_sample(run.path, data) if run.finished else None,
        techniques=techniques,
    )
