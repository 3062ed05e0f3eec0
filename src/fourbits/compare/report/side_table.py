"""A small table next to the main one, with the same text in the terminal and in the report."""

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fourbits.compare.terminal import print_table


@dataclass(frozen=True, slots=True, kw_only=True)
class SideTable:
    """rows: a text per column; the first column holds names, the others numbers. note: below the table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


def print_side_table(table: SideTable, console: Console | None = None) -> None:
    """Print an empty line, and a table with its title above and its note below."""
    console = console or Console()
    found = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(table.columns):
        found.add_column(name, no_wrap=True, justify="right" if number else "left")
    for row in table.rows:
        found.add_row(*row)
    console.print(f"\n{table.title}", markup=False, highlight=False, soft_wrap=True)
    print_table(found, console)
    console.print(table.note, markup=False, highlight=False, soft_wrap=True)
