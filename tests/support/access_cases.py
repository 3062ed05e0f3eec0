"""Golden cases on a GPU's plans in the interpreter: every access checked, and the recorded bits.

Run as a program: TRITON_INTERPRET=1 python -m support.access_cases [all]; by default one case of every spec.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from triton.runtime.errors import InterpreterError

from fourbits.quant.kernels import launch_dequantize
from golden.bits import LARGE, Case, cases, recorded
from golden.hashes import read
from support.checked_accesses import as_on_a_gpu, checked_accesses
from support.triton_interpreter import prepare

_RECORD = read(Path(__file__).parents[1] / "golden" / "bits.json")


def wrong(case: Case) -> str:
    """What is wrong with a case, or an empty text."""
    try:
        return "" if recorded(case, "cpu") == _RECORD[case.key] else "other bits than recorded"
    except InterpreterError as error:
        return f"{error}"


def one_of_every_spec() -> Iterator[Case]:
    """A small case of each spec; shape, axis and dtype rotate."""
    small: dict[str, list[Case]] = {}
    for case in cases():
        if case.shape not in LARGE:
            small.setdefault(case.name, []).append(case)
    for number, of_a_spec in enumerate(small.values()):
        yield of_a_spec[5 * number % len(of_a_spec)]


def division_by_zero_is_found() -> bool:
    """A kernel that reads packed blocks of 4x4 by entries of eight divides by the zero entries of a block."""
    unsupported = launch_dequantize.unsupported_unpack
    setattr(launch_dequantize, "unsupported_unpack", lambda q: None)  # noqa: B010
    try:
        case = next(case for case in cases() if (case.name, case.axis, case.shape) == ("4x4", 0, (17, 50)))
        return "divided by zero" in wrong(case)
    finally:
        setattr(launch_dequantize, "unsupported_unpack", unsupported)  # noqa: B010


def main(names: list[str]) -> int:
    """Check the cases; print what is wrong."""
    prepare()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills what is allocated and not yet written with NaN or 255
    warnings.simplefilter("ignore")  # specs without a kernel; numpy on NaN
    with as_on_a_gpu(), checked_accesses():
        assert division_by_zero_is_found(), "the check finds nothing"
        chosen = list(cases() if names == ["all"] else one_of_every_spec())
        found = {case.key: wrong(case) for case in chosen}
    failed = {key: reason for key, reason in found.items() if reason}
    print(f"{len(found)} cases", *(f"{key}: {reason}" for key, reason in failed.items()), sep="\n")
    return len(failed)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    sys.exit(min(100, main(sys.argv[1:])))
