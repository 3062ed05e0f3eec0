"""The final table in a terminal; plain, unwrapped lines where output is piped."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fourbits.compare import words
from fourbits.compare.table import Row

PIPED_WIDTH = 160


def print_table(
    rows: Sequence[Row], baseline: str, seeds: Sequence[int], console: Console | None = None
) -> None:
    """Print the rows and what they rest on."""
    console = console or Console()
    if not console.is_terminal:  # a pipe has no width: a line stays a line
        console = Console(file=console.file, width=PIPED_WIDTH)
    table = Table(box=SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    names = ["val loss", f"gap to {baseline}", "gap", "tokens/s", f"of {baseline}", "peak memory", "course"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row, row.recipe == baseline))
    console.print(table)
    spread = f"; {words.PLUS_MINUS} is the standard deviation over seeds" if len(seeds) > 1 else ""
    console.print(
        f"nats per token, {words.plural(len(seeds), 'seed')} ({', '.join(map(str, seeds))}){spread}",
        markup=False,
        highlight=False,
    )


def _cells(row: Row, is_baseline: bool) -> list[str]:
    return [
        row.recipe,
        words.loss(row.val_loss, row.val_loss_spread),
        words.DASH if is_baseline else words.signed(row.gap_nats, 4, row.gap_nats_spread),
        words.DASH if is_baseline else words.percent(row.gap_percent),
        words.count(row.tokens_per_second),
        words.ratio(row.speed_ratio),
        words.mebibytes(row.peak_memory_bytes),
        row.verdict,
    ]
