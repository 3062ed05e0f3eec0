"""A corpus as a folder: one SOURCE.jsonl per source, and corpus.json with licences, counts and hashes.

A corpus that takes time to build is written to such a folder, so that it can be read, copied and prepared
again without a rebuild. corpus.json is written last; a folder without it is incomplete.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fourbits.data.corpora.document import Progress, Source
from fourbits.data.corpora.read_files import read_files
from fourbits.data.whole_file import is_source_name, open_synced, require, write, write_json

CORPUS_FILE = "corpus.json"
FORMAT = "fourbits-corpus"
VERSION = 1
_REMEDY = "build the corpus again"


def write_corpus(
    sources: Sequence[Source],
    out: Path | str,
    progress: Progress | None = None,
    extra: Callable[[], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """Write the documents of `sources` into the folder `out`. Returns the content of corpus.json.

    extra: called after the last source; returns further entries for corpus.json.
    """
    out = Path(out)
    if (out / CORPUS_FILE).exists():
        raise ValueError(f"{out}: already holds a corpus; choose another folder.")
    out.mkdir(parents=True, exist_ok=True)
    records = {
        source.name: _write_source(source, out / f"{source.name}.jsonl", progress) for source in sources
    }
    corpus = {"format": FORMAT, "version": VERSION, "sources": records, **extra()}
    write_json(out / CORPUS_FILE, corpus)
    return corpus


def is_corpus(path: Path | str) -> bool:
    """Whether a path is a folder that `write_corpus` completed."""
    return (Path(path) / CORPUS_FILE).is_file()


def corpus_sources(folder: Path | str) -> list[Source]:
    """The sources of a corpus folder. Raises ValueError if it is damaged or a file has changed size."""
    folder = Path(folder).resolve()
    path = folder / CORPUS_FILE
    try:
        corpus = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}.") from error
    if not isinstance(corpus, dict) or (corpus.get("format"), corpus.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{path}: its format must be {FORMAT!r}, version {VERSION}.")
    require(corpus, {"sources": dict}, path, remedy=_REMEDY)
    for name, record in corpus["sources"].items():
        if not is_source_name(name):
            raise ValueError(f"{path}: damaged: {name!r} cannot be the name of a source in this folder.")
        require({name: record}, {name: dict}, path, "sources", _REMEDY)
        require(record, {"bytes": int, "licence": str}, path, f"sources.{name}", _REMEDY)
    return [_open_source(folder, name, record) for name, record in corpus["sources"].items()]


def _open_source(folder: Path, name: str, record: dict[str, Any]) -> Source:
    path = folder / f"{name}.jsonl"
    size = path.stat().st_size if path.is_file() else 0
    if size != record["bytes"]:
        raise ValueError(
            f"{path}: {size} bytes, {CORPUS_FILE} records {record['bytes']}: truncated or replaced."
        )
    return Source(name, (path,), lambda: read_files((path,), folder), record["licence"])


def _write_source(source: Source, path: Path, progress: Progress | None) -> dict[str, Any]:
    digest, documents, size, total = hashlib.sha256(), 0, 0, source.num_bytes
    temporary = path.with_name(path.name + ".tmp")
    with open_synced(temporary) as file:
        for document in source.read():
            record = {"name": document.name, "split_key": document.split_key, "text": document.text}
            line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
            write(file, line)
            digest.update(line)
            documents, size = documents + 1, size + len(line)
            if progress and document.position is not None:
                progress(source.name, min(document.position, total - 1), total)
    temporary.replace(path)
    if progress:
        progress(source.name, total, total)
    return {"licence": source.licence, "documents": documents, "bytes": size, "sha256": digest.hexdigest()}
