"""A prepared folder, opened: the token files of every source, the tokenizer, and the manifest.

manifest.json   tokenizer.json   SOURCE.train.bin/.idx   SOURCE.validation.bin/.idx
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fourbits.data.stream.blend import MAX_PERIOD, Phase
from fourbits.data.stream.manifest import (
    MANIFEST,
    SPLITS,
    check_counts,
    check_files,
    read_manifest,
    split_prefix,
)
from fourbits.data.stream.stream import PhasedStream
from fourbits.data.stream.token_file import TokenFile
from fourbits.data.stream.windows import validation_samples
from fourbits.data.tokenizer import Tokenizer

#: for the sources of `fourbits data corpus debian`: more and better prose towards the end
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
    """Everything a run reads. train, validation: one token file per source, in the manifest's order."""

    folder: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    train: dict[str, TokenFile]
    validation: dict[str, TokenFile]

    @classmethod
    def open(cls, folder: Path | str, *, verify: bool = False) -> Self:
        """Open a folder that `prepare` wrote. verify: hash whole files instead of a sample of their blocks.

        Raises ValueError if it is not a prepared folder, or a file is missing or differs from its record.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        tokenizer = Tokenizer.load(folder / "tokenizer.json", manifest["tokenizer"]["end_token"])
        if tokenizer.sha256 != manifest["tokenizer"]["sha256"]:
            raise ValueError(
                f"{folder / 'tokenizer.json'}: differs from what {MANIFEST} records; prepare the data again."
            )
        files: dict[str, dict[str, TokenFile]] = {split: {} for split in SPLITS}
        for name, record in manifest["sources"].items():
            for split in SPLITS:
                prefix = split_prefix(folder / name, split)
                check_files(prefix, record[split], whole=verify)
                files[split][name] = file = TokenFile(prefix)
                check_counts(file, record[split], folder / MANIFEST, f"sources.{name}.{split}")
        return cls(folder, manifest, tokenizer, files["train"], files["validation"])

    def sizes(self) -> str:
        """The text and the training tokens of every source, in one line."""
        parts: list[str] = []
        for name, file in self.train.items():
            text = self.manifest["sources"][name]["text_bytes"]
            size = f"{text / 1e6:,.1f} MB of text, " if text else ""
            parts.append(f"{name}: {size}{file.num_tokens:,} training tokens")
        return "; ".join(parts)

    def validation_samples(self, seq_len: int, limit: int | None = None) -> dict[str, npt.NDArray[np.int64]]:
        """The fixed samples of each source's validation loss, int64 [n, seq_len + 1], by source.

        They depend only on seq_len and limit, so they are the same for every run, recipe, phase and model.
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
        """The training stream of a run; without phases it uses `default_phases`."""
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
    """Three phases for the sources of a built-in corpus; else one, proportional to the sources' tokens."""
    for phases in (DEMO_PHASES, DEBIAN_PHASES):
        if set(sources) == set(phases[0].weights):
            return phases
    total = sum(file.num_tokens for file in sources.values())
    tokens = {name: max(file.num_tokens, total // MAX_PERIOD + 1) for name, file in sources.items()}
    return (Phase(until=1.0, weights={name: count / sum(tokens.values()) for name, count in tokens.items()}),)
