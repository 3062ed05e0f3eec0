"""A recording of what a process and its device do: a profiler trace and, on CUDA, the allocator's history."""

import contextlib
import errno
import gzip
import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fourbits.data.whole_file import open_synced, write_whole

#: allocations and frees that a memory snapshot holds, the newest ones; each is about a kilobyte
_MAX_EVENTS = 100_000
#: modules with private functions (docs.pytorch.org/docs/stable/torch_cuda_memory.html documents them)
_MEMORY: Any = torch.cuda.memory
_AUTOGRAD: Any = torch.autograd


class Recording:
    """Records between `start` and `stop`. The trace has operators with shapes, allocations, and kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
        self._profiler = profile(
            activities=activities, record_shapes=True, profile_memory=True, acc_events=True
        )
        self._memory: Any = None

    def start(self) -> None:
        """Begin, when the device has finished what it was given before.

        Raises RuntimeError if another profiler records, which this one would end, and what PyTorch raises.
        """
        if _AUTOGRAD._profiler_enabled():
            raise RuntimeError("another profiler records this process. End it first")
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
            # Python's frames only: to find the names of C++ frames takes minutes.
            _MEMORY._record_memory_history(stacks="python", max_entries=_MAX_EVENTS)
        try:
            self._profiler.start()
        except BaseException:
            self._forget_memory()
            raise

    def stop(self) -> None:
        """End, when the device has finished what it was given. Raises what PyTorch raises."""
        try:
            if self._on_cuda:
                torch.cuda.synchronize(self._device)
            self._profiler.stop()
            if self._on_cuda:
                self._memory = _MEMORY._snapshot()
        finally:
            self._forget_memory()

    def cancel(self) -> None:
        """End, whatever state the device is in, and keep nothing."""
        with contextlib.suppress(Exception):
            self._profiler.stop()
        self._forget_memory()

    @property
    def events(self) -> Sequence[Any]:
        """The profiler's events of a recording that was stopped."""
        return self._profiler.events() or ()

    @property
    def has_memory(self) -> bool:
        """Whether there is a memory snapshot."""
        return self._memory is not None

    def write_trace(self, path: Path) -> None:
        """Write a Chrome trace as JSON, compressed, complete or not at all. Raises OSError."""
        plain = path.with_suffix(".tmp")  # trace.json.tmp of trace.json.gz
        packed = path.with_name(path.name + ".tmp")
        try:
            self._profiler.export_chrome_trace(str(plain))
            if not plain.exists():  # PyTorch logs its error
                raise OSError(
                    errno.EIO, "PyTorch's profiler could not write it, perhaps for lack of space", str(path)
                )
            with (
                plain.open("rb") as source,
                open_synced(packed) as file,
                gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0) as content,
            ):
                shutil.copyfileobj(source, content, 1 << 20)
            packed.replace(path)
        finally:
            for each in (plain, plain.with_name(plain.name + ".tmp"), packed):
                _discard(each)

    def write_memory(self, path: Path) -> None:
        """Write the snapshot in the format of torch.cuda.memory._dump_snapshot. Raises OSError."""
        write_whole(path, pickle.dumps(self._memory))

    def _forget_memory(self) -> None:
        if self._on_cuda:
            _MEMORY._record_memory_history(None)


def _discard(path: Path) -> None:
    """Remove a file, if it exists. A file that PyTorch failed to write stays open, and keeps its space."""
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, 0)
        path.unlink()
