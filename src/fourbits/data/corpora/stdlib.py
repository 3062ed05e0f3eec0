"""A corpus that every machine has: the standard library of the running Python.

Two sources. "code": the library's modules, without its tests. "prose": the language reference that `help()`
shows, the docstrings of the same modules, and the text files that ship with them. Docstrings therefore appear
twice, also inside code; all texts of one module share a split key, so no validation docstring is in training.
The files differ between Python versions: hashes are recorded, and losses are not comparable across versions.
"""

import ast
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fourbits.data.corpora.document import Document, Source
from fourbits.data.corpora.text_files import read_text

LICENSE = "PSF-2.0"
_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_TOPICS = "pydoc_data/topics.py"
_SHORTEST_DOCSTRING = 80


def stdlib_sources() -> list[Source]:
    """The sources "code" and "prose" of the running interpreter's standard library."""
    root = Path(sysconfig.get_path("stdlib")).resolve()
    names = list(_walk(root))
    modules = tuple(p for p in names if p.suffix == ".py" and p.relative_to(root).as_posix() != _TOPICS)
    if not modules:
        raise ValueError(
            f"{root}: the standard library of this Python has no source files; pass your own text instead."
        )
    texts = tuple(path for path in names if path.suffix in (".txt", ".rst"))
    topics = tuple(path for path in [root / _TOPICS] if path.is_file())
    return [
        Source("code", modules, lambda: _code(root, modules), LICENSE),
        Source(
            "prose", (*topics, *texts, *modules), lambda: iter(_prose(root, topics, texts, modules)), LICENSE
        ),
    ]


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in _EXCLUDED:
            yield from _walk(path)
        elif path.is_file():
            yield path


def _code(root: Path, modules: tuple[Path, ...]) -> Iterator[Document]:
    for path in modules:
        if (text := _module_text(path)).strip():
            name = path.relative_to(root).as_posix()
            yield Document(name, text, split_key=name)


@cache
def _prose(
    root: Path, topics: tuple[Path, ...], texts: tuple[Path, ...], modules: tuple[Path, ...]
) -> tuple[Document, ...]:
    """Cached: parsing the library takes seconds, and its text only 2 MB."""
    return tuple(_read_prose(root, topics, texts, modules))


def _read_prose(
    root: Path, topics: tuple[Path, ...], texts: tuple[Path, ...], modules: tuple[Path, ...]
) -> Iterator[Document]:
    for path in topics:
        for topic, text in sorted(_string_table(_module_text(path)).items()):
            yield Document(f"topic {topic}", text, split_key=f"topic {topic}")
    for path in texts:
        if (text := read_text(path)).strip():
            name = path.relative_to(root).as_posix()
            yield Document(name, text, split_key=name)
    for path in modules:
        if docstrings := _docstrings(_module_text(path)):
            name = path.relative_to(root).as_posix()
            yield Document(f"docstrings of {name}", "\n\n".join(docstrings), split_key=name)


def _module_text(path: Path) -> str:
    # A module may declare an encoding other than UTF-8; tokenize.open honours the declaration.
    with tokenize.open(path) as file:
        return file.read()


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's invalid escapes are not the user's concern
        return ast.parse(text)


def _docstrings(text: str) -> list[str]:
    return [docstring for docstring in _all_docstrings(_parse(text)) if len(docstring) >= _SHORTEST_DOCSTRING]


def _all_docstrings(node: ast.AST) -> Iterator[str]:
    """Yield docstrings in source order. Visits statements only: most nodes are expressions."""
    documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    if documented and (docstring := ast.get_docstring(node)):
        yield docstring
    for block in ("body", "handlers", "orelse", "finalbody"):
        children = getattr(node, block, ())
        for child in children if isinstance(children, list) else ():
            yield from _all_docstrings(child)


def _string_table(text: str) -> dict[str, str]:
    """The first dictionary of string literals in a module's source, which is not executed."""
    for node in _parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return ast.literal_eval(node.value)
    return {}
