"""Which table a linear layer gets, and why: the recipe's rules, applied to the facts of the model."""

import fnmatch
import importlib.util
from collections import Counter
from collections.abc import Sequence

from torch import nn

from fourbits.linear.amax_history import depends_on_the_past
from fourbits.linear.grouped import is_group
from fourbits.recipe.recipe import GemmTable, Recipe

#: packages whose mixers call mamba_ssm's kernels; the second holds remote code loaded with a checkpoint
_HOMES_OF_MAMBA = ("transformers", "transformers_modules", "mamba_ssm")


class Decider:
    """The recipe's rules for one model. Facts about the whole model are collected once."""

    def __init__(self, model: nn.Module, recipe: Recipe):
        self.recipe = recipe
        self.tied = tied_parameters(model)
        self.read_by_kernels = fused_weights(model)
        self.block_prefix, self.blocks = repeated_blocks(model)
        get_head = getattr(model, "get_output_embeddings", None)
        self.head = get_head() if callable(get_head) else None

    def decide(self, name: str, linear: nn.Linear) -> tuple[GemmTable | None, str]:
        """The table of a linear layer, or None to keep it in BF16, and the reason."""
        table, reason = table_for(self.recipe, name)
        if table.fprop.high_precision and table.dgrad.high_precision and table.wgrad.high_precision:
            return None, reason
        kept = self._kept(name, linear)
        if kept:
            return None, kept
        if is_group(linear) and depends_on_the_past(table):
            return None, "groups of linear layers do not support amax policies or adaptive layouts"
        if linear.in_features % 16 or linear.out_features % 16:
            shape = f"{linear.out_features}x{linear.in_features}"
            reason = f"{reason}; {shape} is padded to multiples of 16"
        return table, reason

    def _kept(self, name: str, linear: nn.Linear) -> str:
        if id(linear.weight) in self.tied:
            return "weight is tied to another module"
        if name in self.read_by_kernels:
            return self.read_by_kernels[name]
        if type(linear) is not nn.Linear and not getattr(type(linear), "casts_weight", False):
            return f"{type(linear).__name__} computes more than nn.Linear"
        if "forward" in vars(linear):
            return "its forward was replaced on the instance, so changing its class would have no effect"
        if linear is self.head or _matches(name, self.recipe.keep_bf16.names):
            return "output head or embedding"
        return self._kept_block(name)

    def _kept_block(self, name: str) -> str:
        if not self.blocks or not name.startswith(self.block_prefix):
            return ""
        index = int(name.removeprefix(self.block_prefix).split(".")[0])
        first = self.recipe.keep_bf16.count_first(self.blocks)
        last = self.recipe.keep_bf16.count_last(self.blocks)
        if index < first:
            return f"first {first} of {self.blocks} blocks"
        return f"last {last} of {self.blocks} blocks" if index >= self.blocks - last else ""


def table_for(recipe: Recipe, name: str) -> tuple[GemmTable, str]:
    """The table of a layer of this name, if the layer is quantized, and which rule chose it."""
    for rule in recipe.layers:
        if _matches(name, rule.names):
            return rule.table, rule.why or f"rule {', '.join(rule.names)}"
    return recipe.table, f"recipe {recipe.name}"


def tied_parameters(model: nn.Module) -> set[int]:
    """The id() of every parameter that more than one module holds."""
    held = (p for module in model.modules() for p in module.parameters(recurse=False))
    holders = Counter(id(p) for p in held)
    return {key for key, count in holders.items() if count > 1}


def repeated_blocks(model: nn.Module) -> tuple[str, int]:
    """Name prefix and length of the model's largest list of blocks; ("", 0) without one.

    The largest is the outermost ModuleList of at least two entries that has the most parameters.
    """
    best, size = ("", 0), -1
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or name.startswith(inside):
            continue
        prefix = name + "." if name else ""
        inside += (prefix,)
        parameters = sum(p.numel() for p in module.parameters())
        if len(module) > 1 and parameters > size:
            best, size = (prefix, len(module)), parameters
    return best


def fused_weights(model: nn.Module) -> dict[str, str]:
    """Linear layers whose weight a fused kernel reads without calling the module: name -> reason."""
    modules = list(model.named_modules())
    kernels = importlib.util.find_spec("mamba_ssm") is not None
    kernels = kernels or any(getattr(module, "use_kernels", False) is True for _, module in modules)
    found: dict[str, str] = {}
    for name, module in modules:
        for child in _read_directly(module, kernels):
            key = f"{name}.{child}" if name else child
            found[key] = f"a fused kernel of {type(module).__name__} reads this weight directly"
    return found


def _read_directly(module: nn.Module, mamba_kernels: bool) -> Sequence[str]:
    """Names of the children whose weights a module reads without calling their forward."""
    if isinstance(module, nn.MultiheadAttention):
        return ("out_proj",)
    if isinstance(module, nn.TransformerEncoderLayer):
        return ("linear1", "linear2")
    home = type(module).__module__.partition(".")[0]
    if home not in _HOMES_OF_MAMBA or not hasattr(module, "conv1d"):
        return ()
    # A Mamba-1 mixer always reads dt_proj's weight directly; the one in mamba_ssm also reads in_proj's.
    if home == "mamba_ssm":
        return ("x_proj", "dt_proj", "out_proj") + (("in_proj",) if hasattr(module, "x_proj") else ())
    return ("x_proj", "dt_proj", "out_proj") if mamba_kernels else ("dt_proj",)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
