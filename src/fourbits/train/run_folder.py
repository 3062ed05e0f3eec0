"""A run folder: its files, its lock, and the checks before a run continues.

config.yaml    every setting, so that `fourbits train RUN/config.yaml --out NEW` repeats the run
manifest.json  versions, device, precision of every linear layer, hashes of recipe, data and weights
tokenizer.json the data's tokenizer, so that the folder has all that a trained model needs
metrics.jsonl  a line per step and per validation
health.jsonl   a line per sample of the layers' health
checkpoints/   step_N, each complete
summary.json   how the run ended; absent while it runs
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fourbits.data import whole_file
from fourbits.data.tokenizer import Tokenizer
from fourbits.data.whole_file import write_json, write_whole
from fourbits.settings import dump_yaml, load_yaml, to_dict
from fourbits.train.checkpoint import Checkpoint, checkpoints, open_checkpoint, step_of
from fourbits.train.config import RunConfig, config_from_mapping
from fourbits.train.continuation import changed_settings, check_phases, extended
from fourbits.train.metrics import FolderChangedError


class RunFolder:
    """The paths of one run, and the rules for using them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_file: os.stat_result | None = None
        self.config = path / "config.yaml"
        self.manifest = path / "manifest.json"
        self.metrics = path / "metrics.jsonl"
        self.tokenizer = path / "tokenizer.json"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"
        self.log = path / "log.txt"
        self.health = path / "health.jsonl"
        self.profiles = path / "profiles"

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold the folder's lock, which a dying process releases. ValueError if another process holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"{self.path}: another process is training in this folder. Wait for it, or choose "
                "another --out."
            ) from None
        self._lock_file = os.stat(lock.lock_file)
        try:
            yield
        finally:
            lock.release()

    def require_lock(self) -> None:
        """Raises FolderChangedError if the lock was removed, so that another process could train here."""
        lock = self.path / ".lock"
        held = self._lock_file
        if held is None or not lock.exists() or not os.path.samestat(lock.stat(), held):
            raise FolderChangedError(
                f"{lock}: was moved, removed or replaced during the run, so another process could "
                "train in this folder. Rerun the command when no other does."
            )

    def continued(self, config: RunConfig) -> tuple[RunConfig, str | None]:
        """`config` as the run in this folder continues with it, and a message if its length changes.

        Raises ValueError if the folder holds steps of a run with other settings.
        """
        if not self.has_steps():
            return config, None
        if not self.config.is_file():
            raise ValueError(f"{self.path}: holds steps of a run but no config.yaml. Choose another --out.")
        stored, saved = self.stored_config(), checkpoints(self.checkpoints)
        if not saved and self.ancestry():
            raise ValueError(
                f"{self.path}: a run was to start here from another one's checkpoint, but stopped before it "
                "was copied. Rerun its command, with --from."
            )
        if changed := changed_settings(stored, config):
            newest = f"fourbits train --from {self.path} --out NEW" if saved else "another --out"
            raise ValueError(
                f"{self.path}: holds a run with a different {', '.join(changed[:3])}"
                f"{f' and {len(changed) - 3} more settings' if len(changed) > 3 else ''}. Continue it as it "
                f"is with fourbits train {self.config}, or with these settings in a new folder: {newest}."
            )
        return extended(stored, config, [step_of(each) for each in saved], str(self.path))

    def sessions(self) -> list[dict[str, Any]]:
        """The processes that trained in this folder, as in manifest.json."""
        return read_json(self.manifest).get("sessions", []) if self.manifest.is_file() else []

    def ancestry(self) -> list[dict[str, Any]]:
        """The runs that the run in this folder comes from, as in manifest.json."""
        return read_json(self.manifest).get("ancestry", []) if self.manifest.is_file() else []

    def has_steps(self) -> bool:
        """Whether a run completed at least one step here."""
        has_metrics = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return has_metrics or bool(checkpoints(self.checkpoints))

    def stored_config(self) -> RunConfig:
        """The settings of the run in this folder."""
        return config_from_mapping(load_yaml(self.config), where=str(self.config))

    def newest_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to continue from. ValueError if it is damaged: an older one is not used silently."""
        found = checkpoints(self.checkpoints)
        return open_checkpoint(found[-1]) if found else None

    def good_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint, or of a run that ended non-finite the last good one.

        ValueError if it is damaged, or if no checkpoint of a non-finite run is good.
        """
        summary = read_json(self.summary) if self.summary.is_file() else {}
        if summary.get("ended") != "non-finite":
            return self.newest_checkpoint()
        name = summary.get("last_good_checkpoint")
        if not isinstance(name, str):
            raise ValueError(
                f"{self.path}: the run ended non-finite and has no good checkpoint. "
                "Train it again in another --out with a lower optim.lr."
            )
        return open_checkpoint(self.checkpoints / name)

    def check_data(self, manifest: dict[str, Any], checkpoint: Checkpoint) -> None:
        """Raises ValueError if the run in this folder read other data, up to its checkpoint.

        manifest: what this process would write. A folder without manifest.json is checked by the hashes in
        the checkpoint.
        """
        before = read_json(self.manifest) if self.manifest.is_file() else {}
        for recorded in (before.get("hashes", {}), checkpoint.state.get("hashes", {})):
            if not isinstance(recorded, dict):
                raise ValueError(f"{self.path}: damaged: hashes must be a JSON object. Choose another --out.")
            for name in ("text", "validation") if "text" in recorded else ("data_order", "validation"):
                if recorded and recorded.get(name) != manifest["hashes"][name]:
                    raise ValueError(
                        f"{self.path}: the run in this folder read different text ({name} differs), so it "
                        "cannot continue. Restore its text, or pass --data.paths if it moved."
                    )
        samples = checkpoint.state.get("next_sample", 0)
        if stream := before.get("data", {}).get("plan"):
            check_phases(stream, manifest["data"]["plan"], samples, str(self.path))

    def finished_summary(self, num_steps: int) -> dict[str, Any] | None:
        """The summary of a run that reached its last step, num_steps, else None."""
        if not self.summary.is_file():
            return None
        summary = read_json(self.summary)
        if summary.get("ended") != "finished":
            return None
        if not isinstance(summary.get("steps"), int):
            raise ValueError(f"{self.summary}: damaged: steps must be a number. Remove the file to continue.")
        return summary if summary["steps"] >= num_steps else None

    def begin(self, config: RunConfig, manifest: dict[str, Any], tokenizer: Tokenizer) -> None:
        """Store what is known before the first step."""
        write_whole(self.config, dump_yaml(to_dict(config)).encode())
        write_json(self.manifest, manifest)
        tokenizer.save(self.tokenizer)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Store how the run ended."""
        write_json(self.summary, summary)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a run. Raises ValueError naming the file if it is not one."""
    return whole_file.read_json(path, "Restore it, or choose another --out.")
