"""The files of a run on a rank that does not write them: the same calls, which do nothing."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from fourbits.data.tokenizer import Tokenizer
from fourbits.train.config import RunConfig
from fourbits.train.keeper import CheckpointKeeper
from fourbits.train.run_folder import RunFolder


class FollowerFolder(RunFolder):
    """A run folder that another rank writes. Only the log is this rank's."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self.log = path / "logs" / f"rank_{rank}.txt"

    @contextmanager
    def locked(self) -> Generator[None]:
        """Rank 0 holds the lock."""
        yield

    def require_lock(self) -> None:
        """Rank 0 checks the lock."""

    def begin(self, config: RunConfig, manifest: dict[str, Any], tokenizer: Tokenizer) -> None:
        """Rank 0 writes these."""

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Rank 0 writes it."""


class FollowerMetrics:
    """The metrics that another rank writes."""

    sha256, size = "", 0
    skipped_in_a_row = 0

    def append(self, record: Mapping[str, Any]) -> None:
        """Rank 0 writes it."""

    def sync(self) -> None:
        """Rank 0 writes them to disk."""

    def require_in_place(self) -> None:
        """Rank 0 does it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""


class FollowerKeeper(CheckpointKeeper):
    """Checkpoints that another rank removes. Each rank writes its shards."""

    def proved(self, step: int) -> None:
        """Rank 0 removes old ones. Raises what a save in the background raised."""
        self._check_save(wait=False)

    def remove_old(self, finite: int | None = None) -> None:
        """Rank 0 does it, after this."""
        self.settle()

    def return_to(self, step: int, state: Mapping[str, Any]) -> None:
        """Rank 0 does it."""
