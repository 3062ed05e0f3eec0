"""A prepared folder, opened: token files of every source, the tokenizer, and the manifest that ties them.

manifest.json   tokenizer.json   SOURCE.train.bin/.idx   SOURCE.validation.bin/.idx
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fourbits.data.blend import MAX_PERIOD, Phase
from fourbits.data.split import SPLITS
from fourbits.data.stream import PhasedStream
from fourbits.data.token_file import TokenFile, bin_and_idx
from fourbits.data.tokenizer import Tokenizer
from fourbits.data.windows import validation_samples

FORMAT = "fourbits-data"
VERSION = 1
MANIFEST = "manifest.json"

# Opening must take no time whatever the size: it compares this many blocks, evenly spaced, of each file.
_BLOCKS, _BLOCK_BYTES = 64, 1 << 16

#: more and better prose towards the end, for the sources of `fourbits data corpus debian`
DEBIAN_PHASES = (
    Phase(until=0.7, weights={"code": 0.7, "docs": 0.25, "books": 0.05}),
    Phase(until=0.9, weights={"code": 0.5, "docs": 0.4, "books": 0.1}),
    Phase(until=1.0, weights={"code": 0.2, "docs": 0.4, "books": 0.4}),
)
DEMO_PHASES = (
    Phase(until=0.7, weights={"code": 0.7, "prose": 0.3}),
    Phase(until=0.9, weights={"code": 0.5, "prose": 0.5}),
    Phase(until=1.0, weights={"code": 0.3, "prose": 0.7}),
)


@dataclass(frozen=True, slots=True)
class PreparedData:
    """Everything a run reads. train, validation: a token file per source, in the manifest's order."""

    folder: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    train: dict[str, TokenFile]
    validation: dict[str, TokenFile]

    @classmethod
    def open(cls, folder: Path | str, *, verify: bool = False) -> Self:
        """Open a folder that `prepare` wrote. verify: hash files whole instead of a sample of their blocks.

        Raises ValueError if it is no such folder, or a file in it is missing, damaged or not the recorded
        one.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        tokenizer = Tokenizer.load(folder / "tokenizer.json", manifest["tokenizer"]["end_token"])
        if tokenizer.sha256 != manifest["tokenizer"]["sha256"]:
            raise ValueError(f"{folder / 'tokenizer.json'}: not the tokenizer that {MANIFEST} records.")
        files: dict[str, dict[str, TokenFile]] = {split: {} for split in SPLITS}
        for name, record in manifest["sources"].items():
            for split in SPLITS:
                prefix = folder / f"{name}.{split}"
                check_files(prefix, record[split], whole=verify)
                files[split][name] = TokenFile(prefix)
        return cls(folder, manifest, tokenizer, files["train"], files["validation"])

    def validation_samples(self, seq_len: int, limit: int | None = None) -> dict[str, npt.NDArray[np.int64]]:
        """The fixed samples of each source's validation loss, int64 [n, seq_len + 1], by source.

        They depend on seq_len and limit only: the same for every run, recipe and phase, and for any model.
        """
        files = self.validation.items()
        return {name: validation_samples(name, file, seq_len, limit) for name, file in files}

    def stream(
        self,
        phases: Sequence[Phase] = (),
        *,
        total_samples: int,
        seq_len: int,
        seed: int,
        batch_size: int = 1,
        max_epochs: float | None = None,
    ) -> PhasedStream:
        """The training stream of a run; without phases, `default_phases`."""
        return PhasedStream(
            self.train,
            phases or default_phases(self.train),
            total_samples=total_samples,
            seq_len=seq_len,
            seed=seed,
            batch_size=batch_size,
            vocab_size=self.tokenizer.vocab_size,
            validation=self.validation,
            max_epochs=max_epochs,
        )


def default_phases(sources: Mapping[str, TokenFile]) -> tuple[Phase, ...]:
    """Three phases for the sources of a corpus of ours; else one, in proportion to the sources' ids."""
    for phases in (DEMO_PHASES, DEBIAN_PHASES):
        if set(sources) == set(phases[0].weights):
            return phases
    total = sum(file.num_tokens for file in sources.values())
    ids = {name: max(file.num_tokens, total // MAX_PERIOD + 1) for name, file in sources.items()}
    return (Phase(until=1.0, weights={name: count / sum(ids.values()) for name, count in ids.items()}),)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder. Raises ValueError if there is none or it is not ours."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{folder}: not a prepared folder (no {MANIFEST}); make one with fourbits data prepare."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path}: not a manifest of prepared data (its format must be {FORMAT!r}).")
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"{path}: version must be {VERSION}, got {manifest.get('version')}; prepare it again."
        )
    missing = [key for key in ("request", "tokenizer", "sources") if not isinstance(manifest.get(key), dict)]
    if missing:
        raise ValueError(f"{path}: damaged: no {missing[0]!r} in it; prepare the data again.")
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
    """Compare a token file with its record: by size and sampled blocks, or whole. Raises ValueError."""
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
            same = file_sha256(path) == recorded["sha256"]
        else:
            same = sampled_sha256(path) == recorded["sampled_sha256"]
        if not same:
            raise ValueError(f"{path}: its content is not what {MANIFEST} records; prepare the data again.")


def file_sha256(path: Path) -> str:
    """SHA-256 of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sampled_sha256(path: Path) -> str:
    """SHA-256 of a file's size and of up to 64 evenly spaced blocks of 64 KiB: all of a file up to 4 MiB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    stride = max(_BLOCK_BYTES, (size - _BLOCK_BYTES) // (_BLOCKS - 1)) if size else _BLOCK_BYTES
    with path.open("rb") as file:
        for number in range(_BLOCKS):
            file.seek(number * stride)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
