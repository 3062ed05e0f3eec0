"""Peak memory of the accelerator if it trains, else of this process."""

import contextlib
import re
import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): writing this resets the peak resident set size to the current size
_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")


class PeakMemory:
    """Peak bytes since construction, or since the process started if the system cannot reset its peak.

    On a GPU these are bytes of tensors, on a CPU resident bytes of the process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):
                _CLEAR.write_text(_RESET_PEAK)

    def read(self) -> int:
        """Peak memory in bytes so far."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        with contextlib.suppress(OSError):
            if found := _PEAK.search(_STATUS.read_text()):
                return int(found[1]) * 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
