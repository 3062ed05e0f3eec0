"""The precision of every linear layer as a picture: blocks in order, a cell per layer, coloured by format."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fourbits.compare.number_format import plural
from fourbits.compare.report.colours import colour_of

Linear = Mapping[str, Any]

# Above this many blocks, cells have no room for names; the table below the map lists them.
MAX_NAMED_BLOCKS = 24
OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class Cell:
    """A linear layer, or an entry of the legend. colour: a CSS colour; bf16: drawn as an outline."""

    name: str
    colour: str
    bf16: bool
    tooltip: str = ""


@dataclass(frozen=True, slots=True)
class PrecisionMap:
    """One model under one recipe. blocks: label and cells; dense: too many blocks to name the cells.

    in_bf16: the layers in BF16, counted by reason; linears: the manifest's rows of linear layers.
    """

    recipe: str
    share_of_flops: float
    blocks: Sequence[tuple[str, Sequence[Cell]]]
    dense: bool
    in_bf16: str
    linears: Sequence[Linear]


def precision_map(
    recipe: str, precision: Mapping[str, Any], pattern: str, colours: Mapping[str, str]
) -> PrecisionMap:
    """Lay out one model under one recipe.

    precision: from a run's manifest; pattern: the model's, a letter per block; colours: format -> CSS.
    """
    groups = by_block(precision["linears"])
    return PrecisionMap(
        recipe=recipe,
        share_of_flops=precision["share_of_flops"],
        blocks=[
            (_label(block, pattern), [_cell(row, colours) for row in rows]) for block, rows in groups.items()
        ],
        dense=len(groups) > MAX_NAMED_BLOCKS,
        in_bf16=bf16_reasons(precision),
        linears=precision["linears"],
    )


def legend(precisions: Sequence[Mapping[str, Any]], colours: Mapping[str, str]) -> list[Cell]:
    """A cell per format that occurs; BF16 comes last."""
    seen = dict.fromkeys(row["precision"] for each in precisions for row in each["linears"])
    names = sorted(seen, key=lambda name: (name == "bf16", name))
    return [Cell(name, colour_of(name, colours), name == "bf16") for name in names]


def bf16_reasons(precision: Mapping[str, Any]) -> str:
    """The layers in BF16 by reason, e.g. 'first 1 of 10 blocks (2 layers); output head (1 layer)'."""
    counts: dict[str, int] = {}
    for row in precision["linears"]:
        if row["precision"] == "bf16":
            counts[row["reason"]] = counts.get(row["reason"], 0) + 1
    return "; ".join(f"{reason} ({plural(count, 'layer')})" for reason, count in counts.items())


def by_block(linears: Sequence[Linear]) -> dict[str, list[Linear]]:
    """Linear layers by block number, in model order; OUTSIDE for those outside blocks."""
    groups: dict[str, list[Linear]] = {}
    for row in linears:
        number = re.search(r"\.(\d+)\.", row["name"])
        groups.setdefault(number.group(1) if number else OUTSIDE, []).append(row)
    return groups


def _label(block: str, pattern: str) -> str:
    if block == OUTSIDE:
        return "head"
    kind = pattern[int(block)] if int(block) < len(pattern) else ""
    return f"{block} {kind}".strip()


def _cell(row: Linear, colours: Mapping[str, str]) -> Cell:
    shape = "x".join(map(str, row["shape"]))
    return Cell(
        name=row["name"].rsplit(".", 1)[-1].removesuffix("_proj"),
        colour=colour_of(row["precision"], colours),
        bf16=row["precision"] == "bf16",
        tooltip=f"{row['name']}, {shape}: {row['precision']}, {row['reason']}",
    )
