"""The section "What each technique fixes" of a report, and its chart as a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fourbits.compare.report.colours import light_values
from fourbits.compare.report.svg import Chart, standalone
from fourbits.compare.report.technique_charts import technique_chart
from fourbits.compare.report.technique_summary import OPERANDS, FormatRow, format_rows
from fourbits.compare.report.technique_words import sentences
from fourbits.compare.techniques.findings import Techniques, TransformEffect
from fourbits.compare.techniques.measure import TECHNIQUES_JSON
from fourbits.data.whole_file import write_whole

FIGURE = "techniques.svg"


@dataclass(frozen=True, slots=True)
class TechniqueSection:
    """The values of the template. layers: name, and the effect of the transform under each recipe."""

    step: int
    tokens: int
    batches: int
    chart: Chart
    sentences: Sequence[str]
    rows: Sequence[FormatRow]
    transformed: Sequence[str]
    layers: Sequence[tuple[str, Sequence[TransformEffect]]]
    operands: Sequence[str] = OPERANDS
    file: str = TECHNIQUES_JSON


def technique_section(found: Techniques, names: Sequence[str]) -> TechniqueSection:
    """names: all names with a colour on the page, in the order of their colours."""
    effects: Mapping[tuple[str, str], TransformEffect] = {
        (each.layer, each.recipe): each for each in found.transforms
    }
    transformed = tuple(dict.fromkeys(each.recipe for each in found.transforms))
    return TechniqueSection(
        step=found.step,
        tokens=found.tokens_per_batch,
        batches=found.batches,
        chart=technique_chart(found, {name: at for at, name in enumerate(names)}),
        sentences=sentences(found),
        rows=format_rows(found),
        transformed=transformed,
        layers=[(layer, [effects[layer, name] for name in transformed]) for layer in found.layers],
    )


def measured_names(found: Techniques) -> list[str]:
    """The recipes that the section shows."""
    return list(dict.fromkeys(each.recipe for each in found.gradients))


def write_figure(found: Techniques, path: Path) -> None:
    """Write the chart as a standalone SVG file with a light background."""
    names = measured_names(found)
    figure = technique_chart(found, {name: at for at, name in enumerate(names)})
    write_whole(path, standalone(figure.wide, light_values(names)).encode())
