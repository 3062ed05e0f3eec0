"""Averages measurements on a trained model over layers and batches, for charts and a table."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fourbits.compare.number_format import listed, percent
from fourbits.compare.techniques.findings import NO_TENSOR_SCALE, Techniques

# The gradients that the headline compares, in increasing order of error on every model measured so far.
HEADLINE = ("fp8", "nvfp4", "mxfp4")
OPERANDS = ("X", "dY", "W")


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: label, value, and the recipe that gives its colour. A heading has no value."""

    label: str
    value: float | None = None
    recipe: str = ""


@dataclass(frozen=True, slots=True)
class FormatRow:
    """A recipe with every block quantized: mean errors of its operands, and of the model's gradient.

    Those of the gradient are the mean over batches; lowest, highest: the error's range over batches.
    """

    recipe: str
    operands: tuple[float | None, ...]
    error: float
    lowest: float
    highest: float
    bias: float
    cosine: float


def format_rows(found: Techniques) -> list[FormatRow]:
    """A row per recipe whose gradients were measured, in the order of measurement."""
    rows: list[FormatRow] = []
    for recipe in dict.fromkeys(each.recipe for each in found.gradients):
        gradients = [each for each in found.gradients if each.recipe == recipe]
        errors = [each.error for each in gradients]
        rows.append(
            FormatRow(
                recipe=recipe,
                operands=tuple(
                    _mean(
                        each.error for each in found.operands if (each.operand, each.recipe) == (name, recipe)
                    )
                    for name in OPERANDS
                ),
                error=statistics.fmean(errors),
                lowest=min(errors),
                highest=max(errors),
                bias=statistics.fmean(each.bias for each in gradients),
                cosine=statistics.fmean(each.cosine for each in gradients),
            )
        )
    return rows


def headline(found: Techniques) -> str:
    """A sentence with the errors of the model's gradient by format, which do not depend on the seed."""
    errors = {row.recipe: row.error for row in format_rows(found)}
    parts = [f"{percent(errors[name])} ({name})" for name in HEADLINE if name in errors]
    return f"Quantizing every block changes the trained model's gradient by {listed(parts)}."


def scale_bars(found: Techniques) -> list[Bar]:
    """The error of the largest of every 16 elements, by operand and format."""
    bars: list[Bar] = []
    for operand, heading in zip(OPERANDS, ("X", "dY", "W, in 2D blocks"), strict=True):
        bars.append(Bar(heading))
        names = ("fp8", "nvfp4", "mxfp4", *([NO_TENSOR_SCALE] if operand == "dY" else []))
        bars += [Bar(name, largest_error(found, operand, name), name.partition(",")[0]) for name in names]
    return bars


def rounding_bars(found: Techniques) -> list[Bar]:
    """The error of dY rounded to nearest, of one stochastic draw, and of the mean of all draws."""
    bars: list[Bar] = []
    for recipe in ("nvfp4", "mxfp4"):
        nearest, one_draw, mean = rounding_errors(found, recipe)
        bars += [
            Bar(recipe),
            Bar("to nearest", nearest, recipe),
            Bar("one draw", one_draw, recipe),
            Bar(f"mean of {found.rounding[0].draws}", mean, recipe),
        ]
    return bars


def weight_bars(found: Techniques) -> list[Bar]:
    """The distance of W in Dgrad from W in Fprop, and the error of W, by block shape."""
    bars: list[Bar] = []
    for block in dict.fromkeys(each.block for each in found.weights):
        mismatch, error = weight_errors(found, block)
        bars += [
            Bar(f"{block} blocks"),
            Bar("Dgrad's W against Fprop's", mismatch, "nvfp4"),
            Bar("Fprop's W against W", error, "nvfp4"),
        ]
    return bars


def largest_error(found: Techniques, operand: str, name: str) -> float:
    """The error of the largest elements of one operand in one format."""
    return statistics.fmean(
        each.error for each in found.largest if (each.operand, each.format) == (operand, name)
    )


def rounding_errors(found: Techniques, recipe: str) -> tuple[float, float, float]:
    """Errors of dY: to nearest, one stochastic draw, the mean of all draws."""
    rows = [each for each in found.rounding if each.recipe == recipe]
    return (
        statistics.fmean(each.nearest for each in rows),
        statistics.fmean(each.one_draw for each in rows),
        statistics.fmean(each.mean_of_draws for each in rows),
    )


def weight_errors(found: Techniques, block: str) -> tuple[float, float]:
    """W in blocks of one shape: Dgrad's against Fprop's, and Fprop's against W."""
    rows = [each for each in found.weights if each.block == block]
    return statistics.fmean(each.mismatch for each in rows), statistics.fmean(each.error for each in rows)


def _mean(values: Iterable[float]) -> float | None:
    found: Sequence[float] = list(values)
    return statistics.fmean(found) if found else None
