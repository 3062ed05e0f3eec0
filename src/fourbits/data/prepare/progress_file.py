"""What survives a kill in the middle of a source: how much was read, and how far each file had come.

Written after the token files were brought to disk, so that they are at least as long as it says.
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
    """What was read of a source, and written. read: documents (or pieces), repeated ones included.

    text_sha256: a chain, each link the SHA-256 of the one before and the SHA-256 of the next text: a hash of
    all texts that can be continued from 32 bytes.
    """

    read: int = 0
    documents: int = 0
    text_bytes: int = 0
    text_sha256: str = "0" * 64

    def count(self, document: Document, read: int) -> None:
        """A document, or a piece of one, was written; `read` of the source have been read up to it."""
        raw = document.text.encode() if document.ids is None else document.ids.tobytes()
        link = bytes.fromhex(self.text_sha256) + hashlib.sha256(raw).digest()
        self.text_sha256 = hashlib.sha256(link).hexdigest()
        self.read = read
        self.documents += not document.more
        self.text_bytes += len(raw) if document.ids is None else 0


class ProgressFile:
    """SOURCE.progress.json beside the token files of a source that is not finished."""

    def __init__(self, prefix: Path, key: str) -> None:
        """key: what decides the outcome; progress under another key does not count."""
        self.prefix, self.key = prefix, key
        self.path = prefix.with_name(f"{prefix.name}.progress.json")

    def load(self) -> tuple[Tally, SplitState] | None:
        """Where to continue; None to begin anew, also if the files have been published or removed since."""
        if not self.path.is_file():
            return None
        saved = read_json(self.path)
        names = [f"{split_prefix(self.prefix, split).name}.bin.tmp" for split in SPLITS]
        if saved["key"] != self.key or not all(self.prefix.with_name(name).is_file() for name in names):
            return None
        return Tally(**saved["tally"]), SplitState.of(saved["split"])

    def save(self, tally: Tally, split: SplitState) -> None:
        """Remember a place; the token files must be on disk up to there."""
        write_json(self.path, {"key": self.key, "tally": asdict(tally), "split": split.to_dict()})

    def remove(self) -> None:
        """The source is finished."""
        self.path.unlink(missing_ok=True)
