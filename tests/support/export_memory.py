"""Print the memory that an export adds at its peak, in bytes. Arguments: RUN FORMAT OUT SLAB.

Linux only: the peak is reset after a first export, which compiles.
"""

import gc
import re
import sys
from pathlib import Path

import torch

from fourbits.exchange import outgoing
from fourbits.settings import build
from fourbits.train.export import export_stored
from fourbits.train.export_weights import ExportOptions
from fourbits.train.load_run import open_trained


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (at most), in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main(run: str, format_name: str, out: str, slab: str) -> None:
    """Export twice, and measure the second time."""
    torch.set_num_threads(1)
    outgoing.SLAB = int(slab)
    scales = "trained" if format_name == "hf" else "separate"
    options = build(ExportOptions, {"format": format_name, "scales": scales, "calibration": 0})
    export_stored(open_trained(run), out, options)
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    export_stored(open_trained(run), out, options)
    print(resident("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
