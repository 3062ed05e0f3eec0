"""YAML input and output with the core scalars of YAML 1.2 and without duplicate keys.

PyYAML follows YAML 1.1, where 3e-4 is text, `no` is false and 1:30 is ninety.
"""

import re
from pathlib import Path
from types import NoneType
from typing import Any

import yaml


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML mapping. Raises ValueError naming file and line, OSError if it cannot be opened."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: must be UTF-8 text, byte {error.start} is not. Pass a .yaml file."
        ) from error
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        found = {NoneType: "an empty file", list: "a list"}.get(type(tree), f"only {tree!r:.40}")
        raise ValueError(
            f"{path}: must hold a mapping of keys to values, got {found}. Write it as lines of `key: value`."
        )
    return tree


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text. Raises ValueError that starts with `where` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(
            f"{where}, line {line}: not valid YAML: {error.problem}. Correct the line."
        ) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(
            f"{where}: not valid YAML: {' '.join(str(error).split())}. Correct the text."
        ) from error


def dump_yaml(tree: Any) -> str:
    """YAML text of plain dicts, lists and scalars, in order; `load_yaml` reads it back unchanged."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=100)


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                problem = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes strings that the loader would not read as text; writes a list of scalars on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_list(self, data: list[Any]) -> yaml.Node:
        flat = not any(isinstance(item, dict | list) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


_SCALARS: tuple[tuple[str, str, list[str]], ...] = (
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
)

_Dumper.add_representer(list, _Dumper.represent_list)
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
