"""A run that starts from a checkpoint of another run, with other settings, in its own folder.

The new run has the steps of the old one up to the checkpoint: their number, their lines in metrics.jsonl, the
weights and the optimizer's moments. manifest.json records where they come from, under "ancestry".
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourbits.data.stream.dataset import PreparedData
from fourbits.data.tokenizer import Tokenizer
from fourbits.data.whole_file import file_sha256
from fourbits.train.checkpoint import STATE, Checkpoint, open_checkpoint
from fourbits.train.config import RunConfig, differences
from fourbits.train.run_folder import RunFolder, read_json

# Settings that determine a checkpoint's tensors, and how its steps are counted.
FIXED = ("optim.masters", "train.seq_len")


@dataclass(frozen=True, slots=True)
class Fork:
    """A checkpoint of a run to start from."""

    run: RunFolder
    checkpoint: Checkpoint

    @classmethod
    def of(cls, path: Path) -> "Fork":
        """path: a run, for its newest good checkpoint, or RUN/checkpoints/step_N. Raises ValueError."""
        if path.parent.name == "checkpoints":
            return cls(_run_folder(path.parents[1]), open_checkpoint(path))
        run = _run_folder(path)
        checkpoint = run.good_checkpoint()
        if checkpoint is None:
            raise ValueError(f"{path}: the run has no checkpoint yet. Continue it until it saves one.")
        return cls(run, checkpoint)

    @property
    def sha256(self) -> str:
        """Identifies the checkpoint: the hash of its state.json, which holds those of its files."""
        return file_sha256(self.checkpoint.path / STATE)

    def check(self, config: RunConfig, data: PreparedData) -> None:
        """Raises ValueError if a run with these settings cannot start from the checkpoint."""
        stored, step = self.run.stored_config(), self.checkpoint.step
        changed = [name for name in differences(stored, config) if name.startswith("model.") or name in FIXED]
        if changed:
            raise ValueError(
                f"--from {self.checkpoint.path}: {changed[0]} must be that of the run it comes from. "
                "Remove the option, or train from the beginning."
            )
        own, other = stored.train.tokens_per_step, config.train.tokens_per_step
        if own != other:
            raise ValueError(
                f"--from {self.checkpoint.path}: a step must have {own} tokens as before, got {other}. "
                "Change train.micro_batch_size and train.gradient_accumulation together."
            )
        if config.train.num_steps <= step:
            raise ValueError(
                f"--from {self.checkpoint.path}: train.steps must be above {step}, the steps that are done, "
                f"got {config.train.num_steps}. Raise it."
            )
        recorded = Tokenizer.load(self.run.tokenizer, data.manifest["tokenizer"]["end_token"])
        if recorded.sha256 != data.tokenizer.sha256:
            raise ValueError(
                f"--from {self.checkpoint.path}: the text must have the tokenizer of the run it comes from. "
                f"Pass --data.tokenizer {self.run.tokenizer}."
            )

    def ancestry(self, config: RunConfig) -> list[dict[str, Any]]:
        """The record in manifest.json: the runs that this one comes from, oldest first."""
        before = read_json(self.run.manifest) if self.run.manifest.is_file() else {}
        entry = {
            "run": str(self.run.path.absolute()),
            "step": self.checkpoint.step,
            "checkpoint": self.sha256,
            "hashes": before.get("hashes"),
            "recipe": before.get("recipe", {}).get("digest"),
            "changed": _parts(differences(self.run.stored_config(), config)),
        }
        return [*before.get("ancestry", []), entry]


def _parts(names: list[str]) -> list[str]:
    """Names of settings, in which all those of a recipe count as one."""
    return list(dict.fromkeys("recipe" if name.startswith("recipe.") else name for name in names))


def _run_folder(path: Path) -> RunFolder:
    run = RunFolder(path)
    if not run.config.is_file() or not run.tokenizer.is_file():
        raise ValueError(
            f"--from {path}: not a run folder. Pass a folder written by fourbits train, its "
            "checkpoints/step_N, or a transformers model."
        )
    return run
