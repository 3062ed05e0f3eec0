"""Prints the final table of a comparison, its units, and its intervals."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fourbits.compare.number_format import DASH, PLUS_MINUS, count, loss, mebibytes, plural, ratio, signed
from fourbits.compare.report.table import Row
from fourbits.compare.terminal import print_table


def print_comparison(
    rows: Sequence[Row],
    baseline: str,
    seeds: Sequence[int],
    console: Console | None = None,
    *,
    raced: bool = False,
) -> None:
    """Print the rows, and the unit and seeds below them. raced: whether recipes stopped early."""
    console = console or Console()
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    speed = f"speed vs {baseline}"
    for name in ("val loss", "gap (nats)", "gap (%)", "tokens/s", speed, "peak memory", "status"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row, row.recipe == baseline))
    print_table(table, console)
    note = "; one seed, so no difference between losses is a finding"
    if len(seeds) > 1:
        looks = ", those of gaps widened for the looks after each seed" if raced else ""
        note = f"; {PLUS_MINUS}: 95 % interval over seeds (Student's t){looks}"
    console.print(
        f"losses in nats per token, gaps to {baseline}; {plural(len(seeds), 'seed')} "
        f"({', '.join(map(str, seeds))}){note}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _cells(row: Row, is_baseline: bool) -> list[str]:
    return [
        row.recipe,
        loss(row.val_loss, row.val_loss_margin),
        DASH if is_baseline else signed(row.gap_nats, 4, row.gap_nats_margin),
        DASH if is_baseline else signed(row.gap_percent, 2, row.gap_percent_margin),
        count(row.tokens_per_second),
        ratio(row.speed_ratio),
        mebibytes(row.peak_memory_bytes),
        row.verdict,
    ]
