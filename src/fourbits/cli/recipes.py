"""List the shipped recipes, or show the precision of every GEMM operand in one.

NAME is a shipped recipe or a YAML file. Add settings, such as --wgrad.lhs.rht 0, to preview their effect; a
transform is set on both operands of its GEMM. `show NAME --yaml > mine.yaml` starts a custom recipe. `show`
warns where W differs between Fprop and Dgrad.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import fields

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fourbits.compare.number_format import plural
from fourbits.compare.terminal import print_table
from fourbits.quant.operand import OperandSpec
from fourbits.recipe.overrides import with_both_sides
from fourbits.recipe.presets import credited, get_recipe, list_recipes
from fourbits.recipe.recipe import GemmTable, KeepBF16, Recipe
from fourbits.recipe.schedules import SCHEDULES
from fourbits.settings import dump_yaml, override, to_dict

EXAMPLE = "fourbits recipes show nvfp4"
OVERRIDES = True

# fields of an operand that `operand_text` writes in its own way
_FORMATTED = ("format", "block", "rounding", "rht", "rht_signs", "source", "scale_rule")
# fields of a recipe in `list --json`
_LISTED = ("name", "source", "taken", "deviates", "digest")
# GEMM -> its formula and the names of its two operands
GEMMS = {
    "fprop": ("Y = X W^T", "X", "W"),
    "dgrad": ("dX = dY W", "dY", "W"),
    "wgrad": ("dW = dY^T X", "dY^T", "X^T"),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("action", choices=("list", "show"))
    parser.add_argument("name", nargs="?", metavar="NAME", help="a shipped recipe or a .yaml file (for show)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--yaml", action="store_true", help="print a recipe file")


def run(args: Namespace) -> int:
    """List the recipes or show one."""
    if args.action == "list":
        if args.name or args.overrides or args.yaml:
            raise ValueError("list takes no recipe, setting or --yaml. Use `fourbits recipes show NAME`.")
        _list(args.json)
        return 0
    if args.name is None:
        raise ValueError(f"show needs a recipe. Use one of {', '.join(list_recipes())}, or a YAML file.")
    recipe = credited(override(get_recipe(args.name), with_both_sides(args.overrides)))
    if args.json:
        print(json.dumps({**to_dict(recipe), "digest": recipe.digest}, indent=2))
    elif args.yaml:
        print(dump_yaml(to_dict(recipe)), end="")
    else:
        _show(recipe)
    return 0


def operand_text(spec: OperandSpec) -> str:
    """An operand in short, e.g. 'nvfp4 1x16 sr, rht 16 (te16)'; options at their defaults are omitted."""
    if not spec.block_format.quantized:
        return spec.format
    size = spec.block_size
    text = f"{spec.format} {f'{size[0]}x{size[1]}' if size else 'whole tensor'} {spec.rounding}"
    text += f", rht {spec.rht} ({spec.signs})" if spec.rht else ""
    text += ", re-quantized from Fprop" if spec.source == "forward" else ""
    text += f", {spec.scale_rule}" if spec.scale_rule != "max" else ""
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name not in _FORMATTED and value != field.default:
            text += f", {field.name} {value}"
    return text


def kept_text(keep: KeepBF16) -> str:
    """The linear layers that stay in BF16, as short text."""
    blocks = [
        f"{which} {value} of the blocks" if isinstance(value, str) else f"{which} {plural(value, 'block')}"
        for which, value in (("first", keep.first_blocks), ("last", keep.last_blocks))
        if value
    ]
    return "; ".join([*blocks, f"names {', '.join(keep.names)}"])


def weight_warning(table: GemmTable) -> str | None:
    """A warning if W's values in Dgrad are neither those of Fprop nor computed from them, or None.

    The gradient of X is then not that of the forward pass. Square blocks avoid it:
    transposed, their codes and scales stay the same (arXiv:2509.25149, on 2D scaling).
    """
    forward, backward = table.fprop.rhs, table.dgrad.rhs
    unquantized = not (forward.block_format.quantized or backward.block_format.quantized)
    if table.keeps_weight or (unquantized and forward.format == backward.format):
        return None
    if forward == backward:
        differs = f"Fprop and Dgrad quantize W ({operand_text(forward)}) along different axes"
    else:
        differs = f"W is {operand_text(forward)} in Fprop and {operand_text(backward)} in Dgrad"
    return (
        f"{differs}, so gradients are not those of the forward pass. "
        "Set both operands to the same spec, with square blocks and without rht, as in nvfp4."
    )


def _list(as_json: bool) -> None:
    recipes = [get_recipe(name) for name in list_recipes()]
    if as_json:
        print(json.dumps([{field: getattr(r, field) for field in _LISTED} for r in recipes], indent=2))
        return
    table = Table("recipe", "source and description")
    for recipe in recipes:
        table.add_row(recipe.name, Text(": ".join(filter(None, (recipe.source, recipe.taken)))))
    print_table(table)
    if sys.stdout.isatty():  # a pipe gets one line per recipe
        print(f"schedules, as in nvfp4+late-forward: {', '.join(SCHEDULES)} (docs/precision.md)")


def _show(recipe: Recipe) -> None:
    table = Table("GEMM", "lhs", "rhs", title=f"{recipe.name} ({recipe.digest})", title_justify="left")
    tables = [("", recipe.table), *((" ".join(rule.names), rule.table) for rule in recipe.layers)]
    for names, gemms in tables:
        for gemm, (formula, lhs, rhs) in GEMMS.items():
            spec = getattr(gemms, gemm)
            right = operand_text(spec.rhs)
            if gemm == "dgrad" and gemms.shares_weight and spec.rhs.block_format.quantized:
                right = "reused from Fprop"
            title = f"{gemm.capitalize()}  {formula}" + (f"  [{names}]" if names else "")
            table.add_row(Text(title), f"{lhs}: {operand_text(spec.lhs)}", f"{rhs}: {right}")
    console = Console()
    print_table(table, console)
    console.print(Text(f"kept in BF16: {kept_text(recipe.keep_bf16)}"), soft_wrap=True)
    if groups := recipe.shared_weight_amax:
        text = f"one amax for W of: {'; '.join(', '.join(group) for group in groups)}"
        console.print(Text(text), soft_wrap=True)
    for phase in recipe.schedule:
        text = f"phase {phase.name}, from {phase.start} to {phase.end}: {phase.describe()}"
        console.print(Text(text), soft_wrap=True)
    if recipe.hot_channels:
        text = f"hot channels: {recipe.hot_channels:.4g} of the input features, their error added back"
        console.print(Text(text), soft_wrap=True)
    if (reset := recipe.oscillation) is not None:
        text = (
            f"weights that oscillate (ratio {reset.ratio:g} over {reset.window} steps) are reset every "
            f"{reset.period} steps from {reset.start} on"
        )
        console.print(Text(text), soft_wrap=True)
    for label, text in (("source", recipe.source), ("follows", recipe.taken), ("differs", recipe.deviates)):
        if text:
            console.print(Text(f"{label}: {text}"), soft_wrap=True)
    for names, gemms in tables:
        if warning := weight_warning(gemms):
            console.print(Text(f"warning: {f'{names}: ' if names else ''}{warning}"), soft_wrap=True)
