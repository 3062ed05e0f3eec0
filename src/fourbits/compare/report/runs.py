"""Reads a run folder: its configuration, manifest, metrics and summary."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fourbits.compare.report.curves import Curve, Steps
from fourbits.settings import load_yaml
from fourbits.train.metrics import read_history
from fourbits.train.run_folder import read_json

Columns = dict[str, Curve]


@dataclass(frozen=True, slots=True)
class Run:
    """One run. train, validation: a column per metric, a row per record, NaN where a record has no number.

    Records of steps that were rolled back are excluded; rollbacks: the records of the rollbacks.
    """

    path: Path
    config: dict[str, Any]
    manifest: dict[str, Any]
    summary: dict[str, Any]
    train: Columns
    validation: Columns
    rollbacks: Sequence[dict[str, Any]] = ()

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Read a folder. Raises ValueError if it is not a run folder, or has no finished step."""
        for name in ("config.yaml", "manifest.json", "metrics.jsonl"):
            if not (path / name).is_file():
                raise ValueError(
                    f"{path}: not a run folder (no {name}). Pass a folder written by `fourbits train`."
                )
        records, _, rollbacks = read_history(path / "metrics.jsonl")
        columns = {
            kind: columns_of([record for record in records if record["kind"] == kind])
            for kind in ("train", "validation")
        }
        if not columns["train"]:
            raise ValueError(f"{path}: the run must have a finished step, but has none. Train it first.")
        summary = path / "summary.json"
        return cls(
            path,
            load_yaml(path / "config.yaml"),
            read_json(path / "manifest.json"),
            read_json(summary) if summary.is_file() else {},
            columns["train"],
            columns["validation"],
            rollbacks,
        )

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return self.manifest["recipe"]["name"]

    @property
    def tokens(self) -> Curve:
        """Training tokens read up to and including each step. [steps]."""
        return self.train["tokens"]

    @property
    def train_steps(self) -> Steps:
        """Step numbers of the finished steps."""
        return self.train["step"].astype(np.int64)

    @property
    def validation_steps(self) -> Steps:
        """Steps after which the validation loss was computed; empty if a run ended before the first."""
        return self.validation.get("step", np.empty(0)).astype(np.int64)

    @property
    def final_loss(self) -> float:
        """Validation loss after the last step, nats per token."""
        return float(self.validation["val_loss"][-1])

    @property
    def finished(self) -> bool:
        """Whether the run reached its last step."""
        return self.summary.get("ended") == "finished"

    def validation_loss(self, steps: Steps) -> Curve:
        """Nats per token after each of `steps`, which must be validation steps. [n] -> [n]."""
        if not len(steps):
            return np.empty(0)
        return self.validation["val_loss"][np.searchsorted(self.validation_steps, steps)]

    def tokens_at(self, steps: npt.ArrayLike) -> Curve:
        """Training tokens read after `steps` steps. [n] -> [n]."""
        return np.asarray(steps, dtype=np.float64) * (self.tokens[-1] / self.train["step"][-1])

    @property
    def tokens_per_second(self) -> float:
        """Speed of the median training step, without compilation, validation and checkpoints."""
        return self.median_speed(None)

    def median_speed(self, steps: int | None) -> float:
        """Tokens/s of the median step, up to the step `steps` or to the last; of its own steps, not of those
        of the run that it continues.
        """
        own = self.train["tokens_per_second"][self.first_step : steps]
        return float(np.median(own if len(own) else self.train["tokens_per_second"]))

    @property
    def first_step(self) -> int:
        """The steps that another run had done before this one continued it; 0 without."""
        ancestry = self.manifest.get("ancestry", [])
        return int(ancestry[-1]["step"]) if ancestry and "step" in ancestry[-1] else 0


def columns_of(records: Sequence[dict[str, Any]]) -> Columns:
    """Records as one column per numeric key, NaN where a number was not finite. [records] each."""
    keys = {key for record in records for key, value in record.items() if not isinstance(value, str)}
    return {
        key: np.array([_number(record.get(key)) for record in records], dtype=np.float64)
        for key in sorted(keys)
    }


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else np.nan
