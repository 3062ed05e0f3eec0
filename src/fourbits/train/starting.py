"""Where a run starts: at its newest checkpoint, at that of another run, or from initial weights.

Each function reads the trainer's state and completes manifest.json's "ancestry" and "sessions".
"""

from typing import Any

from fourbits.device import Device
from fourbits.train.checkpoint import Checkpoint
from fourbits.train.fork import Fork
from fourbits.train.listener import RunListener
from fourbits.train.manifest import session_changes, session_of
from fourbits.train.run_folder import RunFolder
from fourbits.train.schedule import describe_schedule
from fourbits.train.trainer import Trainer


def resume(
    trainer: Trainer, folder: RunFolder, device: Device, manifest: dict[str, Any], listener: RunListener
) -> Checkpoint | None:
    """Read the newest checkpoint of the folder; None if it has none. Raises ValueError for other text."""
    sessions, checkpoint = folder.sessions(), folder.newest_checkpoint()
    manifest["ancestry"] = folder.ancestry()
    if checkpoint is None:
        manifest["sessions"] = [session_of(trainer, device)]
        return None
    folder.check_data(manifest, checkpoint)
    trainer.resume(checkpoint)
    listener.note(f"continuing from {checkpoint.path}")
    this = session_of(trainer, device)
    if sessions and (changes := session_changes(sessions[-1], this)):
        listener.note(changes)
    manifest["sessions"] = [*sessions, this]
    return checkpoint


def start_from(
    fork: Fork, trainer: Trainer, device: Device, manifest: dict[str, Any], listener: RunListener
) -> Checkpoint:
    """Read the checkpoint of another run."""
    checkpoint, config = fork.checkpoint, trainer.config
    trainer.resume(checkpoint, other_recipe=checkpoint.state.get("recipe") != config.recipe.digest)
    schedule = describe_schedule(config.train.num_steps, config.optim)
    listener.note(f"starting from {checkpoint.path}, step {checkpoint.step}: {schedule}")
    manifest["ancestry"] = fork.ancestry(config)
    manifest["sessions"] = [session_of(trainer, device)]
    return checkpoint
