"""All small tables of a comparison: computed once, for table.json, the terminal and the report."""

from dataclasses import dataclass
from typing import Any

from fourbits.compare.report.ablation_table import AblationRow, ablation_rows, ablation_table
from fourbits.compare.report.averaged_table import AveragedRow, averaged_rows, averaged_table
from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.noise_table import NoiseRow, noise_rows, noise_table
from fourbits.compare.report.published_table import PublishedRow, published_rows, published_table
from fourbits.compare.report.side_table import SideTable
from fourbits.compare.report.source_table import SourceRow, source_rows, source_table
from fourbits.compare.report.table import Row
from fourbits.compare.report.time_to_loss import Reached, reached, reached_table
from fourbits.settings import to_dict


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRows:
    """Rows of the small tables; their names are keys of table.json."""

    ablation: list[AblationRow]
    reached: list[Reached]
    noise: list[NoiseRow]
    sources: list[SourceRow]
    published: list[PublishedRow]
    averaged: list[AveragedRow]

    @classmethod
    def of(cls, comparison: Comparison, rows: list[Row]) -> "SideRows":
        """Compute the small tables. rows: the rows of the main table."""
        return cls(
            ablation=ablation_rows(comparison, rows),
            reached=reached(comparison),
            noise=noise_rows(comparison),
            sources=source_rows(comparison),
            published=published_rows(comparison, rows),
            averaged=averaged_rows(comparison),
        )

    def record(self) -> dict[str, Any]:
        """The rows as plain data for table.json."""
        return to_dict(self)

    def printed(self, comparison: Comparison) -> list[SideTable]:
        """The tables for the terminal."""
        tables = (
            published_table(comparison, self.published),
            ablation_table(comparison, self.ablation),
            reached_table(comparison, self.reached),
            noise_table(comparison, self.noise),
            averaged_table(comparison, self.averaged),
        )
        return [table for table in tables if table is not None]

    def shown(self, comparison: Comparison) -> list[SideTable]:
        """The tables for the report, which shows all."""
        by_source = source_table(comparison, self.sources)
        return [*self.printed(comparison), *([by_source] if by_source else [])]
