"""Turns what the user names into sources: a file, a folder, NAME=PATH, a token file, a dataset."""

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fourbits.data.corpora.document import Document, Source
from fourbits.data.corpora.file_kinds import SUPPORTED, compression_of, kind_of, stem_of
from fourbits.data.corpora.folder import CACHES, HIDDEN, find_files, listed
from fourbits.data.corpora.read_files import TEXT_FIELD, problem_of, read_files
from fourbits.data.corpora.tables import HUB, hub_dataset, is_saved_dataset, saved_dataset
from fourbits.data.stream.token_file import TokenFile, bin_and_idx
from fourbits.data.whole_file import system_remedy


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """How files become documents.

    text_field: the JSON field or table column that holds the text; allow_skipped: read a folder although most
    of its bytes are in files that are not read; follow_links: read links to files inside folders.
    """

    text_field: str = TEXT_FIELD
    allow_skipped: bool = False
    follow_links: bool = False


DEFAULT = ReadOptions()


def file_sources(paths: Sequence[str], options: ReadOptions = DEFAULT) -> list[Source]:
    """One source per path, named by "NAME=PATH", or else after the file or folder.

    Warns about files in a folder that are skipped. Raises ValueError for a missing path, an empty file,
    or a folder without text files or with mostly other files.
    """
    return [_named(argument, options) for argument in paths]


def _named(argument: str, options: ReadOptions) -> Source:
    name, equals, rest = argument.partition("=")
    if not equals or not name.replace("-", "_").isidentifier():
        name, rest = "", argument
    if rest.startswith(HUB):
        return hub_dataset(rest, options.text_field, name)
    if not rest:
        raise ValueError("a path is empty; pass a file or a folder, or . for the current one.")
    path = Path(os.path.realpath(rest))  # in a loop of symbolic links this is one of them
    if path.is_dir():
        name = name or path.name
        if (path / "dataset_dict.json").is_file():
            raise ValueError(
                f"{path}: a dataset with several splits; pass the folder of one split, such as {path}/train."
            )
        if is_saved_dataset(path):
            return saved_dataset(name, path, options.text_field)
        return _folder(name, path, options)
    # A link to a file is not resolved, because a cache of the Hub links to files that are named by hash.
    return _file(name, Path(os.path.realpath(os.path.dirname(rest)), os.path.basename(rest)), options)


def _folder(name: str, path: Path, options: ReadOptions) -> Source:
    found = find_files(
        path, options.text_field, follow_links=options.follow_links, allow_skipped=options.allow_skipped
    )
    if found.skipped.keys() - {HIDDEN, CACHES}:
        warnings.warn(f"{path}: skipped {listed(found.skipped)}.", stacklevel=5)
    files = tuple(found.read)
    return Source(
        name,
        files,
        lambda: read_files(files, path, options.text_field),
        skipped=found.skipped,
    )


def _file(name: str, path: Path, options: ReadOptions) -> Source:
    """The source of a file that the user names; its own name gives its kind, even if it is a link."""
    name = name or stem_of(path)
    if path.suffix.lower() in (".idx", ".bin"):
        beside = all(each.is_file() for each in bin_and_idx(path.with_suffix("")))
        return _token_source(name, (path if beside else path.resolve()).with_suffix(""))
    try:
        path.stat()
    except OSError as error:
        reason = f"{error.strerror}{system_remedy(error.errno)}"
        raise ValueError(f"{path}: cannot be opened: {reason}.") from error
    if not path.is_file():
        raise ValueError(f"{path}: must be a file or a folder; save its content to a file.")
    if kind_of(path) is None:
        raise ValueError(
            f"{path}: the file type must be {SUPPORTED}; got {path.suffix!r}. Save its text as .txt."
        )
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty. Remove it from the paths.")
    if problem := problem_of(path, options.text_field):
        raise ValueError(f"{path}: {problem}. {_remedy(path, options.text_field)}")
    return Source(name, (path,), lambda: read_files((path,), path.parent, options.text_field))


def _remedy(path: Path, text_field: str) -> str:
    """What a .csv or .json file must hold, and how to make it so."""
    where = f"with the text in {text_field!r} or what --text-field (data.text_field) names"
    if kind_of(path) == "csv":
        return f"A .csv file must have a header, {where}."
    array = {
        "": f"jq -c '.[]' {path.name}",
        ".gz": f"zcat {path.name} | jq -c '.[]'",
        ".zst": f"zstdcat {path.name} | jq -c '.[]'",
    }[compression_of(path)]
    return (
        f"A .json file must have one object per line, {where}. To convert an array: {array} > "
        f"{stem_of(path)}.jsonl"
    )


def _token_source(name: str, prefix: Path) -> Source:
    """The documents of an existing token file, which are checked and split but not encoded again."""
    TokenFile(prefix).check_index()  # fail now, not after other sources have been prepared

    def read() -> Iterator[Document]:
        file = TokenFile(prefix)
        for number in range(file.num_documents):
            tokens = file.document(number)
            label = f"{prefix.name}:{number}"
            yield Document(label, "", "", tokens=tokens)  # its tokens identify it, once it has no end token

    return Source(name, bin_and_idx(prefix), read, identity="\nsplit by tokens", is_tokenized=True)
