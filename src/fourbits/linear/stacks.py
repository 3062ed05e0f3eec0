"""Stacks of blocks: the runs of repeated modules of a model, each with a first and a last block.

A model has a stack per encoder, decoder or tower. A stack is the outermost container of two or more blocks: a
ModuleList, a ModuleDict with numbers for keys, the run of one class in another container, or attributes
that are numbered. Where the entries are stages of different widths, as in Swin, the blocks are the stages'.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from fourbits.linear.weights import is_linear, widths

Named = tuple[str, nn.Module]
#: containers whose entries run in parallel, not one after another
_PARALLEL = ("experts", "heads", "adapters")
#: fewest attributes, such as block1 to block4, that make a stack
_FEWEST_ATTRIBUTES = 3


@dataclass(frozen=True, slots=True)
class Stack:
    """A run of blocks that a model applies one after another."""

    #: the container's name
    name: str
    #: names of the blocks, in order
    blocks: tuple[str, ...]


def find_stacks(parts: Sequence[nn.Module]) -> tuple[Stack, ...]:
    """The stacks of a model; stacks of its parts with the same name and classes of blocks are one stack."""
    found: dict[tuple[str, frozenset[type]], list[str]] = {}
    for index, part in enumerate(parts):
        prefix = f"{index}." if len(parts) > 1 else ""
        for name, blocks in _stacks("", part, least=1 if len(parts) > 1 else 2):
            kinds = frozenset(type(block) for _, block in blocks)
            found.setdefault((name, kinds), []).extend(prefix + block for block, _ in blocks)
    return tuple(Stack(name, tuple(blocks)) for (name, _), blocks in found.items() if len(blocks) > 1)


def named_stacks(modules: Sequence[Named], patterns: Iterable[str]) -> tuple[Stack, ...]:
    """The containers whose names match, as stacks. Raises ValueError for a module that is no container."""
    found = [(n, m) for n, m in modules if any(fnmatch.fnmatchcase(n, p) for p in patterns)]
    blocks = {block: stack.name for stack in find_stacks([modules[0][1]]) for block in stack.blocks}
    for name, module in found:
        if name in blocks and any(is_block(child) for child in module.children()):
            raise ValueError(
                f"convert: stacks must name containers of blocks, got {name!r}, which is a block of "
                f"{blocks[name]!r}. Name that."
            )
        listed = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if not listed and not _run(name, module)[1] and any(is_block(child) for child in module.children()):
            raise ValueError(
                f"convert: stacks must name containers of blocks: a ModuleList, ModuleDict, Sequential, or a "
                f"module with numbered ones. Got {name!r}, a {type(module).__name__} of "
                f"{', '.join(key for key, _ in module.named_children())}. Name what holds the blocks."
            )
    stacks = ((name, _flattened([*_children(name, module)])) for name, module in found)
    return tuple(Stack(name, tuple(n for n, _ in blocks)) for name, blocks in stacks if blocks)


def _stacks(name: str, module: nn.Module, least: int) -> Iterator[tuple[str, list[Named]]]:
    """The outermost stacks in a module with at least this many blocks: (name, blocks)."""
    label, entries = _run(name, module)
    blocks = _flattened(entries)
    if len(blocks) >= least:
        yield label, blocks
    else:
        entries = []
    inside = {id(entry) for _, entry in entries}
    for child_name, child in _children(name, module):
        if id(child) not in inside and child_name.rpartition(".")[2] not in _PARALLEL:
            yield from _stacks(child_name, child, least)


def _run(name: str, module: nn.Module) -> tuple[str, list[Named]]:
    """The blocks that a container holds directly, and the name of that stack; none if it holds no run."""
    children = [(n, child) for n, child in _children(name, module) if is_block(child)]
    keys = [key for key, _ in module.named_children()]
    numbered = isinstance(module, nn.ModuleDict) and all(key.isdigit() for key in keys)
    if isinstance(module, nn.ModuleList) or numbered:
        return name, children
    if isinstance(module, nn.Sequential | nn.ModuleDict):
        counts = Counter(type(child) for _, child in children)
        places = [place for place, (_, child) in enumerate(children) if counts[type(child)] > 1]
        return name, children[places[0] : places[-1] + 1] if places else []
    stems: dict[tuple[str, type], list[Named]] = {}
    for child_name, child in children:
        if match := re.fullmatch(r"(.*?)_?\d+", child_name):
            stems.setdefault((match[1], type(child)), []).append((child_name, child))
    (stem, _), run = max(stems.items(), key=lambda item: len(item[1]), default=(("", nn.Module), []))
    return f"{stem}*", run if len(run) >= _FEWEST_ATTRIBUTES else []


def is_block(module: nn.Module) -> bool:
    """Whether a module may be a block: it holds linear layers and is not one itself, wrapped or not."""
    if is_linear(module) or is_linear(getattr(module, "base_layer", None)):
        return False
    return any(is_linear(inner) for inner in module.modules())


def _flattened(entries: list[Named]) -> list[Named]:
    """The blocks of stages where the entries are stages, else the entries."""
    inner = [_stage(name, entry) for name, entry in entries]
    if not all(inner):
        return entries
    lists = all(isinstance(entry, nn.ModuleList) for _, entry in entries)
    kinds = {widths(entry) for _, entry in entries}
    if lists or (len(entries) > 1 and len(kinds) > len(entries) / 2):
        return [block for blocks in inner for block in blocks]
    return entries


def _stage(name: str, entry: nn.Module) -> list[Named]:
    """The blocks of a stage: the entries, of one class, of the list that holds most of its linear layers."""
    for list_name, module in [(name, entry), *_children(name, entry)]:
        if not isinstance(module, nn.ModuleList | nn.Sequential) or list_name.endswith(_PARALLEL):
            continue
        blocks = [(n, child) for n, child in _children(list_name, module) if is_block(child)]
        one_class = len({type(block) for _, block in blocks}) == 1
        if one_class and 2 * sum(_size(block) for _, block in blocks) > _size(entry):
            return blocks
    return []


def _size(module: nn.Module) -> int:
    return sum(rows * columns for rows, columns in widths(module))


def _children(name: str, module: nn.Module) -> Iterator[Named]:
    for key, child in module.named_children():
        yield f"{name}.{key}" if name else key, child
