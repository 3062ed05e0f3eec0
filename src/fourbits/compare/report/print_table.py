"""Prints the final table in a terminal; in a pipe, plain lines without wrapping."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fourbits.compare.number_format import DASH, PLUS_MINUS, count, loss, mebibytes, plural, ratio, signed
from fourbits.compare.report.table import Row

PIPED_WIDTH = 160


def print_table(
    rows: Sequence[Row], baseline: str, seeds: Sequence[int], console: Console | None = None
) -> None:
    """Print the rows, and the unit and seeds below them."""
    console = console or Console()
    if not console.is_terminal:  # a pipe has no width, so lines must not wrap
        console = Console(file=console.file, width=PIPED_WIDTH)
    table = Table(box=SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    speed = f"speed vs {baseline}"
    for name in ("val loss", "gap (nats)", "gap (%)", "tokens/s", speed, "peak memory", "status"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row, row.recipe == baseline))
    console.print(table)
    deviation = f"; {PLUS_MINUS} is the standard deviation over seeds" if len(seeds) > 1 else ""
    console.print(
        f"losses in nats per token, gaps to {baseline}; {plural(len(seeds), 'seed')} "
        f"({', '.join(map(str, seeds))}){deviation}",
        markup=False,
        highlight=False,
    )


def _cells(row: Row, is_baseline: bool) -> list[str]:
    return [
        row.recipe,
        loss(row.val_loss, row.val_loss_spread),
        DASH if is_baseline else signed(row.gap_nats, 4, row.gap_nats_spread),
        DASH if is_baseline else signed(row.gap_percent, 2),
        count(row.tokens_per_second),
        ratio(row.speed_ratio),
        mebibytes(row.peak_memory_bytes),
        row.verdict,
    ]
