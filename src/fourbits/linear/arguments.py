"""The arguments of `convert`, checked and normalized."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fourbits.recipe.recipe import Recipe


def model_parts(model: Any, caller: str = "convert") -> list[nn.Module]:
    """The parts of a model, or the model as its only one. Raises ValueError for anything else."""
    parts: list[Any] = (
        [model] if isinstance(model, nn.Module) or not isinstance(model, Sequence) else [*model]
    )
    wrong = [type(part).__name__ for part in parts if not isinstance(part, nn.Module)]
    if wrong or not parts:
        got = wrong[0] if wrong else "an empty list"
        raise ValueError(
            f"{caller}: model must be an nn.Module or a list of them, got {got}. Pass the model itself."
        )
    modules = [module for part in parts for module in part.modules()]
    if len({id(module) for module in modules}) < len(modules):
        raise ValueError(
            f"{caller}: parts of a model must not contain each other or share modules. Pass the outermost "
            "one."
        )
    return parts


def require_eager(modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Raises ValueError for modules of TorchScript, and for those whose parameters have no shape yet."""
    for name, module in modules:
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"convert: modules must run in Python, got {name or 'the model'!r}, a {kind} of TorchScript. "
                "Convert the model before torch.jit."
            )
        if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            raise ValueError(
                f"convert: parameters must have shapes, got {name or 'the model'!r}, a {kind} that was never "
                "called. Run the model once before."
            )


def patterns_of(option: str, given: Any) -> tuple[str, ...] | None:
    """The patterns of an option, a text or several, as a tuple; None if there are none."""
    if given is None:
        return None
    several = isinstance(given, Iterable) and not isinstance(given, str)
    patterns: tuple[Any, ...] = tuple(given) if several else (given,)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            remedy = "Name containers." if option == "stacks" else "Pass a function as filter_fn."
            raise ValueError(
                f"convert: {option} must be a pattern of module names or a list of such, got {pattern!r}. "
                f"{remedy}"
            )
    return patterns


def with_kept_blocks(recipe: Recipe, first: int | str | None, last: int | str | None) -> Recipe:
    """The recipe, with the caller's numbers of blocks in BF16 where given."""
    keep = recipe.keep_bf16
    keep = keep if first is None else replace(keep, first_blocks=first)
    keep = keep if last is None else replace(keep, last_blocks=last)
    return recipe if keep == recipe.keep_bf16 else replace(recipe, keep_bf16=keep)


def require_choice(seed: Any, backend: Any, min_size: Any, filter_fn: Any) -> None:
    """Raises ValueError for an invalid seed, backend, smallest size or function."""
    if filter_fn is not None and not callable(filter_fn):
        raise ValueError(
            f"convert: filter_fn must be a function (module, name) -> bool, got {filter_fn!r}. Pass names as "
            "include or exclude."
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32:
        raise ValueError(f"convert: seed must be an int in [0, 2**32), got {seed!r}. Pass such an int.")
    if backend not in ("emulated", "native"):
        raise ValueError(
            f"convert: backend must be emulated or native, got {backend!r}. The default is emulated."
        )
    if min_size is not None and (isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 0):
        raise ValueError(
            f"convert: min_size must be a number of weights, got {min_size!r}. Pass a whole number."
        )
