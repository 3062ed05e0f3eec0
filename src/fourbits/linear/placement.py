"""The table that a linear layer gets, or why it stays in BF16: by recipe, caller and model structure."""

from collections import Counter
from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from fourbits.linear.amax_history import depends_on_past_steps
from fourbits.linear.bypassed import bypassed_layers
from fourbits.linear.lookalikes import computes_like_linear, hides_forward
from fourbits.linear.roles import Roles
from fourbits.linear.selection import Selection, matches
from fourbits.linear.stacks import Stack
from fourbits.linear.weights import Weight
from fourbits.quant.arguments import DTYPES
from fourbits.recipe.recipe import GemmTable, KeepBF16, Recipe

_HEADS = KeepBF16().names


class Decider:
    """Decides for the layers of one model. What depends on the whole model is computed once."""

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        stacks: Sequence[Stack],
        recipe: Recipe,
        selection: Selection,
    ) -> None:
        self.recipe, self.selection = recipe, selection
        self.tied = tied_parameters(modules)
        self.bypassed = bypassed_layers(modules)
        self.roles = Roles(modules, stacks)
        #: name of a block -> (its index, the number of blocks of its stack)
        self.blocks = {
            block: (index, len(stack.blocks)) for stack in stacks for index, block in enumerate(stack.blocks)
        }

    def decide(self, layer: Weight) -> tuple[GemmTable | None, str]:
        """The table of a linear layer, or None to keep it in BF16, and the reason."""
        table, reason = table_for(self.recipe, layer.name)
        if table.fprop.high_precision and table.dgrad.high_precision and table.wgrad.high_precision:
            return None, reason
        kept = self._unsupported(layer) or self.selection.excluded_because(layer)
        if kept is None and not self.selection.names(layer.name):
            kept = self._kept_because(layer)
        if kept is None and layer.holds_several and depends_on_past_steps(table):
            kept = "groups of linear layers do not support amax policies or adaptive layouts"
        if kept is not None:
            return None, kept
        rows, columns = layer.size_of_one
        if rows % 16 or columns % 16:
            reason = f"{reason}; {rows}x{columns} is padded to multiples of 16"
        return table, reason

    def _unsupported(self, layer: Weight) -> str | None:
        """Why a layer cannot be quantized, whatever the recipe, or None."""
        module, kind = layer.module, type(layer.module)
        parameters = [layer.weight] if layer.kind == "stacked" else module.parameters()
        if any(id(parameter) in self.tied for parameter in parameters):
            return "weight is tied to another module"
        if layer.name in self.bypassed:
            return self.bypassed[layer.name]
        if layer.kind == "linear" and not computes_like_linear(kind):
            return f"{kind.__name__} computes more than nn.Linear"
        if is_lazy(layer.weight):
            return "its weight is not initialized yet"
        if layer.weight.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            return f"its weight is {str(layer.weight.dtype).removeprefix('torch.')}, not one of {known}"
        if hides_forward(module):
            return "its forward was replaced on the instance, so changing its class would have no effect"
        return self.roles.adapter(layer.name)

    def _kept_because(self, layer: Weight) -> str | None:
        """Why a layer stays in BF16 by its name, its role or its place, or None."""
        for pattern in self.recipe.keep_bf16.names:
            if matches(layer.name, (pattern,)):
                return "output head or embedding" if pattern in _HEADS else f"keep_bf16.names has {pattern!r}"
        role = self.roles.router(layer.name, layer.shape[0]) or self.roles.head(
            layer.name, layer.module, layer.shape[0]
        )
        return role or self._kept_block(layer.name)

    def _kept_block(self, name: str) -> str | None:
        while name and name not in self.blocks:
            name = name.rpartition(".")[0]
        if not name:
            return None
        index, blocks = self.blocks[name]
        first = self.recipe.keep_bf16.count_first(blocks)
        last = self.recipe.keep_bf16.count_last(blocks)
        if index < first:
            return f"first {first} of {blocks} blocks"
        return f"last {last} of {blocks} blocks" if index >= blocks - last else None


def table_for(recipe: Recipe, name: str) -> tuple[GemmTable, str]:
    """The table of a layer of this name, if the layer is quantized, and which rule chose it."""
    for rule in recipe.layers:
        if matches(name, rule.names):
            return rule.table, rule.why or f"rule {', '.join(rule.names)}"
    return recipe.table, f"recipe {recipe.name}"


def tied_parameters(modules: Sequence[tuple[str, nn.Module]]) -> set[int]:
    """The id() of every parameter that more than one module holds."""
    held = (parameter for _, module in modules for parameter in module.parameters(recurse=False))
    holders = Counter(id(parameter) for parameter in held)
    return {key for key, count in holders.items() if count > 1}
