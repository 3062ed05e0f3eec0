"""Writes a pair of token files, document by document; the pair appears complete or not at all.

Until then, tokens go to PREFIX.bin.tmp and the lengths of finished documents to PREFIX.lengths.tmp, so memory
use does not grow. Publishing flushes both to disk, builds the index from the lengths, and renames .bin, then
.idx. With keep=True a failed writer leaves its files, to be resumed from a place that `flush` returned.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt

from fourbits.data.stream.token_file import HEADER, ID_TYPES, MAGIC, VERSION, bin_and_idx
from fourbits.data.whole_file import close, open_synced, sync, write

LONGEST_DOCUMENT = 2**31 - 1  # lengths are int32
_BUFFER = 1 << 20
_INDEX_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """A writer's progress: tokens written, an unfinished document's included, and documents finished."""

    tokens: int
    documents: int


class TokenFileWriter:
    """Writes a pair of token files. Use as a context manager.

    An exception inside the block, for example a full disk, leaves an earlier pair unchanged.
    """

    def __init__(
        self, prefix: Path | str, dtype: np.dtype, *, start: Place | None = None, keep: bool = False
    ) -> None:
        """Write PREFIX.bin and PREFIX.idx with tokens of type `dtype` (see `id_type`).

        start: resume the unfinished files of an earlier writer at this place; keep: leave them if the block
        fails. Raises ValueError if the unfinished files are missing or shorter than `start`.
        """
        codes = [code for code, known in ID_TYPES.items() if known == dtype]
        if not codes:
            raise ValueError(
                f"{prefix}: tokens must be uint16 or int32, got {dtype}. Convert the tokens to one of the "
                "two."
            )
        self.prefix, self.dtype, self._code, self._keep = Path(prefix), ID_TYPES[codes[0]], codes[0], keep
        self._bin_path, self._idx_path = (p.with_name(p.name + ".tmp") for p in bin_and_idx(self.prefix))
        self._lengths_path = self.prefix.with_name(self.prefix.name + ".lengths.tmp")
        self._can_be_negative = self.dtype.kind == "i"
        self.num_tokens, self.num_documents, self._open_length = 0, 0, 0
        if start is not None:
            self._truncate_to(start)
        mode = "wb" if start is None else "ab"
        self._bin: BinaryIO = self._bin_path.open(mode, buffering=_BUFFER)
        self._lengths: BinaryIO = self._lengths_path.open(mode, buffering=_BUFFER)

    def _truncate_to(self, start: Place) -> None:
        sizes = {self._bin_path: start.tokens * self.dtype.itemsize, self._lengths_path: start.documents * 4}
        for path, size in sizes.items():
            if not path.is_file() or path.stat().st_size < size:
                raise ValueError(
                    f"{path}: shorter than the {size} bytes recorded. Delete it and rerun the command."
                )
            os.truncate(path, size)
        finished = sum(int(part.sum(dtype=np.int64)) for part in self._length_parts())
        self.num_tokens, self.num_documents = start.tokens, start.documents
        self._open_length = start.tokens - finished

    def add(self, tokens: npt.ArrayLike) -> None:
        """Append one document, with its end token. tokens: integers [n], n >= 1, that fit the dtype."""
        self.extend(tokens)
        self.end_document()

    @property
    def in_document(self) -> bool:
        """Whether tokens were appended to a document that is not finished."""
        return self._open_length > 0

    def extend(self, tokens: npt.ArrayLike) -> None:
        """Append tokens [n], n >= 1, to the unfinished document."""
        part = np.asarray(tokens)
        if part.ndim != 1 or not len(part):
            raise ValueError(
                f"{self.prefix}: a document must be a non-empty list of tokens, got shape "
                f"{part.shape}. Skip empty documents."
            )
        if part.dtype != self.dtype or self._can_be_negative:
            self._check_fit(int(part.min()), int(part.max()))
        self._open_length += len(part)
        if self._open_length > LONGEST_DOCUMENT:
            raise ValueError(
                f"{self.prefix}: document {self.num_documents} has more than {LONGEST_DOCUMENT} tokens, "
                f"the limit of the index format. Split the text into several documents."
            )
        write(self._bin, part.astype(self.dtype, copy=False).tobytes())
        self.num_tokens += len(part)

    def _check_fit(self, low: int, high: int) -> None:
        if low < 0 or high > np.iinfo(self.dtype).max:
            raise ValueError(f"{self.prefix}: tokens {low} to {high} do not fit {self.dtype}.")

    def end_document(self) -> None:
        """Finish the document: the tokens appended since the last one."""
        write(self._lengths, self._open_length.to_bytes(4, "little"))
        self.num_documents, self._open_length = self.num_documents + 1, 0

    def flush(self) -> Place:
        """Flush everything to disk. Returns the place where a later writer can resume."""
        sync(self._bin)
        sync(self._lengths)
        return Place(self.num_tokens, self.num_documents)

    def __enter__(self) -> Self:
        """Return the open writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Publish the pair; if the block failed, remove the unfinished files unless keep is set."""
        try:
            if kind is None:
                self.publish(self.prefix)
        finally:
            self.close()
            if not self._keep:
                self.remove()

    def close(self) -> None:
        """Close the unfinished files without removing them."""
        for file in (self._bin, self._lengths):
            close(file)

    def remove(self) -> None:
        """Remove the unfinished files."""
        for path in (self._bin_path, self._idx_path, self._lengths_path):
            path.unlink(missing_ok=True)

    def publish(self, prefix: Path) -> None:
        """Finish the pair and rename it to PREFIX.bin and PREFIX.idx. Raises ValueError without documents."""
        if not self.num_documents:
            raise ValueError(f"{self.prefix}: a token file needs at least one document, got none. Write one.")
        self.flush()
        with open_synced(self._idx_path) as file:
            header = HEADER.pack(MAGIC, VERSION, self._code, self.num_documents, self.num_documents + 1)
            write(file, header)
            for lengths in self._length_parts():
                write(file, lengths.tobytes())
            before = 0
            for lengths in self._length_parts():
                ends = before + np.cumsum(lengths, dtype=np.int64)
                write(file, ((ends - lengths) * self.dtype.itemsize).astype("<i8").tobytes())
                before = int(ends[-1])
            for first in range(0, self.num_documents + 1, _INDEX_ROWS):
                last = min(first + _INDEX_ROWS, self.num_documents + 1)
                write(file, np.arange(first, last, dtype="<i8").tobytes())
        for source, target in zip((self._bin_path, self._idx_path), bin_and_idx(prefix), strict=True):
            source.replace(target)
        self.close()
        self._lengths_path.unlink()

    def _length_parts(self) -> Iterator[npt.NDArray[np.int32]]:
        with self._lengths_path.open("rb") as file:
            while raw := file.read(4 * _INDEX_ROWS):
                yield np.frombuffer(raw, dtype="<i4")
