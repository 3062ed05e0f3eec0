"""Prints tables: with lines around them in a terminal, as plain columns that never wrap in a pipe."""

from rich.console import Console
from rich.table import Table

# A pipe has no width; no line of a table is this long.
PIPED_WIDTH = 10_000


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table, without box characters and wrapping if the output is not a terminal."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=PIPED_WIDTH)
        if table.title:
            console.print(table.title, markup=False, highlight=False, soft_wrap=True)
        table.title, table.box = None, None
        table.pad_edge = False
        for column in table.columns:
            column.no_wrap = True
        with console.capture() as captured:
            console.print(table)
        for line in captured.get().splitlines():
            console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)
        return
    console.print(table)
