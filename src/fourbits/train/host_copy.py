"""A copy of a checkpoint's tensors in the host's memory, into the same buffers at every save."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from fourbits.train.checkpoint import Tensors


class Stored(Protocol):
    """The part of the ranks' interface that a copy needs; each rank has shards."""

    def local(self, tensor: Tensor) -> Tensor:
        """This process's part of a tensor of a checkpoint."""
        ...

    def on_host(self, like: Tensor, local: Tensor) -> Tensor:
        """A tensor of a checkpoint whose part is in the host's memory."""
        ...


class HostCopy:
    """Buffers for the tensors of a checkpoint; page-locked for a GPU, so that copies run at full speed."""

    def __init__(self, ranks: Stored) -> None:
        self._ranks = ranks
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def reserve(self, files: Mapping[str, Tensors]) -> None:
        """Allocate the buffers, which takes longer than copying."""
        for name, tensors in files.items():
            for key, tensor in tensors.items():
                self._buffer(name, key, self._ranks.local(tensor))

    def copy(self, files: Mapping[str, Tensors]) -> dict[str, dict[str, Tensor]]:
        """The tensors, which the next call overwrites. Returns when all of them are in the host's memory."""
        found: dict[str, dict[str, Tensor]] = {}
        waits = False
        for name, tensors in files.items():
            found[name] = {}
            for key, tensor in tensors.items():
                local = self._ranks.local(tensor).detach()
                buffer = self._buffer(name, key, local)
                buffer.copy_(local, non_blocking=True)
                waits |= local.is_cuda
                found[name][key] = self._ranks.on_host(tensor, buffer)
        if waits:
            torch.cuda.current_stream().synchronize()
        return found

    def _buffer(self, name: str, key: str, local: Tensor) -> Tensor:
        buffer = self._buffers.get((name, key))
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            self._buffers[name, key] = buffer.zero_()  # the system maps memory at the first write
        return buffer
