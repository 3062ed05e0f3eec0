"""Findings of a conversion besides its rows: names in a recipe that match no layer, and gaps to warn of."""

import warnings
from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from fourbits.linear.selection import Selection, matches, nearest_module
from fourbits.linear.stacks import Stack
from fourbits.linear.summary import ConversionSummary
from fourbits.linear.weights import Weight
from fourbits.quant.arguments import DTYPES
from fourbits.recipe.presets import RECIPES
from fourbits.recipe.recipe import LayerRule, Recipe

_SHIPPED = {pattern for recipe in RECIPES.values() for pattern in recipe.keep_bf16.names} | {
    pattern for recipe in RECIPES.values() for rule in recipe.layers for pattern in rule.names
}
_HEADS = (
    "output head or embedding",
    "head by its name",
    "head: outside",
    "follows the last block",
    "head: as many",
    "embedding that",
    "weight is tied",
)


def require_recipe_matches(recipe: Recipe, names: Sequence[str]) -> None:
    """Raises ValueError for a pattern of a user's recipe that no layer matches."""
    options = [("keep_bf16.names", recipe.keep_bf16.names)]
    options += [("layers.names", rule.names) for rule in recipe.layers]
    options += [("schedule.layers", phase.layers) for phase in recipe.schedule if phase.layers != ("*",)]
    for option, patterns in options if quantizes(recipe) else ():
        for pattern in patterns:
            if pattern not in _SHIPPED and not any(matches(name, (pattern,)) for name in names):
                raise ValueError(
                    f"recipe {recipe.name}: {option} must match a linear layer of the model, got "
                    f"{pattern!r}, which matches none.{nearest_module(pattern, names)} '*' also matches dots."
                )


def require_stacks(selection: Selection, stacks: Sequence[Stack]) -> None:
    """Raises ValueError if a caller keeps first or last blocks of a model in which no blocks were found."""
    for option, kept in (("keep_first", selection.keep_first), ("keep_last", selection.keep_last)):
        if kept and not stacks:
            raise ValueError(
                f"convert: {option}={kept!r} needs a stack of blocks, and none was found. Name one with "
                "stacks=, or the layers to keep with exclude=."
            )


def require_dtypes(layers: Sequence[Weight]) -> None:
    """Raises ValueError if all linear layers have weights of a floating dtype that cannot be quantized."""
    weights = [layer.weight for layer in layers]
    found = {weight.dtype for weight in weights if not is_lazy(weight)}
    if found and not any(dtype in DTYPES or not dtype.is_floating_point for dtype in found):
        got = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
        raise ValueError(
            f"convert: weights of linear layers must be float32, bfloat16 or float16, got {got} in all "
            f"{len(layers)} of them. Call model.float() or model.bfloat16() first."
        )


def notes_of(recipe: Recipe, names: Sequence[str], stacks: Sequence[Stack]) -> tuple[str, ...]:
    """Lines of the summary about rules of the recipe that had nothing to act on."""
    if not quantizes(recipe):
        return ()
    notes = [
        f"no layer is called {', '.join(rule.names)} ({rule.why or 'rule of the recipe'})"
        for rule in recipe.layers
        if not _acts(rule, names)
    ]
    keep = recipe.keep_bf16
    if not stacks and (keep.first_blocks or keep.last_blocks):
        notes.append(
            "no stack of blocks was found, so no first and last blocks are kept; name it with stacks="
        )
    return tuple(notes)


def warn_of_gaps(
    summary: ConversionSummary,
    recipe: Recipe,
    modules: Sequence[tuple[str, nn.Module]],
    stacks: Sequence[Stack],
    include: Sequence[str] | None,
) -> None:
    """Warn if nothing is quantized, or if the model has blocks and what the recipe keeps was not found."""
    names = [row.name for row in summary.rows]
    if not quantizes(recipe):
        return
    if not any(row.quantized for row in summary.rows):
        _warn(f"convert quantized nothing by recipe {recipe.name}. print(summary) says why.")
    if stacks:
        _warn_of_rules(recipe, names)
    _warn_of_head(summary, modules, stacks, include)


def _warn_of_rules(recipe: Recipe, names: Sequence[str]) -> None:
    """Warn of layers that a recipe keeps in BF16 and a model with blocks does not have."""
    for rule in recipe.layers:
        table = rule.table
        kept = table.fprop.high_precision and table.dgrad.high_precision and table.wgrad.high_precision
        if kept and not _acts(rule, names):
            _warn(
                f"recipe {recipe.name} keeps layers in BF16 ({rule.why or 'layers'}) that this model does "
                f"not have by these names: {', '.join(rule.names)}. If it has them by others, name those in "
                "exclude."
            )


def _warn_of_head(
    summary: ConversionSummary,
    modules: Sequence[tuple[str, nn.Module]],
    stacks: Sequence[Stack],
    include: Sequence[str] | None,
) -> None:
    """Warn if a language model's head was not found, and a layer that may be it is quantized."""
    blocks = tuple(f"{block}." for stack in stacks for block in stack.blocks)
    outside = [row.name for row in summary.rows if row.quantized and not row.name.startswith(blocks)]
    chosen = {
        row.name for row in summary.rows if row.quantized and include is not None and row.name in include
    }
    if not stacks:  # nothing distinguishes a head from other layers, unless it comes last
        last = summary.rows[-1].name if summary.rows else ""
        outside = [name for name in outside if name == last]
    place = "outside of the blocks" if stacks else "the last layer"
    headless = not chosen and not any(row.reason.startswith(_HEADS) for row in summary.rows)
    if headless and outside and any(isinstance(module, nn.Embedding) for _, module in modules):
        _warn(
            f"no output head was found, and {outside[-1]!r} is quantized although it is {place}. If it is "
            "the head, name it in exclude."
        )


def quantizes(recipe: Recipe) -> bool:
    """Whether a recipe quantizes any GEMM."""
    tables = [recipe.table, *(rule.table for rule in recipe.layers)]
    return not all(table.high_precision for table in tables)


def _acts(rule: LayerRule, names: Sequence[str]) -> bool:
    return any(matches(name, rule.names) for name in names)


def _warn(text: str) -> None:
    warnings.warn(f"fourbits: {text}", stacklevel=4)
