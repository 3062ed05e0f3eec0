"""A finding of lint, and the run that its rules inspect."""

from dataclasses import dataclass
from typing import NamedTuple

from fourbits.linear.placement import table_for
from fourbits.linear.summary import ConversionSummary, LinearReport
from fourbits.plan.linears import converted_on_meta
from fourbits.quant.operand import OperandSpec
from fourbits.recipe.recipe import GemmTable, has_4_bits
from fourbits.train.config import RunConfig


class Finding(NamedTuple):
    """One mistake: the rule's name, what is wrong, why it matters, and what to change."""

    rule: str
    what: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}. {self.why} {self.remedy}"


@dataclass(frozen=True, slots=True)
class LintedRun:
    """The run that the rules inspect, and its cluster."""

    config: RunConfig
    #: the result of converting the model by the recipe
    summary: ConversionSummary
    gpus: int = 1
    #: number of tensor-parallel ranks for which shards are checked
    tensor: int = 1

    @classmethod
    def of(cls, config: RunConfig, gpus: int = 1, tensor: int = 1) -> "LintedRun":
        """The model is built on the meta device, so no size needs memory."""
        return cls(config, converted_on_meta(config.model, config.recipe), gpus, tensor)

    @property
    def tables(self) -> dict[str, GemmTable]:
        """The recipe's table and those of its rules, each by the name of its settings."""
        recipe = self.config.recipe
        rules = {f"recipe.layers.{index}.table": rule.table for index, rule in enumerate(recipe.layers)}
        return {"recipe": recipe.table, **rules}

    @property
    def quantizes_to_4_bits(self) -> bool:
        """Whether any GEMM has a 4-bit operand."""
        return any(has_4_bits(table) for table in self.tables.values())

    @property
    def rows_of_4_bits(self) -> list[LinearReport]:
        """The layers of which a GEMM has a 4-bit operand."""
        recipe = self.config.recipe
        return [
            row for row in self.summary.rows if row.quantized and has_4_bits(table_for(recipe, row.name)[0])
        ]


def is_4_bits(spec: OperandSpec) -> bool:
    """Whether an operand's elements have 4 bits."""
    element = spec.block_format.element
    return element is not None and element.bits == 4
