"""Frozen dataclasses from YAML, with actionable errors.

A configuration is a tree of `@dataclass(frozen=True, kw_only=True, slots=True)` objects. Fields may be bool,
int, float, str, Path, Literal, Enum, other dataclasses, dict[str, X], tuple[X, ...], tuple[X, Y], list[X] and
unions of these with each other or None. The annotations are the only schema.
"""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from difflib import get_close_matches
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from fourbits.yaml_text import dump_yaml, load_yaml, parse_yaml

__all__ = ["build", "dump_yaml", "load_yaml", "nearest", "override", "to_dict"]

T = TypeVar("T")
NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    NoneType: "null",
    Any: "anything",
}
_REMEDIES: dict[Any, str] = {
    bool: "Write true or false.",
    int: "Write one such as 8.",
    float: "Write one such as 0.5.",
    str: "Put it in quotes.",
    Path: "Put it in quotes.",
    NoneType: "Write null.",
}


def build(cls: type[T], mapping: Mapping[str, Any], where: str = "config") -> T:
    """Build a `cls` from nested dicts, lists and scalars; errors start with `where`, e.g. a file name.

    Raises ValueError for an unknown or missing key, a wrong type, or a value that the class rejects.
    """
    return _build(cls, mapping, f"{where}:")


def override(obj: T, changes: Mapping[str, Any], where: str = "override") -> T:
    """A copy of a dataclass with changes such as {"optim.lr": "3e-4"} applied, validated again.

    Strings are parsed as YAML scalars unless the field is text. A path may go through a field that is None,
    add an entry to a dict, and index a list by position ("phases.0.until").
    """
    tree = to_dict(obj)
    for path, value in changes.items():
        if path.partition(".")[0] not in tree and (places := _places_of(path, tree)):
            raise ValueError(f"{where}: unknown key {path!r}. Did you mean {' or '.join(places[:6])}?")
        _put(tree, path.split("."), _Text(value) if isinstance(value, str) else value, f"{where}: {path}")
    return _build(type(obj), tree, f"{where}:")


def to_dict(obj: Any) -> Any:
    """Plain dicts, lists and scalars that `build` turns back into an equal object."""
    if dataclasses.is_dataclass(obj):
        return {f.name: to_dict(getattr(obj, f.name)) for f in dataclasses.fields(obj) if f.init}
    if isinstance(obj, Enum):
        return obj.value
    if isinstance(obj, Mapping):
        return {key: to_dict(value) for key, value in obj.items()}
    if isinstance(obj, tuple | list):
        return [to_dict(item) for item in obj]
    return str(obj) if isinstance(obj, Path) else obj


def nearest(name: object, known: Sequence[str], cutoff: float = 0.5) -> str:
    """' Did you mean X?' for the nearest known name, or an empty string; to append to an error message."""
    match = get_close_matches(str(name), known, n=1, cutoff=cutoff)
    return f" Did you mean {match[0]!r}?" if match else ""


class _Text(str):
    """A string from a command line; the field decides whether it is text or a YAML scalar."""

    __slots__ = ()

    def parsed(self) -> Any:
        try:
            return parse_yaml(str(self), "override")
        except ValueError:
            return str(self)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


@cache
def _fields(cls: type) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(cls) if f.init}


def _join(place: str, key: object) -> str:
    return f"{place} {key}" if place.endswith(":") else f"{place}.{key}"


def _build(cls: type[T], mapping: Any, place: str) -> T:
    subject, fields = place.rstrip(":"), _fields(cls)
    if not isinstance(mapping, Mapping):
        raise ValueError(
            f"{subject} must be a mapping of keys to values, got {mapping!r}.{_remedy(dict, mapping)}"
        )
    for key in mapping:
        if key not in fields:
            known = ", ".join(fields)
            raise ValueError(
                f"{subject}: unknown key {key!r}.{nearest(key, list(fields))} Known keys: {known}."
            )
    required = [name for name, f in fields.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in mapping]:
        keys = "its key" if len(missing) == 1 else "their keys"
        raise ValueError(f"{subject}: needs a value for {', '.join(missing)}, got none. Add {keys}.")
    values = {key: _convert(_hints(cls)[key], value, _join(place, key)) for key, value in mapping.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{subject}: {error}") from error


def _convert(kind: Any, value: Any, place: str) -> Any:
    """The value converted to type `kind`. Raises ValueError."""
    origin, args = get_origin(kind), get_args(kind)
    if isinstance(value, _Text):
        return _convert_text(kind, value, place)
    if origin in (Union, UnionType):
        return _convert_union(args, value, place)
    if dataclasses.is_dataclass(kind) and type(value) is not kind:
        return _build(cast(type, kind), value, place)
    if origin is dict and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _convert(args[1], item, _join(place, key)) for key, item in value.items()}
    if origin in (tuple, list) and isinstance(value, tuple | list):
        kinds = args if origin is tuple and args[-1] is not Ellipsis else [args[0]] * len(value)
        if len(kinds) == len(value):
            items = [
                _convert(k, v, _join(place, i)) for i, (k, v) in enumerate(zip(kinds, value, strict=True))
            ]
            return tuple(items) if origin is tuple else items
    if origin in (None, Literal):
        return _convert_scalar(kind, value, place)
    raise ValueError(f"{place} must be {_describe(kind)}, got {value!r}.{_remedy(kind, value)}")


def _convert_scalar(kind: Any, value: Any, place: str) -> Any:
    if kind is float and isinstance(value, int | float) and not math.isfinite(value):
        raise ValueError(f"{place} must be a finite number, got {value!r}.{_remedy(kind, value)}")
    if kind is Any or type(value) is kind:
        return value
    if any(choice == value and type(choice) is type(value) for choice in _choices(kind)):
        return value if get_origin(kind) is Literal else kind(value)
    if type(value) is int and kind is float:
        return float(value)
    if type(value) is float and kind is int and value.is_integer():  # 1e6 tokens
        return int(value)
    if isinstance(value, str) and kind is Path:
        return Path(value)
    raise ValueError(f"{place} must be {_describe(kind)}, got {value!r}.{_remedy(kind, value)}")


def _convert_text(kind: Any, text: _Text, place: str) -> Any:
    """`null` and 3 are parsed as YAML if the field accepts the result, and are text otherwise."""
    parsed = str(text) if kind is str else text.parsed()
    try:
        return _convert(kind, parsed, place)
    except ValueError:
        if isinstance(parsed, bool | int | float | None):
            with contextlib.suppress(ValueError):
                return _convert(kind, str(text), place)
        raise


def _convert_union(kinds: tuple[Any, ...], value: Any, place: str) -> Any:
    """The first member that fits. If only one has the value's shape, its error is the most useful one."""
    kinds = _of_same_shape(kinds, value) or kinds
    if len(kinds) == 1:
        return _convert(kinds[0], value, place)
    for kind in kinds:
        with contextlib.suppress(ValueError):
            return _convert(kind, value, place)
    hint = nearest(value, [c for kind in kinds for c in _choices(kind) if isinstance(c, str)])
    remedy = hint or _remedy(kinds[0], value)
    raise ValueError(f"{place} must be {' or '.join(map(_describe, kinds))}, got {value!r}.{remedy}")


def _of_same_shape(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if isinstance(value, Mapping):
        unknown = {k: len(value.keys() - _fields(k).keys()) for k in kinds if dataclasses.is_dataclass(k)}
        unknown |= dict.fromkeys((k for k in kinds if get_origin(k) is dict), 0)
        return tuple(k for k, count in unknown.items() if count == min(unknown.values()))
    if isinstance(value, tuple | list):
        return tuple(k for k in kinds if get_origin(k) in (tuple, list))
    return tuple(k for k in kinds if k is type(value))


def _choices(kind: Any) -> list[Any]:
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [member.value for member in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []


def _describe(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if choices := _choices(kind):
        return ("one of " if len(choices) > 1 else "") + ", ".join(map(repr, choices))
    if origin in (Union, UnionType):
        return " or ".join(map(_describe, args))
    if origin is tuple and args[-1] is not Ellipsis:
        return f"a list [{', '.join(map(_describe, args))}]"
    if origin in (tuple, list):
        return f"a list [...] in which each is {_describe(args[0])}"
    if origin is dict or dataclasses.is_dataclass(kind):
        return "a mapping of keys to values"
    return NAMES.get(kind, str(kind))


def _remedy(kind: Any, value: Any) -> str:
    """What to write in place of a value that is not of a kind, to append to an error message."""
    if choices := _choices(kind):
        near = nearest(value, [choice for choice in choices if isinstance(choice, str)])
        return near or (" Choose one of them." if len(choices) > 1 else f" Write {choices[0]!r}.")
    origin = get_origin(kind) or kind
    if origin in (tuple, list):
        return " Write it in brackets, as in [a, b]."
    if origin is dict or dataclasses.is_dataclass(kind):
        return " Write it as in {key: value}."
    return f" {_REMEDIES.get(kind, 'Correct it.')}"


def _places_of(path: str, tree: Mapping[str, Any], place: str = "") -> list[str]:
    """Dotted names of deeper entries that end in `path`."""
    found: list[str] = []
    for key, value in tree.items():
        name = f"{place}{key}"
        if place and f".{name}".endswith(f".{path}"):
            found.append(repr(name))
        elif isinstance(value, Mapping):
            found += _places_of(path, cast("Mapping[str, Any]", value), f"{name}.")
    return found


def _put(tree: Any, keys: list[str], value: Any, place: str) -> None:
    for depth, key in enumerate(keys):
        at: Any = key
        if isinstance(tree, list):
            if not key.isdigit() or int(key) >= len(tree):
                raise ValueError(f"{place}: {key!r} must be a position from 0 to {len(tree) - 1}.")
            at = int(key)
        elif not isinstance(tree, dict):
            outer = ".".join(keys[:depth])
            raise ValueError(f"{place}: {outer} is {tree!r}, which holds no keys. Set {outer} itself.")
        if depth == len(keys) - 1:
            tree[at] = value
        elif isinstance(tree, dict) and tree.get(at) is None:
            tree[at] = {}
        tree = tree[at]
