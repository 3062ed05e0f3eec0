"""The precision of every linear as a picture: blocks in order, a cell per linear, coloured by its format."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fourbits.compare.html import Markup, Node, join, table, tag

Linear = Mapping[str, Any]

# Above this many blocks, cells lose their names; the table below the map has them.
NAMED_BLOCKS = 24
OUTSIDE = "outside"


def precision_map(title: str, precision: Mapping[str, Any], kinds: str, colours: Mapping[str, str]) -> Markup:
    """One model under one recipe.

    precision: from a run's manifest; kinds: the model's pattern, a letter per block; colours: format -> CSS.
    """
    blocks = by_block(precision["linears"])
    named = len(blocks) <= NAMED_BLOCKS
    boxes = [_block(block, linears, kinds, named, colours) for block, linears in blocks.items()]
    share = precision["share_of_flops"]
    return tag(
        "div",
        tag("h3", title, tag("small", f"{share:.0%} of the linears' FLOPs quantized")),
        tag("div", *boxes, class_="blocks" if named else "blocks dense"),
        class_="map",
    )


def legend(precisions: Sequence[Mapping[str, Any]], colours: Mapping[str, str]) -> Markup:
    """Which colour is which format."""
    seen = dict.fromkeys(row["precision"] for each in precisions for row in each["linears"])
    names = sorted(seen, key=lambda name: (name == "bf16", name))
    return tag("p", *(join(_swatch(name, colours), " ", name, "  ") for name in names), class_="legend")


def reasons(precision: Mapping[str, Any]) -> Markup:
    """Every linear with its shape, precision and reason, as a table."""
    rows: list[list[Node]] = [
        [row["name"], " x ".join(map(str, row["shape"])), row["precision"], row["reason"]]
        for row in precision["linears"]
    ]
    return table(["linear", "out x in", "precision", "reason"], rows, text_columns=4)


def why_kept(precision: Mapping[str, Any]) -> str:
    """The reasons for BF16 as one sentence, e.g. 'first 1 of 10 blocks (2 linears); output head (1)'."""
    counts: dict[str, int] = {}
    for row in precision["linears"]:
        if row["precision"] == "bf16":
            counts[row["reason"]] = counts.get(row["reason"], 0) + 1
    return "; ".join(f"{reason} ({count} linear{'s' * (count > 1)})" for reason, count in counts.items())


def by_block(linears: Sequence[Linear]) -> dict[str, list[Linear]]:
    """Linears by the number of the block that holds them, in model order; OUTSIDE for the others."""
    groups: dict[str, list[Linear]] = {}
    for row in linears:
        number = re.search(r"\.(\d+)\.", row["name"])
        groups.setdefault(number.group(1) if number else OUTSIDE, []).append(row)
    return groups


def _block(
    block: str, linears: Sequence[Linear], kinds: str, named: bool, colours: Mapping[str, str]
) -> Markup:
    kind = kinds[int(block)] if block != OUTSIDE and int(block) < len(kinds) else ""
    label = "head" if block == OUTSIDE else f"{block} {kind}".strip()
    cells = [_cell(row, named, colours) for row in linears]
    return tag("div", tag("span", label, class_="number"), *cells, class_="block")


def _cell(row: Linear, named: bool, colours: Mapping[str, str]) -> Markup:
    name = row["name"].rsplit(".", 1)[-1].removesuffix("_proj")
    shape = "x".join(map(str, row["shape"]))
    note = f"{row['name']}, {shape}: {row['precision']}, {row['reason']}"
    kind = "cell kept" if row["precision"] == "bf16" else "cell"
    style = f"--c:{colour_of(row['precision'], colours)}"
    return tag("span", name if named else None, class_=kind, style=style, title=note)


def _swatch(name: str, colours: Mapping[str, str]) -> Markup:
    kind = "cell kept" if name == "bf16" else "cell"
    return tag("span", class_=f"{kind} swatch", style=f"--c:{colour_of(name, colours)}")


def colour_of(precision: str, colours: Mapping[str, str]) -> str:
    """The colour of a format; of Fprop's where the three GEMMs differ; grey for a format without one."""
    return colours.get(re.split("[/x]", precision)[0]) or colours.get(precision) or "var(--muted)"
