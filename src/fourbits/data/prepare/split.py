"""Training and validation text of a source: each document on one side, by hash, and neither side empty.

Documents go to their side as they come. If one side is empty at the end, the other file is read again, and
the documents of lowest hash become the validation text; a source of one document gives its tail.
"""

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fourbits.data.prepare.token_writer import Place, TokenFileWriter
from fourbits.data.stream.manifest import SPLITS, split_prefix
from fourbits.data.stream.token_file import TokenFile, bin_and_idx

_COPY_IDS = 1 << 22


def fraction_of(split_key: str, seed: int) -> float:
    """A number in [0, 1) that is a hash of the seed and a document's split key."""
    digest = hashlib.sha256(f"{seed}:{split_key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


@dataclass(slots=True)
class SplitState:
    """What a split remembers, besides the files: while a side is empty, the lowest hash and whose it is."""

    lowest: float = 1.0
    lowest_documents: list[int] = field(default_factory=list)
    documents: int = 0
    places: dict[str, Place] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> "SplitState":
        """What `to_dict` gave."""
        places = {name: Place(**place) for name, place in record["places"].items()}
        return cls(record["lowest"], record["lowest_documents"], record["documents"], places)


class Split:
    """Writes a source's documents into PREFIX.train and PREFIX.validation. Use as a context manager.

    Call `finish` at the end of the block. A block that fails keeps what it wrote, to be continued from a
    state that `flush` gave.
    """

    def __init__(
        self, prefix: Path, dtype: np.dtype, fraction: float, end_id: int, state: SplitState | None = None
    ) -> None:
        """fraction: share of documents for validation; state: where to continue."""
        self.prefix, self.dtype, self.fraction = prefix, dtype, fraction
        self._end = np.array([end_id], dtype=dtype)
        self.state = state or SplitState()
        self._writers = {name: self._writer(name, self.state.places.get(name)) for name in SPLITS}

    def _writer(self, name: str, start: Place | None = None) -> TokenFileWriter:
        return TokenFileWriter(split_prefix(self.prefix, name), self.dtype, start=start, keep=True)

    def add(self, position: float, ids: npt.NDArray[np.integer], more: bool) -> None:
        """One document, or a piece of one. position: its hash in [0, 1); ids [n]: without the end token."""
        writer = self._writers["validation" if position < self.fraction else "train"]
        if len(ids):
            writer.extend(ids)
        if more:
            return
        writer.add(self._end)
        if all(writer.num_documents for writer in self._writers.values()):
            self.state.lowest_documents = []  # neither side is empty, so nobody will ask
        elif position < self.state.lowest:
            self.state.lowest, self.state.lowest_documents = position, [self.state.documents]
        elif position == self.state.lowest:
            self.state.lowest_documents.append(self.state.documents)
        self.state.documents += 1

    def flush(self) -> SplitState:
        """Bring everything to disk. Returns the state to continue from."""
        self.state.places = {name: writer.flush() for name, writer in self._writers.items()}
        return self.state

    def finish(self) -> str:
        """Let neither side be empty, and say how the validation text was chosen."""
        full = [name for name, writer in self._writers.items() if writer.num_documents]
        if len(full) != 1:
            return "documents by hash"
        whole = split_prefix(self.prefix, "whole")
        self._writers[full[0]].publish(whole)
        for writer in self._writers.values():
            writer.close()
        self._writers = {name: self._writer(name) for name in SPLITS}
        file = TokenFile(whole)
        chosen = self._divide(file) if file.num_documents > 1 else self._cut_tail(file)
        for path in bin_and_idx(whole):
            path.unlink()
        return chosen

    def _divide(self, file: TokenFile) -> str:
        lowest = set(self.state.lowest_documents)
        if len(lowest) == file.num_documents:  # copies of one text
            lowest.discard(0)
        for number in range(file.num_documents):
            writer = self._writers["validation" if number in lowest else "train"]
            _extend(writer, file.document(number))
            writer.end_document()
        return "the documents of lowest hash, as the fraction left one side empty"

    def _cut_tail(self, file: TokenFile) -> str:
        ids = file.document(0)
        end = min(max(1, round(len(ids) * (1 - self.fraction))), len(ids) - 1)
        for name, part in zip(SPLITS, (ids[:end], ids[end:]), strict=True):
            _extend(self._writers[name], part)
            self._writers[name].end_document()
        return "the tail of the only document"

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Publish both files, unless the block failed."""
        for writer in self._writers.values():
            writer.__exit__(kind, error, trace)


def _extend(writer: TokenFileWriter, ids: npt.NDArray[np.integer]) -> None:
    for first in range(0, len(ids), _COPY_IDS):
        writer.extend(ids[first : first + _COPY_IDS])
