"""The loss of averaged weights: the mean of a run's last checkpoints, in the forward pass of its recipe.

The last steps of a run move its weights at random; a mean of checkpoints moves less, and so do gaps.
"""

from pathlib import Path

import torch

from fourbits.compare.report.comparison import Comparison
from fourbits.compare.run.progress import MatrixProgress
from fourbits.compare.run.run_matrix import RunMatrix
from fourbits.data.whole_file import write_json
from fourbits.device import probe
from fourbits.evaluate import HeldOut, evaluate, total_loss
from fourbits.train.calibration import run_text
from fourbits.train.load_run import open_trained
from fourbits.train.run_folder import read_json

#: in a run's folder
AVERAGED_JSON = "averaged.json"


def check_average(matrix: RunMatrix, count: int) -> None:
    """Raises ValueError if the runs will not have `count` checkpoints at their end."""
    train = matrix.runs[0].config.train
    if count < 1:
        raise ValueError(f"--average: must be at least 1, got {count}. Pass 1 for the last weights alone.")
    if train.keep_checkpoints < count:
        raise ValueError(
            f"--average: train.keep_checkpoints must be at least {count}, got {train.keep_checkpoints}. Add "
            f"--train.keep_checkpoints {count}."
        )
    every = train.checkpoint_interval or train.num_steps
    saved = -(-train.num_steps // every)
    if saved < count:
        raise ValueError(
            f"--average: must be at most the number of checkpoints, {saved} in {train.num_steps} steps with "
            f"train.checkpoint_interval {train.checkpoint_interval}, got {count}. Lower one of them."
        )


def averaged_losses(
    comparison: Comparison, count: int, progress: MatrixProgress
) -> dict[tuple[str, int], float]:
    """Validation losses of the mean of the last `count` checkpoints, by recipe and seed, of finished runs.

    Each is measured once, and kept in the run's folder.
    """
    found: dict[tuple[str, int], float] = {}
    for recipe, runs in comparison.runs.items():
        for seed, run in runs.items():
            if run.finished:
                progress.note(f"{recipe}/seed{seed}: averaging its last {count} checkpoints")
                found[recipe, seed] = averaged_loss(run.path, count)
    return found


def averaged_loss(run: Path, count: int) -> float:
    """Nats per token over the run's own validation samples. Raises ValueError for too few checkpoints."""
    stored = open_trained(run, count)
    kept, asked = run / AVERAGED_JSON, {"checkpoints": count, "step": stored.step}
    if kept.is_file() and asked.items() <= (before := read_json(kept)).items():
        return before["val_loss"]
    train = stored.config.train
    device = probe(None if train.device == "auto" else train.device).torch_device
    model = stored.converted("cpu").to(torch.device(device))
    samples = run_text(run, stored).validation_samples(train.seq_len, train.validation_samples)
    texts = {name: HeldOut.of(rows, stored.tokenizer) for name, rows in samples.items()}
    loss = total_loss(evaluate(model, texts, train.micro_batch_size).values()).per_token
    write_json(kept, asked | {"val_loss": loss})
    return loss
