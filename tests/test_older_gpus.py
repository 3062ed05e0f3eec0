"""Ampere and Ada: every kernel compiles with the configuration that would be chosen there, without a GPU."""

from functools import cache

import pytest

from support.every_kernel import launches, names
from support.gpus import SHARED_MEMORY, planning_for
from support.kernel_builds import Start

CAPABILITIES = (80, 86, 89)
#: kernels that need TMA, which sm_90 introduced, what adds the parts of their split K, and what makes the
#: operands and maps of the grouped ones; sums of FP4 tensor cores
OF_HOPPER = {"tma_kernel", "sum_kernel"} | {
    name for name in names() if name.startswith(("grouped", "tile_map", "chain"))
}
#: bytes of shared memory that a program may have on all three (sm_80 has more)
LIMIT = min(SHARED_MEMORY[capability] for capability in CAPABILITIES)
#: kernels whose code depends on whether the GPU has FP8 conversions and FP8 tensor cores
OF_FP8 = ("fp8_kernel", "fp8_gemm_kernel")


@cache
def planned(capability: int) -> list[tuple[str, Start]]:
    with planning_for(capability):
        return launches()


def name_of(start: Start) -> str:
    return start.kernel.__name__


def assert_fits(what: str, start: Start, capability: int) -> None:
    built = start.build(capability)
    assert built.asm["cubin"]
    assert built.metadata.shared <= LIMIT, f"{name_of(start)}, {what}: {built.metadata.shared} bytes"


def test_these_gpus_would_launch_every_kernel_but_those_of_tma():
    assert LIMIT == 101376
    for capability in CAPABILITIES:
        assert {name_of(start) for _, start in planned(capability)} == names() - OF_HOPPER


def representatives() -> list[tuple[int, str]]:
    """Each kernel on one of the three; those of FP8, whose code differs, on both sides of sm_89."""
    rest = sorted(names() - OF_HOPPER - set(OF_FP8))
    chosen = [(CAPABILITIES[i % 3], name) for i, name in enumerate(rest)]
    return chosen + [(capability, name) for capability in (86, 89) for name in OF_FP8]


@pytest.mark.parametrize(("capability", "kernel"), representatives())
def test_a_kernel_compiles_within_99_kib(capability, kernel):
    what, start = next(entry for entry in planned(capability) if name_of(entry[1]) == kernel)
    assert_fits(what, start, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_launch_of_every_kernel_compiles_within_99_kib(capability):
    for what, start in planned(capability):
        assert_fits(what, start, capability)


def test_fp8_is_converted_by_integers_where_there_is_no_instruction():
    for capability in CAPABILITIES:
        found = [start.arguments for _, start in planned(capability) if name_of(start) in OF_FP8]
        converts = {entry["CONVERTS"] for entry in found if "CONVERTS" in entry}
        decoded = {entry["DECODED"] for entry in found if "DECODED" in entry}
        assert (converts, decoded) == (({True}, {0}) if capability == 89 else ({False}, {3, 2}))
