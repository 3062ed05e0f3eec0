"""The manifest of a prepared folder: the names, counts and hashes of its token files."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fourbits.data.stream.token_file import TokenFile, bin_and_idx
from fourbits.data.whole_file import file_sha256, is_source_name, require

FORMAT = "fourbits-data"
VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")

# Opening must be fast for files of any size: it compares this many evenly spaced blocks of each file.
_BLOCKS, _BLOCK_BYTES = 64, 1 << 16

# What every reader of a manifest relies on, with its types.
_PARTS = {"request": dict, "tokenizer": dict, "sources": dict}
_TOKENIZER = {"sha256": str, "size": int, "vocab_size": int, "end_token": str, "end_id": int}
_SOURCE = {"licence": str, "documents": int, "text_bytes": int, **dict.fromkeys(SPLITS, dict)}
_SPLIT = {"documents": int, "tokens": int, "bin": dict, "idx": dict}
_FILE = {"bytes": int, "sha256": str, "sampled_sha256": str}


def split_prefix(prefix: Path, name: str) -> Path:
    """The prefix of one split of a source: PREFIX.train or PREFIX.validation."""
    return prefix.with_name(f"{prefix.name}.{name}")


def is_prepared(folder: Path) -> bool:
    """Whether a folder holds prepared data, complete or damaged; others write a manifest.json too."""
    path = folder / MANIFEST
    if not path.is_file():
        return False
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError:
        return (folder / "tokenizer.json").is_file()
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder. Raises ValueError if it is missing, damaged or of another format."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{folder}: not a prepared folder (no {MANIFEST}). Create one with fourbits data prepare."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path}: not a manifest of prepared data: its format must be {FORMAT!r}.")
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"{path}: version must be {VERSION}, got {manifest.get('version')}; prepare the data again."
        )
    require(manifest, _PARTS, path)
    require(manifest["tokenizer"], _TOKENIZER, path, "tokenizer")
    if not manifest["sources"]:
        raise ValueError(f"{path}: damaged: 'sources' is empty; prepare the data again.")
    for name, record in manifest["sources"].items():
        if not is_source_name(name):
            raise ValueError(f"{path}: damaged: {name!r} cannot be the name of a source in this folder.")
        require({name: record}, {name: dict}, path, "sources")
        require(record, _SOURCE, path, f"sources.{name}")
        for split in SPLITS:
            require(record[split], _SPLIT, path, f"sources.{name}.{split}")
            for file in ("bin", "idx"):
                require(record[split][file], _FILE, path, f"sources.{name}.{split}.{file}")
    return manifest


def describe_files(prefix: Path) -> dict[str, Any]:
    """Counts and hashes of a token file, as the manifest records them."""
    file = TokenFile(prefix)
    record: dict[str, Any] = {"documents": file.num_documents, "tokens": file.num_tokens}
    for path in bin_and_idx(prefix):
        record[path.suffix[1:]] = {
            "bytes": path.stat().st_size,
            "sha256": file_sha256(path),
            "sampled_sha256": sampled_sha256(path),
        }
    return record


def check_counts(file: TokenFile, record: Mapping[str, Any], path: Path, place: str) -> None:
    """Raises ValueError that names `place` unless this entry of a manifest has the token file's counts."""
    for key, counted in (("documents", file.num_documents), ("tokens", file.num_tokens)):
        if record[key] != counted:
            raise ValueError(
                f"{path}: damaged: '{place}.{key}' is {record[key]}, the token file has {counted}; "
                "prepare the data again."
            )


def check_files(prefix: Path, record: Mapping[str, Any], *, whole: bool) -> None:
    """Raises ValueError if a token file differs from its record. whole: compare every byte, not a sample."""
    for path in bin_and_idx(prefix):
        if not path.is_file():
            raise ValueError(f"{path}: missing; prepare the data again.")
        recorded = record[path.suffix[1:]]
        size = path.stat().st_size
        if size != recorded["bytes"]:
            raise ValueError(
                f"{path}: {size} bytes, {MANIFEST} records {recorded['bytes']}: truncated or replaced."
            )
        if whole:
            is_same = file_sha256(path) == recorded["sha256"]
        else:
            is_same = sampled_sha256(path) == recorded["sampled_sha256"]
        if not is_same:
            raise ValueError(
                f"{path}: its content differs from what {MANIFEST} records; prepare the data again."
            )


def sampled_sha256(path: Path) -> str:
    """SHA-256 of a file's size and up to 64 evenly spaced 64 KiB blocks: the whole file up to 4 MiB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    stride = max(_BLOCK_BYTES, (size - _BLOCK_BYTES) // (_BLOCKS - 1)) if size else _BLOCK_BYTES
    with path.open("rb") as file:
        for number in range(_BLOCKS):
            file.seek(number * stride)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
