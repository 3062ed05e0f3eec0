"""Splits a source into training and validation text: each document on one side, by hash; neither is empty.

Each document is written to its side as it arrives. If one side is empty at the end, the other file is read
again, and its documents with the lowest hash become the validation text; a single document, or the copies of
one, gives its tail.
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

_COPY_TOKENS = 1 << 22


def fraction_of(split_key: str, seed: int) -> float:
    """A hash of the seed and a document's split key, as a number in [0, 1)."""
    digest = hashlib.sha256(f"{seed}:{split_key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


@dataclass(slots=True)
class SplitState:
    """A split's state besides its files: while a side is empty, the lowest hash and the documents with it."""

    lowest: float = 1.0
    lowest_documents: list[int] = field(default_factory=list)
    documents: int = 0
    places: dict[str, Place] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The state as plain values, for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> "SplitState":
        """The state from `to_dict` values."""
        places = {name: Place(**place) for name, place in record["places"].items()}
        return cls(record["lowest"], record["lowest_documents"], record["documents"], places)


class Split:
    """Writes a source's documents into PREFIX.train and PREFIX.validation. Use as a context manager.

    Call `finish` at the end of the block. If the block fails, its files stay, to be resumed from a state that
    `flush` returned.
    """

    def __init__(
        self, prefix: Path, dtype: np.dtype, fraction: float, end_id: int, state: SplitState | None = None
    ) -> None:
        """fraction: share of documents for validation; state: where to resume."""
        self.prefix, self.dtype, self.fraction = prefix, dtype, fraction
        self._end = np.array([end_id], dtype=dtype)
        self.state = state or SplitState()
        self._writers = {name: self._writer(name, self.state.places.get(name)) for name in SPLITS}

    def _writer(self, name: str, start: Place | None = None) -> TokenFileWriter:
        return TokenFileWriter(split_prefix(self.prefix, name), self.dtype, start=start, keep=True)

    def add(self, position: float, tokens: npt.NDArray[np.integer], more: bool) -> bool:
        """Add a document, or a piece of one. position: its hash in [0, 1); tokens: [n], without end token.

        Returns False for a document without tokens, which is not written.
        """
        writer = self._writers["validation" if position < self.fraction else "train"]
        if len(tokens):
            writer.extend(tokens)
        if more:
            return True
        if not writer.in_document:
            return False
        writer.add(self._end)
        if all(writer.num_documents for writer in self._writers.values()):
            self.state.lowest_documents = []  # neither side is empty, so they are not needed
        elif position < self.state.lowest:
            self.state.lowest, self.state.lowest_documents = position, [self.state.documents]
        elif position == self.state.lowest:
            self.state.lowest_documents.append(self.state.documents)
        self.state.documents += 1
        return True

    def flush(self) -> SplitState:
        """Flush everything to disk. Returns the state to resume from."""
        self.state.places = {name: writer.flush() for name, writer in self._writers.items()}
        return self.state

    def finish(self) -> str:
        """Make sure neither side is empty. Returns how the validation text was chosen."""
        nonempty = [name for name, writer in self._writers.items() if writer.num_documents]
        if len(nonempty) != 1:
            return "documents by hash"
        whole = split_prefix(self.prefix, "whole")
        self._writers[nonempty[0]].publish(whole)
        for writer in self._writers.values():
            writer.close()
        self._writers = {name: self._writer(name) for name in SPLITS}
        file = TokenFile(whole)
        lowest = set(self.state.lowest_documents)
        # Documents that all share one split key, such as copies of one text, cannot be divided by it.
        rule = self._divide(file, lowest) if len(lowest) < file.num_documents else self._split_tail(file)
        for path in bin_and_idx(whole):
            path.unlink()
        return rule

    def _divide(self, file: TokenFile, lowest: set[int]) -> str:
        for number in range(file.num_documents):
            writer = self._writers["validation" if number in lowest else "train"]
            _extend(writer, file.document(number))
            writer.end_document()
        return "the documents of lowest hash, as the fraction left one side empty"

    def _split_tail(self, file: TokenFile) -> str:
        """Hold out the tail of the first document; the same share of its copies is not written."""
        train, validation = (self._writers[name] for name in SPLITS)
        for number in range(file.num_documents):
            tokens = file.document(number)
            end = min(max(1, round(len(tokens) * (1 - self.fraction))), len(tokens) - 1)
            _extend(train, tokens[:end])
            if file.num_documents > 1:
                train.extend(self._end)
            train.end_document()
            if number == 0:
                _extend(validation, tokens[end:])
                validation.end_document()
        if file.num_documents == 1:
            return "the tail of the only document"
        return (
            f"the tail of the first of {file.num_documents} documents, which are copies or share a split key"
        )

    def __enter__(self) -> Self:
        """Return the open split."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Publish both pairs of files, unless the block failed."""
        for writer in self._writers.values():
            writer.__exit__(kind, error, trace)


def _extend(writer: TokenFileWriter, tokens: npt.NDArray[np.integer]) -> None:
    for first in range(0, len(tokens), _COPY_TOKENS):
        writer.extend(tokens[first : first + _COPY_TOKENS])
