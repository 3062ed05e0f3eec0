"""Metrics in Weights & Biases, whose own variables (WANDB_PROJECT ...) set project, entity and mode."""

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fourbits.data.whole_file import write_whole
from fourbits.train.sinks import SinkRun


class WandbSink:
    """One run of wandb for a run's folder, which a resumed run continues: RUN/wandb_id.txt names it."""

    _run: Any = None

    def begin(self, run: SinkRun) -> None:
        """Start or continue the run. wandb ignores steps that it has already."""
        place = run.folder / "wandb_id.txt"
        known = place.read_text().strip() if place.is_file() else None
        client: Any = import_module("wandb")
        self._run = client.init(
            project=os.environ.get("WANDB_PROJECT", "fourbits"),
            name=run.folder.name,
            dir=str(run.folder),
            config=run.config,
            id=known,
            resume="allow",
        )
        write_whole(place, f"{self._run.id}\n".encode())

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row; a validation's numbers join those of its step."""
        self._run.log(dict(metrics), step=step)

    def end(self, ended: str) -> None:
        """Finish; a run that may be resumed counts as crashed only if it failed."""
        self._run.summary["ended"] = ended
        self._run.finish(exit_code=0 if ended in ("finished", "interrupted") else 1)


def make() -> WandbSink:
    """Raises ValueError without the package."""
    if find_spec("wandb") is None:
        raise ValueError(
            "train.sinks: wandb needs the package wandb, which is not installed: pip install wandb"
        )
    return WandbSink()
