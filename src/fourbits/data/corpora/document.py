"""Documents and sources: what a reader yields, whatever kind of file it reads.

Documents come in a fixed order (by path, then by place in the file), so that everything built on them is
deterministic. A source also has a fingerprint: a hash of paths, sizes and modification times, which answers
"is this still what was prepared?" without reading the text.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

# progress(what, bytes done, bytes in all)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Document:
    """One text, or a piece of one that is too long to hold.

    split_key: documents with equal keys fall on the same side of the validation split. more: what the reader
    yields next is the next piece of this one. ids: what the text was encoded to already, without end token.
    position: bytes of the source's files read when this was ready, for progress; None if not known.
    """

    name: str
    text: str
    split_key: str
    more: bool = False
    ids: npt.NDArray[np.integer] | None = None
    position: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Source:
    """A named stream of documents. read() begins anew at each call; licence: an SPDX name if known.

    identity: what tells it from another where files do not. has_ids: its documents are ids, not text.
    """

    name: str
    files: tuple[Path, ...]
    read: Callable[[], Iterator[Document]]
    licence: str = ""
    identity: str = ""
    has_ids: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of the files, for progress and rates; 0 if there are none."""
        return sum(path.stat().st_size for path in self.files)

    def fingerprint(self) -> str:
        """SHA-256 over path, size and modification time of every file."""
        digest = hashlib.sha256(os.fsencode(f"{self.name}{self.identity}"))
        for line in self.stamps().values():
            digest.update(os.fsencode(line))  # of file names that are not UTF-8, too
        return digest.hexdigest()

    def stamps(self) -> dict[Path, str]:
        """Path, size and modification time of every file, as one line each."""
        stats = {path: path.stat() for path in self.files}
        return {path: f"\n{path}\t{stat.st_size}\t{stat.st_mtime_ns}" for path, stat in stats.items()}


def key_of(text: str) -> str:
    """The split key of a text that has none of its own: no copy of a validation text is trained on."""
    return hashlib.sha256(text.encode()).hexdigest()
