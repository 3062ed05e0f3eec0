"""Metrics in Weights & Biases, whose own variables (WANDB_PROJECT ...) set project, entity and mode."""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from fourbits.data.whole_file import write_whole
from fourbits.train.sinks import SinkRun


class WandbSink:
    """One wandb run per run folder, which a resumed run continues: RUN/wandb_id.txt has its id."""

    def __init__(self, client: Any) -> None:
        """client: the module wandb."""
        self._client = client
        self._run: Any = None

    def begin(self, run: SinkRun) -> None:
        """Start or continue the run. wandb ignores steps that it already has.

        So after a rollback its chart keeps the steps that were trained first.
        """
        if self._run is not None:
            return
        place = run.folder / "wandb_id.txt"
        known = place.read_text().strip() if place.is_file() else None
        name = run.folder.absolute().name
        self._run = self._client.init(
            project=os.environ.get("WANDB_PROJECT", "fourbits"),
            name=f"{name}-{run.origin}" if run.origin else name,
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
        """Finish the wandb run, which counts as crashed unless the run finished or was interrupted."""
        self._run.summary["ended"] = ended
        self._run.finish(exit_code=0 if ended in ("finished", "interrupted") else 1)


def make() -> WandbSink:
    """A sink. Raises ValueError without the package wandb."""
    try:
        client = import_module("wandb")
    except ImportError as error:
        raise ValueError(
            f"train.sinks: wandb needs the package wandb ({error}): pip install wandb"
        ) from error
    if not hasattr(client, "init"):  # a folder of that name, such as the one that wandb itself writes
        raise ValueError(
            "train.sinks: wandb needs the package wandb, which is not installed: pip install wandb"
        )
    return WandbSink(client)
