"""The progress within a source, on disk: how much was read, and how long each token file was.

It is written after the token files are flushed to disk, so they are at least as long as it records.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

from fourbits.data.corpora.document import Document
from fourbits.data.prepare.split import SplitState
from fourbits.data.stream.manifest import SPLITS, split_prefix
from fourbits.data.whole_file import read_json, write_json


@dataclass(slots=True)
class Tally:
    """Counts of what was read from a source and written. read: documents (or pieces), duplicates included.

    unencodable: documents that the tokenizer encodes to nothing, which are not written; sampled_characters,
    lost_characters: see round_trip.py. text_sha256: a hash chain over all texts: the SHA-256 of the previous
    link and the next text's SHA-256. It can be resumed from its 32 bytes.
    """

    read: int = 0
    documents: int = 0
    text_bytes: int = 0
    text_sha256: str = "0" * 64
    unencodable: int = 0
    sampled_characters: int = 0
    lost_characters: int = 0

    def count(self, document: Document, read: int, written: bool) -> None:
        """Count a document, or a piece of one; `read` is its number in the source, from 1."""
        raw = document.text.encode() if document.tokens is None else document.tokens.tobytes()
        link = bytes.fromhex(self.text_sha256) + hashlib.sha256(raw).digest()
        self.text_sha256 = hashlib.sha256(link).hexdigest()
        self.read = read
        self.documents += not document.more and written
        self.unencodable += not document.more and not written
        self.text_bytes += len(raw) if document.tokens is None else 0


class ProgressFile:
    """SOURCE.progress.json, next to the token files of an unfinished source."""

    def __init__(self, prefix: Path, key: str) -> None:
        """key: a hash of what determines the result; progress saved under another key is ignored."""
        self.prefix, self.key = prefix, key
        self.path = prefix.with_name(f"{prefix.name}.progress.json")

    def load(self) -> tuple[Tally, SplitState] | None:
        """Where to resume; None to start over, for example after the files were published or removed."""
        if not self.path.is_file():
            return None
        saved = read_json(self.path)
        names = [f"{split_prefix(self.prefix, split).name}.bin.tmp" for split in SPLITS]
        if saved["key"] != self.key or not all(self.prefix.with_name(name).is_file() for name in names):
            return None
        return Tally(**saved["tally"]), SplitState.of(saved["split"])

    def save(self, tally: Tally, split: SplitState) -> None:
        """Save the progress; the token files must be on disk up to it."""
        write_json(self.path, {"key": self.key, "tally": asdict(tally), "split": split.to_dict()})

    def remove(self) -> None:
        """Delete the file once the source is finished."""
        self.path.unlink(missing_ok=True)
