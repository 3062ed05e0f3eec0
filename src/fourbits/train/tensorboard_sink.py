"""Metrics as TensorBoard events in RUN/tensorboard."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from fourbits.train.sinks import SinkRun


class TensorBoardSink:
    """Writes each number under its name in metrics.jsonl."""

    def __init__(self, library: Any) -> None:
        """library: the module of SummaryWriter."""
        self._library = library
        self._writer: Any = None

    def begin(self, run: SinkRun) -> None:
        """Open a new file of events. Those of earlier files past the run's step are hidden.

        A run started with --from has a folder that names the other run, which TensorBoard shows.
        """
        if self._writer is not None:
            self._writer.close()
        folder = run.folder / "tensorboard" / (run.origin or "")
        self._writer = self._library.SummaryWriter(str(folder), purge_step=run.step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar each, flushed, so that a run that is killed and resumed has those of all steps."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self, ended: str) -> None:
        """Record how the run ended."""
        self._writer.add_text("ended", ended)
        self._writer.close()


def make() -> TensorBoardSink:
    """A sink. Raises ValueError without the package tensorboard."""
    try:
        return TensorBoardSink(import_module("torch.utils.tensorboard.writer"))
    except ImportError as error:
        raise ValueError(
            f"train.sinks: tensorboard needs the package tensorboard ({error}): pip install 'fourbits[tb]'"
        ) from error
