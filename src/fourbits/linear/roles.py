"""Linear layers that stay in high precision because of their role: routers, expert gates, adapters, heads.

A recipe's names are those of the layers that its authors kept. These rules are for any model, so they look at
its structure: how many experts there are, which blocks come last, what wraps a frozen layer.
"""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from fourbits.linear.stacks import Stack
from fourbits.linear.weights import SMALLEST_SIDE, is_group, is_linear, widths

#: parts that wrappers add to a module's name
_WRAPPERS = re.compile(
    r"(?:^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer|original_module"
    r"|modules_to_save\.[^.]+)(?=\.|$)"
)
_ROUTER = re.compile(r"(?:^|\.)\w*router\w*(?:\.|$)", re.IGNORECASE)
_GATE = re.compile(r"(?:^|[._])(?:gate|wg|gating)(?:\.[^.]+)?$")
#: names of a gate's own layer, which an MLP's gate never has
_GATES_LAYER = re.compile(r"(?:^|\.)(?:wg|(?:gate|gating)\.[^.]+)$")
#: names of heads outside of all blocks; those that are unambiguous even in a model without blocks
_HEAD = re.compile(r"(?:^|\.)(?:heads?|output|classifier|score|qa_outputs|pooler|fc|logits|unembed)(?=\.|$)")
_UNMISTAKABLE = re.compile(r"(?:lm_head|heads?|classifier|score|qa_outputs|fc)(?=\.|$)")


class Roles:
    """The roles of a model's layers, by their place in it."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], stacks: Sequence[Stack]) -> None:
        self._modules = dict(modules)
        self._order = {name: place for place, (name, _) in enumerate(modules)}
        self._blocks = tuple(block for stack in stacks for block in stack.blocks)
        self._last_block = max((self._order[block] for block in self._blocks), default=-1)
        self._heads = {id(head) for _, module in modules if (head := _output_embeddings(module)) is not None}
        self._vocabularies = {
            module.num_embeddings for _, module in modules if isinstance(module, nn.Embedding)
        }
        linears = (place for place, (_, module) in enumerate(modules) if is_linear(module))
        self._last_linear = max(linears, default=-1)
        bases = [(name, getattr(module, "base_model_prefix", None)) for name, module in modules]
        #: (task model, the model in it), for transformers' wrappers of a model and its task head
        self._tasks = [
            (name, f"{name}.{base}".lstrip("."))
            for name, base in bases
            if isinstance(base, str) and base and f"{name}.{base}".lstrip(".") in self._modules
        ]

    def adapter(self, name: str) -> str | None:
        """Why a layer is an adapter on a frozen one, or None."""
        parent = name
        while parent:
            parent, _, own = parent.rpartition(".")
            wrapped = getattr(self._modules.get(parent), "base_layer", None)
            if isinstance(wrapped, nn.Module) and is_linear(wrapped) and own != "base_layer":
                return f"adapter of {parent}"
        if re.search(r"(?:^|\.)lora_", name):
            return "adapter"
        beside = self._parent(name)
        frozen = "" if beside is None else _adapted(beside, self._modules.get(name))
        return f"adapter: half of a low-rank pair beside the frozen {frozen!r}" if frozen else None

    def router(self, name: str, rows: int) -> str | None:
        """Why a layer chooses or weighs experts, or None. rows: its out_features."""
        *_, parent, own = ("", *name.split("."))
        plain = plain_name(name)
        kinds = [type(module).__name__ for module in (self._modules.get(name), self._parent(name))]
        if _ROUTER.search(plain) or any("Router" in kind for kind in kinds):
            return "router"
        if _GATE.search(plain) and rows == 1:
            return "gate of an expert"
        experts = self._experts_beside(name)
        if rows in experts and (_GATE.search(plain) or "gate" in (own, parent) or self._is_only_user(name)):
            return f"router: a column for each of {rows} experts"
        reads = getattr(self._modules.get(name), "in_features", rows)
        gates_layer = _GATES_LAYER.search(plain) and "shared" not in plain and rows < reads
        if gates_layer and any(count > 1 and rows % count == 0 for count in experts):
            return f"router: {rows} columns, a multiple of the experts here"  # other ranks hold the others
        chosen = self._chosen_by(name, rows, reads)
        return f"router: a column for each of {rows} modules in {chosen!r}" if chosen else None

    def head(self, name: str, module: nn.Module, rows: int) -> str | None:
        """Why a layer belongs to a head, or None. rows: its out_features."""
        if id(module) in self._heads:
            return "output head or embedding"
        if self._in_block(name):
            return None
        for outer, base in self._tasks:
            inside = name.startswith(f"{outer}.") if outer else True
            if inside and not f"{name}.".startswith(f"{base}."):
                return f"head: outside {base!r}"
        plain = plain_name(name)
        if (_HEAD.search(plain) if self._blocks else _UNMISTAKABLE.match(plain)) is not None:
            return "head by its name"
        place = self._order[
            name if name in self._order else name.rpartition(".")[0]
        ]  # or that of a parameter
        if rows in self._vocabularies and place == self._last_linear:
            return f"head: as many columns as the embedding has rows, {rows}"
        return "follows the last block" if self._blocks and place > self._last_block else None

    def _in_block(self, name: str) -> bool:
        return any(f"{name}.".startswith(f"{block}.") for block in self._blocks)

    def _parent(self, name: str) -> nn.Module | None:
        return self._modules.get(name.rpartition(".")[0])

    def _beside(self, name: str) -> list[tuple[str, nn.Module]]:
        """The modules in the two modules around a layer, past any lists, that do not hold the layer."""
        found: list[tuple[str, nn.Module]] = []
        outer, levels = name, 0
        while outer and levels < 2:
            outer = outer.rpartition(".")[0]
            around = self._modules.get(outer, nn.ModuleList())
            if not isinstance(around, nn.ModuleList):
                levels += 1
                inner = ((f"{outer}.{key}".lstrip("."), child) for key, child in around.named_children())
                found += [(where, child) for where, child in inner if not f"{name}.".startswith(f"{where}.")]
        return found

    def _experts_beside(self, name: str) -> set[int]:
        """How many experts the modules around a layer hold, up to two levels above it."""
        found = {count for where, child in self._beside(name) for count in _expert_counts(where, child)}
        parent = name.rpartition(".")[0]
        found |= _stacked_counts(self._parent(name))
        return found | (_stacked_counts(self._parent(parent)) if parent else set())

    def _chosen_by(self, name: str, rows: int, reads: int) -> str:
        """The list beside a layer that holds a module for each of its columns; the modules have the same
        shapes and read what the layer reads. Empty if there is none.
        """
        for where, child in self._beside(name) if rows not in (1, reads) else ():
            entries = list(child.children()) if isinstance(child, nn.ModuleList | nn.ModuleDict) else []
            if len(entries) != rows or any(block.startswith(f"{where}.") for block in self._blocks):
                continue
            first, *others = {widths(entry) for entry in entries}
            if not others and first and first[0][1] == reads:
                return where
        return ""

    def _is_only_user(self, name: str) -> bool:
        """Whether a layer stands directly beside its experts, whatever it is called."""
        parent = self._parent(name)
        return parent is not None and bool(
            _stacked_counts(parent)
            or any(_expert_counts(key, child) for key, child in parent.named_children())
        )


def plain_name(name: str) -> str:
    """A module's name without what torch.compile, FSDP, checkpointing and adapters add to it."""
    return _WRAPPERS.sub("", name).lstrip(".")


def _adapted(parent: nn.Module, layer: nn.Module | None) -> str:
    """The frozen linear layer that a trained one and another beside it adapt, by a low-rank product."""
    inner = {key: child for key, child in parent.named_children() if isinstance(child, nn.Linear)}
    if not isinstance(layer, nn.Linear) or not layer.weight.requires_grad or len(inner) < 3:
        return ""
    for key, frozen in inner.items():
        sides = (frozen.in_features, frozen.out_features)
        for other in inner.values() if not frozen.weight.requires_grad else ():
            for down, up in ((layer, other), (other, layer)):
                rank = down.out_features
                pair = other.weight.requires_grad and down is not up and rank == up.in_features
                if pair and (down.in_features, up.out_features) == sides and rank < min(sides):
                    return key
    return ""


def _expert_counts(name: str, child: nn.Module) -> set[int]:
    """How many experts a module named like a container of experts holds."""
    key = name.rpartition(".")[2]
    if "expert" not in key or "shared" in key:
        return set()
    if isinstance(child, nn.ModuleList | nn.ModuleDict):
        return {len(child)}
    for inner_key, inner in child.named_children():  # DeepSpeed's Experts holds the list
        if "expert" in inner_key and isinstance(inner, nn.ModuleList | nn.ModuleDict):
            return {len(inner)}
    if is_group(child):
        return {len(child.weight)}  # pyright: ignore[reportArgumentType]
    stacked = {parameter.shape[0] for parameter in child.parameters() if parameter.dim() == 3}
    declared: Any = getattr(child, "num_experts", None)
    return stacked | ({declared} if isinstance(declared, int) else set())


def _stacked_counts(module: nn.Module | None) -> set[int]:
    """How many experts a module's own parameters [E, K, N] stack; a position, a class token and the kernel of
    a convolution, with its few taps, are no stacks.
    """
    own = [] if module is None else [p for p in module.parameters(recurse=False) if p.dim() == 3]
    return {p.shape[0] for p in own if p.shape[1] > 1 and p.shape[2] >= SMALLEST_SIDE} - {1}


def _output_embeddings(module: nn.Module) -> nn.Module | None:
    get_head: Any = getattr(module, "get_output_embeddings", None)
    try:
        head: Any = get_head() if callable(get_head) else None
        return head
    except (AttributeError, NotImplementedError):  # how transformers' models declare that they have no head
        return None
