"""Token files in Megatron-LM's format: PREFIX.bin holds the tokens, PREFIX.idx locates the documents.

    .bin   the tokens of all documents, concatenated, little endian
    .idx   "MMIDIDX\\0\\0"   9 bytes
           version         uint64, 1
           token type      uint8: 8 = uint16, 4 = int32
           sequences       uint64, S
           documents       uint64, D + 1
           lengths         int32  [S]      tokens in each sequence
           pointers        int64  [S]      byte offset of each sequence in .bin
           document index  int64  [D + 1]  first sequence of each document; 0 first, S last

We write one sequence per document. The format has no code for uint32: tokens that need more than 16 bits are
stored as int32, which has the same bytes for every token below 2**31. Opening a file reads its header and
checks that the sizes agree; tokens are memory-mapped, never loaded.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
ID_TYPES: dict[int, np.dtype] = {8: np.dtype("<u2"), 4: np.dtype("<i4")}
MAX_UINT16_VOCABULARY = 65_500  # Megatron's threshold, so that both choose the same type

_SCANNED_TOKENS = 1 << 24

Tokens = npt.NDArray[np.unsignedinteger | np.signedinteger]


def id_type(vocabulary_size: int) -> np.dtype:
    """The dtype for tokens below `vocabulary_size`: uint16 below 65,500, else int32."""
    return ID_TYPES[8] if vocabulary_size < MAX_UINT16_VOCABULARY else ID_TYPES[4]


class TokenFile:
    """A token file opened for reading, given its prefix without .bin or .idx.

    tokens: all tokens of the file, [num_tokens], memory-mapped.
    """

    def __init__(self, prefix: Path | str) -> None:
        """Raises ValueError if a file of the pair is missing, truncated, empty or of another format."""
        self.prefix = Path(prefix)
        bin_path, idx_path = bin_and_idx(self.prefix)
        index = _map_bytes(idx_path)
        if len(index) < HEADER.size or bytes(index[: len(MAGIC)]) != MAGIC:
            raise ValueError(f"{idx_path}: not a token index: it must begin with MMIDIDX and a header.")
        _, version, code, num_sequences, num_boundaries = HEADER.unpack(bytes(index[: HEADER.size]))
        if version != VERSION:
            raise ValueError(
                f"{idx_path}: version must be {VERSION}, got {version}. Write it again in Megatron's "
                "format, or with `fourbits data prepare`."
            )
        if code not in ID_TYPES:
            raise ValueError(
                f"{idx_path}: tokens must be uint16 (code 8) or int32 (code 4), got code "
                f"{code}. Convert them to one of the two."
            )
        expected = HEADER.size + 12 * num_sequences + 8 * num_boundaries
        # The index may end with one mode byte per sequence.
        if len(index) not in (expected, expected + num_sequences):
            raise ValueError(
                f"{idx_path}: truncated, or of another format: {expected} bytes expected, {len(index)} found."
            )
        self.dtype = ID_TYPES[code]
        at_pointers = HEADER.size + 4 * num_sequences
        at_documents = at_pointers + 8 * num_sequences
        self._lengths = index[HEADER.size : at_pointers].view("<i4")
        self._pointers = index[at_pointers:at_documents].view("<i8")
        self._documents = index[at_documents : at_documents + 8 * num_boundaries].view("<i8")
        self._bin_path, self._stamp = bin_path, _stamp(bin_path)
        self.tokens: Tokens = _map_tokens(bin_path, self.dtype)
        self._mapping = _mapping_of(self.tokens)
        self._check_sizes(bin_path, idx_path, self._lengths)

    def _check_sizes(self, bin_path: Path, idx_path: Path, lengths: npt.NDArray[np.int32]) -> None:
        total = int(lengths.sum(dtype=np.int64))
        if total != len(self.tokens):
            raise ValueError(
                f"{bin_path}: {len(self.tokens)} tokens found, {idx_path.name} lists {total}: "
                f"one of the two is truncated or belongs to another file."
            )
        ends_match = int(self._pointers[-1]) + int(lengths[-1]) * self.dtype.itemsize == self.tokens.nbytes
        if int(self._pointers[0]) != 0 or not ends_match:
            raise ValueError(
                f"{idx_path}: its pointers do not tile {bin_path.name}; it belongs to another file."
            )
        if len(self._documents) < 2 or self._documents[0] != 0 or self._documents[-1] != len(lengths):
            raise ValueError(f"{idx_path}: its document index does not cover its {len(lengths)} sequences.")

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including end tokens."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self._documents) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens per document, including end tokens. int64 [num_documents]."""
        return np.diff(self._starts())

    def document(self, number: int) -> Tokens:
        """The tokens of one document, including its end token."""
        if not 0 <= number < self.num_documents:
            raise ValueError(
                f"{self.prefix}: document must be in [0, {self.num_documents}), got {number}. Pass the "
                "number of a document that it has."
            )
        first, last = self._documents[number], self._documents[number + 1]
        end = self._pointers[last] // self.dtype.itemsize if last < len(self._pointers) else self.num_tokens
        return self.tokens[self._pointers[first] // self.dtype.itemsize : end]

    def document_at(self, position: int) -> int:
        """The number of the document that contains the token at a position."""
        if not 0 <= position < self.num_tokens:
            raise ValueError(
                f"{self.prefix}: position must be in [0, {self.num_tokens}), got {position}. Pass the "
                "position of a token that it has."
            )
        sequence = int(np.searchsorted(self._pointers, position * self.dtype.itemsize, side="right")) - 1
        return int(np.searchsorted(self._documents, sequence, side="right")) - 1

    def will_need(self, first: int, count: int) -> None:
        """Ask the system to read these tokens ahead from disk; no effect in memory or on Windows."""
        if not hasattr(mmap, "MADV_WILLNEED"):
            return
        begin = first * self.dtype.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapping.madvise(mmap.MADV_WILLNEED, begin, (first + count) * self.dtype.itemsize - begin)

    def check_index(self) -> None:
        """Read the whole index. Raises ValueError if its sequences or documents overlap or leave gaps."""
        wrong = {
            "a length": self._lengths < 0,
            "a pointer": np.diff(self._pointers) != self._lengths[:-1].astype(np.int64) * self.dtype.itemsize,
            "the document index": np.diff(self._documents) < 0,
        }
        for what, where in wrong.items():
            if where.any():
                raise ValueError(
                    f"{self.prefix}.idx: {what} is wrong at sequence {np.flatnonzero(where)[0]}: damaged, or "
                    f"written in another format."
                )

    def check_tokens(self, vocab_size: int) -> None:
        """Read every token. Raises ValueError with the first one outside the vocabulary."""
        for first in range(0, self.num_tokens, _SCANNED_TOKENS):
            part = self.tokens[first : first + _SCANNED_TOKENS]
            if int(part.max()) >= vocab_size or int(part.min()) < 0:
                position = first + int(np.flatnonzero((part < 0) | (part >= vocab_size))[0])
                raise ValueError(
                    f"{self.prefix}.bin: token {self.tokens[position]} at position {position} is outside the "
                    f"vocabulary of {vocab_size}. The file was written with another tokenizer."
                )

    def check_unchanged(self) -> None:
        """Raises ValueError if the .bin file was replaced, truncated or written to since it was opened."""
        if _stamp(self._bin_path) != self._stamp:
            raise ValueError(
                f"{self._bin_path}: changed while it was read; samples read earlier were correct. Restore "
                f"the file, or prepare the data again, and resume the run."
            )

    def _starts(self) -> npt.NDArray[np.int64]:
        pointers = np.append(self._pointers, np.int64(self.tokens.nbytes))
        return pointers[self._documents] // self.dtype.itemsize


def bin_and_idx(prefix: Path) -> tuple[Path, Path]:
    """The two paths of a token file. A prefix may contain dots, so suffixes are appended, not replaced."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Inode, size and modification time of the file at a path; None if there is none."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _map_bytes(path: Path) -> npt.NDArray[np.uint8]:
    if not path.is_file():
        raise ValueError(f"{path}: no such token file.")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty.")
    # The plain ndarray view slices several times faster than the memmap subclass.
    return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)


def _mapping_of(array: npt.NDArray[Any]) -> mmap.mmap:
    """The mmap object that a view of a mapped file is based on."""
    base: Any = array
    while not isinstance(base, mmap.mmap):
        base = base.base
    return base


def _map_tokens(path: Path, dtype: np.dtype) -> Tokens:
    raw = _map_bytes(path)
    if len(raw) % dtype.itemsize:
        raise ValueError(f"{path}: truncated: {len(raw)} bytes is not a whole number of {dtype} tokens.")
    return raw.view(dtype)
