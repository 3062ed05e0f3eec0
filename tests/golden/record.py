"""What the code computes, as hashes: run before and after a change that should change no bit, and compare.

python tests/golden/record.py OUT.json [--device cuda] [--part bits products layers losses]

It knows the public names only (and the command line, for losses), so that it runs on both sides of a change
to the inside. Products and losses depend on the machine's BLAS: compare them on one machine, see compare.py.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path[0] = str(Path(__file__).parents[1])  # a program sees its own folder there; its parts see tests/

import fourbits  # noqa: E402
from golden import bits, layers, losses, products  # noqa: E402
from golden.hashes import write  # noqa: E402

PARTS = ("bits", "products", "layers", "losses")


def entries_of(part: str, device: str) -> dict[str, str]:
    """All entries of one part."""
    if part == "bits":
        return {case.key: bits.recorded(case, device) for case in bits.cases()}
    return {"products": products, "layers": layers, "losses": losses}[part].entries(device)


def main() -> None:
    """Record the parts that are asked for and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    warnings.filterwarnings("ignore", category=UserWarning)
    print(f"recording {Path(fourbits.__file__).parent} on {options.device}")
    entries: dict[str, str] = {}
    for part in options.part:
        start = time.perf_counter()
        made = entries_of(part, options.device)
        entries |= made
        print(f"{part}: {len(made)} entries in {time.perf_counter() - start:.1f} s", flush=True)
        write(options.out, entries)


if __name__ == "__main__":
    main()
