"""Documents and sources: what every reader yields, whatever kind of file it reads.

Documents come in a fixed order (by path, then by position in the file), so everything built on them is
deterministic. A source has a fingerprint, a hash of paths, sizes and modification times, which shows whether
the prepared text is still current without reading it.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

# progress(name, bytes done, total bytes)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Document:
    """One text, or a piece of one that is too long to hold in memory.

    split_key: documents with equal keys fall on the same side of the validation split.
    more: the reader's next document is the next piece of this one.
    tokens: the tokens, if the document is already encoded.
    position: bytes of the source's files read so far, for progress; None if unknown.
    """

    name: str
    text: str
    split_key: str
    more: bool = False
    tokens: npt.NDArray[np.integer] | None = None
    position: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SkippedFiles:
    """Files of one extension that a source does not read."""

    files: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Source:
    """A named stream of documents.

    read: starts again at the first document with each call.
    licence: an SPDX identifier if known.
    identity: distinguishes sources where their files do not, for example a revision on the Hub.
    is_tokenized: the documents hold tokens instead of text.
    skipped: files of the same folder that are not read, by extension.
    """

    name: str
    files: tuple[Path, ...]
    read: Callable[[], Iterator[Document]]
    licence: str = ""
    identity: str = ""
    is_tokenized: bool = False
    skipped: Mapping[str, SkippedFiles] = field(default_factory=dict[str, SkippedFiles])

    @property
    def num_bytes(self) -> int:
        """Total size of the files, for progress and rates; 0 if there are none."""
        return sum(path.stat().st_size for path in self.files)

    def fingerprint(self) -> str:
        """SHA-256 of the path, size and modification time of every file."""
        digest = hashlib.sha256(os.fsencode(f"{self.name}{self.identity}"))
        for line in self.stamps().values():
            digest.update(os.fsencode(line))  # file names need not be UTF-8
        return digest.hexdigest()

    def stamps(self) -> dict[Path, str]:
        """Path, size and modification time of every file, one line each."""
        stats = {path: path.stat() for path in self.files}
        return {path: f"\n{path}\t{stat.st_size}\t{stat.st_mtime_ns}" for path, stat in stats.items()}


def key_of(text: str) -> str:
    """The default split key: a hash of the text, so that no copy of a validation text is trained on."""
    return hashlib.sha256(text.encode()).hexdigest()
