"""The check for silent corruption: every rank computes a micro-batch twice, and all bits must be equal.

A GPU or a core that computes wrong values once in a while raises no error; the weights of all ranks are wrong
from then on, and nothing says why. The check finds such a device by its bits: those of its two computations
differ, or they differ from those of most other ranks.
"""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fourbits.device import Device
from fourbits.train.config import TrainConfig
from fourbits.train.corruption import CorruptionError, Mismatch, find_mismatch
from fourbits.train.digests import digest
from fourbits.train.metrics import RECOMPUTE_CHECK
from fourbits.train.trainer import Trainer

SETTING = "train.recompute_check_interval"


def require_repeatable(train: TrainConfig, device: Device) -> None:
    """Raises ValueError where a healthy device may compute different bits each time."""
    if train.recompute_check_interval is None or device.torch_device == "cpu":
        return
    if device.torch_device != "cuda":
        raise ValueError(
            f"{SETTING}: must be null on {device.kind}, where PyTorch does not guarantee equal bits, got "
            f"{train.recompute_check_interval}. Set it to null."
        )
    if not train.deterministic:
        raise ValueError(
            f"{SETTING}: train.deterministic must be true on a GPU, got false: without it the backward pass "
            f"of attention may compute different bits each time. Set it to true, or {SETTING} to null."
        )


class RecomputeCheck:
    """The checks of a run, by all its ranks together."""

    def __init__(
        self, trainer: Trainer, device: Device, checkpoints: Path, notify: Callable[[str], None]
    ) -> None:
        """All ranks must create it together. checkpoints: their folder; notify: for the log."""
        self._trainer, self._ranks = trainer, trainer.ranks
        self._checkpoints, self._notify = checkpoints, notify
        self._interval = trainer.config.train.recompute_check_interval
        self._stops = trainer.config.train.recompute_mismatch == "stop"
        self._last_equal: int | None = None
        self._devices_differ = False
        if self._interval is not None:
            kinds = self._ranks.gathered([device.name, device.torch_version, torch.get_num_threads()])
            self._devices_differ = any(kind != kinds[0] for kind in kinds)

    def notes(self) -> list[str]:
        """A line for the log if ranks are not compared with one another."""
        if not self._devices_differ:
            return []
        why = "ranks differ in device, version of PyTorch or threads, and may compute different bits"
        return [f"{SETTING}: each rank is compared with itself only: {why}"]

    def due(self) -> bool:
        """Whether the next step is checked."""
        return self._interval is not None and (self._trainer.step + 1) % self._interval == 0

    def run(self, append: Callable[[dict[str, Any]], None]) -> None:
        """Compute a micro-batch of the next step twice, on all ranks, and append a record to the metrics.

        Raises CorruptionError on all ranks if bits differ and the run should end.
        """
        done = self._trainer.step
        mismatch = self._compared()
        record = {"kind": RECOMPUTE_CHECK, "step": done, "equal": mismatch is None}
        if mismatch is None:
            self._last_equal = done + 1
            append(record)
            return
        text = f"step {done + 1}: {self._described(mismatch)}"
        append(record | {"ranks": [*mismatch.ranks], "reason": text.partition(": ")[2]})
        if not self._stops:
            self._notify(text)
            return
        equal = f"at step {self._last_equal}" if self._last_equal else "before this process started, if ever"
        raise CorruptionError(
            f"{text}. The step did not run. Test the device, or take it out of service, and rerun the "
            f"command, which continues from the newest checkpoint. Bits were last equal {equal}; to go back "
            f"further: fourbits train --from {self._checkpoints}/step_N --out NEW."
        )

    def _compared(self) -> Mismatch | None:
        trainer, ranks = self._trainer, self._ranks
        twice = torch.stack([trainer.digests(), trainer.digests()])
        how = ranks.world // ranks.data_ranks, self._devices_differ, list(trainer.masters)
        short = ranks.all(torch.stack([digest(own) for own in twice])).view(ranks.world, 2, 1)
        if find_mismatch(short, *how) is None:
            return None
        return find_mismatch(ranks.all(twice.flatten()).view(ranks.world, 2, -1), *how)

    def _described(self, mismatch: Mismatch) -> str:
        if self._ranks.alone:
            return f"a micro-batch that was computed twice has different bits, {mismatch.where}"
        nodes = self._ranks.gathered(platform.node())
        text = f"ranks have different bits for one micro-batch, {mismatch.where}"
        if not mismatch.ranks:
            return f"{text}, and without a majority it is unknown which are wrong"
        names = ", ".join(f"{rank} on {nodes[rank]}" for rank in mismatch.ranks)
        return f"{text}: rank {names} is at fault"
