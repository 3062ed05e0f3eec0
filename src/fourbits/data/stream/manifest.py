"""The manifest of a prepared folder: the names, counts and hashes of its token files."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fourbits.data.stream.token_file import TokenFile, bin_and_idx
from fourbits.data.whole_file import file_sha256

FORMAT = "fourbits-data"
VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")

# Opening must be fast for files of any size: it compares this many evenly spaced blocks of each file.
_BLOCKS, _BLOCK_BYTES = 64, 1 << 16


def split_prefix(prefix: Path, name: str) -> Path:
    """The prefix of one split of a source: PREFIX.train or PREFIX.validation."""
    return prefix.with_name(f"{prefix.name}.{name}")


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
    missing = [key for key in ("request", "tokenizer", "sources") if not isinstance(manifest.get(key), dict)]
    if missing:
        raise ValueError(f"{path}: damaged: {missing[0]!r} is missing; prepare the data again.")
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
