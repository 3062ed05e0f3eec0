"""A caller's choice of layers: names to include and exclude, a function, a smallest size."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from torch import nn

from fourbits.linear.roles import plain_name
from fourbits.linear.weights import Weight

Filter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True, slots=True)
class Selection:
    """The choice of a caller of `convert`. None means all layers, the stacks found, the recipe's blocks."""

    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None
    filter_fn: Filter | None = None
    min_size: int | None = None
    stacks: tuple[str, ...] | None = None
    keep_first: int | str | None = None
    keep_last: int | str | None = None
    #: names that a function excluded
    excluded: frozenset[str] = frozenset()

    def excluded_because(self, layer: Weight) -> str | None:
        """Why a layer is excluded, or None."""
        for pattern in self.exclude or ():
            if covers(pattern, layer.name):
                return f"excluded by {pattern!r}"
        if self.include is not None and not any(covers(pattern, layer.name) for pattern in self.include):
            return "not in include"
        if layer.name in self.excluded:
            return "excluded by filter_fn"
        rows, columns = layer.shape
        if self.min_size is not None and not self.names(layer.name) and rows * columns < self.min_size:
            return f"fewer than {self.min_size} weights"
        return None

    def without_function(self, layers: Iterable[Weight]) -> "Selection":
        """The same choice with the names that the function excludes, which is called once for each layer."""
        chosen = self.filter_fn
        if chosen is None:
            return self
        names = {layer.name for layer in layers if not chosen(layer.module, layer.name)}
        return replace(self, filter_fn=None, excluded=self.excluded | names)

    def names(self, name: str) -> bool:
        """Whether `include` has exactly this name, which then is quantized whatever its role and place."""
        return self.include is not None and not {name, f"{name}.weight"}.isdisjoint(self.include)


def covers(pattern: str, name: str) -> bool:
    """Whether a pattern matches a layer's name, or that of a module around it."""
    return matches(name, (pattern,)) or any(_matches(outer, pattern) for outer in _outwards(name))


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a layer's name, or that name without its wrappers, matches any pattern.

    A pattern may name the layer's weight, as named_parameters does.
    """
    return any(_matches(each, pattern) for pattern in patterns for each in (name, f"{name}.weight"))


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(each, pattern) for each in (name, plain_name(name)))


def require_matches(
    option: str,
    patterns: Iterable[str],
    names: Sequence[str],
    what: str,
    others: Mapping[str, str] | None = None,
) -> None:
    """Raises ValueError for a pattern that matches none of the names, or the modules around them.

    others: names of weights that are not meant, for a better message, and what each is.
    """
    for pattern in patterns:
        if any(covers(pattern, name) for name in names):
            continue
        for name, kind in (others or {}).items():
            if covers(pattern, name):
                raise ValueError(
                    f"convert: {option} must match {what}, got {pattern!r}, which matches {name!r}: {kind}. "
                    "That stays in high precision; remove the pattern."
                )
        raise ValueError(
            f"convert: {option} must match {what}, got {pattern!r}, which matches none."
            f"{nearest_module(pattern, names)} '*' also matches dots; print(model) shows the names."
        )


def nearest_module(pattern: str, names: Sequence[str]) -> str:
    """' The nearest is X.' for the module whose name, or end of a name, looks most like a pattern."""
    bare = pattern.removesuffix(".weight").strip("*.")
    depth = bare.count(".") + 1
    ends: dict[str, str] = {}
    for name in names:
        for outer in _outwards(name):
            ends.setdefault(".".join(outer.split(".")[-depth:]).lower(), outer)
            ends.setdefault(outer.lower(), outer)
    found = get_close_matches(bare.lower(), list(ends), n=1, cutoff=0.4)
    return f" The nearest is {ends[found[0]]!r}." if found else ""


def _outwards(name: str) -> Iterable[str]:
    """A module's name, then those of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]
