"""A published comparison of 4-bit recipes, as settings to repeat it with and results to stand beside.

Llamas on C4 (English), Quartet II (arXiv:2601.22813): settings from scripts/ and src/ of the repository
IST-DASLab/Quartet-II at fa1cab0, losses from its for_plots/runs.json. One seed for each cell; differences
below about 0.005 nats are noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from fourbits.data.config import DataConfig
from fourbits.model.presets import COMPARED_VOCABULARY, MODEL_PRESETS
from fourbits.recipe.ablations import without
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe
from fourbits.train.config import OptimConfig, RunConfig, TrainConfig

#: sequences per step, and their length
_SEQUENCES, _LENGTH = 512, 512
_MICRO_BATCH = 64

#: what their version of a recipe does differently from ours, by our name
DIFFERENCES = MappingProxyType(
    {
        "nvfp4-without-bf16-blocks": "theirs draws signs at every call, and leaves room of 17/16 in SR",
        "nvfp4-46-without-bf16-blocks": "the same",
        "tetrajet2-base": "theirs has one scale per tensor above the block scales, ours one per 128 elements",
        "quartet2": "listed by fourbits recipes show quartet2",
        "quartet2-46": "listed by fourbits recipes show quartet2-46",
    }
)


@dataclass(frozen=True, slots=True)
class PublishedCell:
    """The validation losses that were published for one model and number of tokens.

    tokens: of the published runs; bf16: loss in nats per token; gaps: nats above it, by the name of our
    recipe.
    """

    model: str
    tokens: int
    bf16: float
    gaps: Mapping[str, float]

    def percent(self, recipe: str) -> float:
        """The gap of a recipe in per cent of the BF16 loss."""
        return 100 * self.gaps[recipe] / self.bf16


def _cell(model: str, steps: int, bf16: float, *gaps: float) -> PublishedCell:
    tokens = steps * _SEQUENCES * _LENGTH
    return PublishedCell(model, tokens, bf16, dict(zip(DIFFERENCES, gaps, strict=True)))


CELLS: tuple[PublishedCell, ...] = (
    _cell("30m", 2861, 3.4226, 0.0548, 0.0565, 0.0541, 0.0445, 0.0430),
    _cell("30m", 5722, 3.3004, 0.0684, 0.0661, 0.0641, 0.0554, 0.0510),
    _cell("30m", 11444, 3.2116, 0.0787, 0.0749, 0.0715, 0.0662, 0.0591),
    _cell("30m", 45776, 3.0946, 0.1031, 0.0975, 0.0876, 0.0842, 0.0746),
    _cell("50m", 4768, 3.2368, 0.0577, 0.0554, 0.0565, 0.0495, 0.0424),
    _cell("50m", 19073, 3.0699, 0.0791, 0.0731, 0.0668, 0.0623, 0.0552),
    _cell("100m", 9536, 3.0296, 0.0569, 0.0518, 0.0554, 0.0480, 0.0420),
    _cell("100m", 38146, 2.8754, 0.0728, 0.0681, 0.0655, 0.0615, 0.0528),
    _cell("100m", 305175, 2.7642, 0.0800, 0.0742, 0.0630, 0.0619, 0.0541),
    _cell("200m", 19073, 2.8351, 0.0541, 0.0528, 0.0524, 0.0471, 0.0415),
    _cell("200m", 76293, 2.7062, 0.0615, 0.0596, 0.0547, 0.0512, 0.0452),
)
_LEARNING_RATES = {"30m": 1.2e-3, "50m": 1.2e-3, "100m": 9e-4, "200m": 7.2e-4}
MODELS = tuple(_LEARNING_RATES)


def find_cell(model: str, tokens: float | None = None) -> PublishedCell:
    """The published cell of a model within 1 % of a number of tokens, such as 0.75e9; None: the shortest.

    Raises ValueError if there is none.
    """
    cells = [cell for cell in CELLS if cell.model == model]
    if tokens is None:
        return cells[0]
    nearest = min(cells, key=lambda cell: abs(cell.tokens - tokens))
    if abs(nearest.tokens - tokens) > 0.01 * nearest.tokens:
        known = ", ".join(f"{cell.tokens / 1e9:.3g}e9" for cell in cells)
        raise ValueError(
            f"--tokens: must be a published number of tokens for {model}, got {tokens:g}. Pass one of "
            f"{known}. For other lengths: fourbits compare {model} --train.tokens N."
        )
    return nearest


def published_recipes() -> dict[str, Recipe]:
    """The recipes of the comparison by name, bf16 first. They quantize every linear layer of a block."""
    base = replace(
        get_recipe("tetrajet2"),
        name="tetrajet2-base",
        oscillation=None,
        source="tetrajet2, changed",
        taken="tetrajet2 without OsciReset",
        deviates="",
    )
    named = (
        get_recipe("bf16"),
        *(without(get_recipe(name), "bf16-blocks") for name in ("nvfp4", "nvfp4-46")),
        base,
        get_recipe("quartet2"),
        get_recipe("quartet2-46"),
    )
    return {recipe.name: recipe for recipe in named}


def published_config(cell: PublishedCell) -> RunConfig:
    """The published settings of a cell; the text and its tokenizer are the user's.

    AdamW with betas 0.9 and 0.95, weight decay 0.1, clipping at 1; a warmup over a tenth of the steps, then a
    cosine to a tenth of the rate. Theirs warms up along a cosine, too; ours along a line. They validate on
    0.05 % of C4, of which 2,048 sequences are read here.
    """
    return RunConfig(
        model=MODEL_PRESETS[cell.model],
        data=DataConfig(vocab_size=COMPARED_VOCABULARY, validation_fraction=0.0005),
        optim=OptimConfig(
            lr=_LEARNING_RATES[cell.model],
            warmup_share=0.1,
            decay_share=0.9,
            decay="cosine",
            final_lr_factor=0.1,
        ),
        train=TrainConfig(
            tokens=cell.tokens,
            micro_batch_size=_MICRO_BATCH,
            gradient_accumulation=_SEQUENCES // _MICRO_BATCH,
            seq_len=_LENGTH,
            validation_interval=1000,
            validation_samples=2048,
            checkpoint_interval=1000,
        ),
    )
