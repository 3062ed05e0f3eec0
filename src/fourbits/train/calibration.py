"""Batches of a run's own validation text, from which held amaxes are measured."""

from pathlib import Path

import torch
from torch import Tensor

from fourbits.data.config import open_data
from fourbits.data.stream.dataset import PreparedData
from fourbits.train.load_run import StoredModel, Trained
from fourbits.train.run_folder import RunFolder, read_json

#: samples of each source, of the run's seq_len
SAMPLES = 8


def calibration_batches(
    path: Path | str, trained: Trained | StoredModel, samples: int = SAMPLES
) -> list[Tensor]:
    """A batch of tokens of each source's validation text, int64 [n, seq_len] on the CPU, n at most `samples`.

    path: the run's folder. Raises ValueError if its text is gone or its tokenizer differs.
    """
    found = run_text(path, trained).validation_samples(trained.config.train.seq_len, samples)
    return [torch.from_numpy(rows[:, :-1]).clamp(min=0) for rows in found.values()]


def run_text(path: Path | str, trained: Trained | StoredModel) -> PreparedData:
    """The prepared text of a run. Raises ValueError if it is gone or its tokenizer differs from the run's."""
    folder = RunFolder(Path(path))
    recorded = read_json(folder.manifest)["data"].get("folder")
    data = PreparedData.open(recorded) if recorded else open_data(trained.config.data, folder.path / "data")
    if data.tokenizer.sha256 != trained.tokenizer.sha256:
        raise ValueError(f"{data.folder}: its tokenizer differs from that of {path}. Restore the run's text.")
    return data
