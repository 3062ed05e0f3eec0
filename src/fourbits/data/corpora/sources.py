"""Turns what the user names into sources: a file, a folder, NAME=PATH, a token file, a dataset."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fourbits.data.corpora.document import Document, Source
from fourbits.data.corpora.tables import HUB, hub_dataset, is_saved_dataset, read_parquet, saved_dataset
from fourbits.data.corpora.text_files import TEXT_FIELD, is_text_file, read_files
from fourbits.data.stream.token_file import TokenFile, bin_and_idx

PARQUET = ".parquet"
KINDS = ".txt, .md, source code, .jsonl, .parquet (text also as .gz or .zst), or the .idx of a token file"


def file_sources(paths: Sequence[str], text_field: str = TEXT_FIELD) -> list[Source]:
    """One source per path, named by "NAME=PATH", or else after the file or folder.

    text_field: the JSON field or table column that holds the text. Raises ValueError for a missing path, a
    folder without text files, or a path to an empty file.
    """
    return [_named(argument, text_field) for argument in paths]


def _named(argument: str, text_field: str) -> Source:
    name, equals, rest = argument.partition("=")
    if not equals or not name.replace("-", "_").isidentifier():
        name, rest = "", argument
    if rest.startswith(HUB):
        return hub_dataset(rest, text_field, name)
    if not rest:
        raise ValueError("a path is empty; pass a file or a folder, or . for the current one.")
    path = Path(os.path.realpath(rest))  # in a loop of symbolic links this is one of them
    if path.is_dir():
        name = name or path.name
        if (path / "dataset_dict.json").is_file():
            raise ValueError(
                f"{path}: a dataset with several splits; pass the folder of one split, such as {path}/train."
            )
        return (
            saved_dataset(name, path, text_field)
            if is_saved_dataset(path)
            else _folder(name, path, text_field)
        )
    return _file(name or _stem(path), path, text_field)


def _folder(name: str, path: Path, text_field: str) -> Source:
    found = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
    files = tuple(p for p in found if is_text_file(p) or p.suffix == PARQUET)
    if not files:
        raise ValueError(f"{path}: this folder has no text files. Supported: {KINDS}.")
    if not any(file.stat().st_size for file in files):
        raise ValueError(f"{path}: all {len(files)} text files in this folder are empty.")
    return Source(name, files, _reader(files, path, text_field))


def _file(name: str, path: Path, text_field: str) -> Source:
    if path.suffix in (".idx", ".bin"):
        return _token_source(name, path.with_suffix(""))
    try:
        path.stat()
    except OSError as error:
        raise ValueError(f"{path}: cannot be opened: {error.strerror}.") from error
    if not path.is_file():
        raise ValueError(f"{path}: must be a file or a folder; save its content to a file.")
    if not is_text_file(path) and path.suffix != PARQUET:
        raise ValueError(f"{path}: the file type must be {KINDS}; got {path.suffix!r}.")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty.")
    return Source(name, (path,), _reader((path,), path.parent, text_field))


def _reader(files: tuple[Path, ...], root: Path, text_field: str) -> Callable[[], Iterator[Document]]:
    texts = tuple(path for path in files if path.suffix != PARQUET)
    tables = tuple(path for path in files if path.suffix == PARQUET)

    def read() -> Iterator[Document]:
        yield from read_files(texts, root, text_field)
        before = sum(path.stat().st_size for path in texts)
        for document in read_parquet(tables, root, text_field):
            yield replace(document, position=before + (document.position or 0))

    return read


def _token_source(name: str, prefix: Path) -> Source:
    """The documents of an existing token file, which are checked and split but not encoded again."""
    TokenFile(prefix).check_index()  # fail now, not after other sources have been prepared

    def read() -> Iterator[Document]:
        file = TokenFile(prefix)
        for number in range(file.num_documents):
            tokens = file.document(number)
            label = f"{prefix.name}:{number}"
            yield Document(label, "", label, tokens=tokens)

    return Source(name, bin_and_idx(prefix), read, is_tokenized=True)


def _stem(path: Path) -> str:
    """The name without its suffix, and without .gz or .zst after that."""
    return Path(path.stem).stem if path.suffix in (".gz", ".zst") else path.stem


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
