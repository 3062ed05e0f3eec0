"""Where a run starts: at its newest checkpoint, at that of another run, or from initial weights.

Each function reads the trainer's state and completes manifest.json's "ancestry" and "sessions".
"""

from typing import Any

from fourbits.device import Device
from fourbits.train.checkpoint import Checkpoint, checkpoints, open_checkpoint, step_of
from fourbits.train.fork import Fork
from fourbits.train.imported import Imported
from fourbits.train.listener import RunListener
from fourbits.train.manifest import session_changes, session_of
from fourbits.train.ranks.ranks import Ranks
from fourbits.train.run_folder import RunFolder, read_json
from fourbits.train.schedule import describe_schedule
from fourbits.train.trainer import Trainer


def start(
    source: Fork | Imported | None,
    trainer: Trainer,
    folder: RunFolder,
    device: Device,
    manifest: dict[str, Any],
    listener: RunListener,
) -> Checkpoint | None:
    """Start from another run or a model, or resume the run in the folder. Returns the checkpoint it read."""
    if isinstance(source, Imported):
        start_from_model(source, trainer, device, manifest, listener)
        return None
    if source is not None:
        return start_from(source, trainer, device, manifest, listener)
    return resume(trainer, folder, device, manifest, listener)


def resume(
    trainer: Trainer, folder: RunFolder, device: Device, manifest: dict[str, Any], listener: RunListener
) -> Checkpoint | None:
    """Read the newest checkpoint of the folder; None if it has none. Raises ValueError for other text.

    Of several ranks, each reads it; rank 0 decides which one, and checks and completes the manifest.
    """
    first = trainer.ranks.is_first
    sessions = folder.sessions() if first else []
    checkpoint = newest_of_all(folder, trainer.ranks)
    manifest["ancestry"] = folder.ancestry() if first else []
    if checkpoint is None:
        manifest["sessions"] = [session_of(trainer, device)]
        return None
    if first:
        folder.check_data(manifest, checkpoint)
        keep_initial_weights(folder, manifest)
    trainer.resume(checkpoint)
    listener.note(f"continuing from {checkpoint.path}")
    this = session_of(trainer, device)
    if sessions and (changes := session_changes(sessions[-1], this)):
        listener.note(changes)
    manifest["sessions"] = [*sessions, this]
    return checkpoint


def keep_initial_weights(folder: RunFolder, manifest: dict[str, Any]) -> None:
    """Keep the recorded hash of weights of a transformers model, which the seed does not reproduce."""
    if manifest["ancestry"] and "model" in manifest["ancestry"][-1] and folder.manifest.is_file():
        before = read_json(folder.manifest)["hashes"]
        manifest["hashes"]["initial_weights"] = before["initial_weights"]


def newest_of_all(folder: RunFolder, ranks: Ranks) -> Checkpoint | None:
    """The newest checkpoint that rank 0 sees, on every rank. Raises ValueError where it is damaged."""

    def newest() -> int | None:
        found = checkpoints(folder.checkpoints)
        return step_of(found[-1]) if found else None

    step = ranks.agreed(newest)
    return (
        None
        if step is None
        else open_checkpoint(folder.checkpoints / f"step_{step}", ranks.rank, ranks.world)
    )


def start_from_model(
    imported: Imported, trainer: Trainer, device: Device, manifest: dict[str, Any], listener: RunListener
) -> None:
    """Record that a run starts from the weights of a transformers model, which the trainer has read."""
    listener.note(
        f"starting from {imported.folder} ({imported.opened.stored_as} weights): "
        f"{describe_schedule(trainer.config.train.num_steps, trainer.config.optim)}"
    )
    manifest["ancestry"] = imported.ancestry() if trainer.ranks.is_first else []
    manifest["sessions"] = [session_of(trainer, device)]


def start_from(
    fork: Fork, trainer: Trainer, device: Device, manifest: dict[str, Any], listener: RunListener
) -> Checkpoint:
    """Read the checkpoint of another run."""
    checkpoint, config = fork.checkpoint, trainer.config
    trainer.resume(checkpoint, other_recipe=checkpoint.state.get("recipe") != config.recipe.digest)
    trainer.rollbacks = trainer.rollbacks._replace(count=0)  # another run may roll back again
    schedule = describe_schedule(config.train.num_steps, config.optim)
    listener.note(f"starting from {checkpoint.path}, step {checkpoint.step}: {schedule}")
    manifest["ancestry"] = fork.ancestry(config) if trainer.ranks.is_first else []
    manifest["sessions"] = [session_of(trainer, device)]
    return checkpoint
