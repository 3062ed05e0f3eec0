"""Metrics as TensorBoard events in RUN/tensorboard."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fourbits.train.sinks import SinkRun


class TensorBoardSink:
    """Writes each number under its name in metrics.jsonl."""

    _writer: Any = None

    def begin(self, run: SinkRun) -> None:
        """Open a new file of events. Those of earlier files past the run's step are hidden."""
        library: Any = import_module("torch.utils.tensorboard.writer")
        self._writer = library.SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar each."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def end(self, ended: str) -> None:
        """Write what is buffered."""
        self._writer.add_text("ended", ended)
        self._writer.close()


def make() -> TensorBoardSink:
    """Raises ValueError without the package."""
    if find_spec("tensorboard") is None:
        raise ValueError(
            "train.sinks: tensorboard needs the package tensorboard, which is not installed: "
            "pip install 'fourbits[tb]'"
        )
    return TensorBoardSink()
