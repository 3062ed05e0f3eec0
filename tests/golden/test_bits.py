"""What quantization stored when it was recorded, it stores now; record.py says how to record again.

After a change that is meant to change bits: python tests/golden/record.py tests/golden/bits.json --part bits
"""

from pathlib import Path

import pytest
import torch

from golden.bits import LARGE, Case, cases, recorded
from golden.hashes import differences, hashed, read, write

RECORD = read(Path(__file__).parent / "bits.json")
NAMES = tuple(dict.fromkeys(case.name for case in cases()))
SMALL_CASES = [case for case in cases() if case.shape not in LARGE]
#: one of those that a CPU compiles for, which takes seconds; the complete set is for a GPU and for record.py
COMPILED = "nvfp4 fprop.lhs"


def assert_recorded(chosen: list[Case], device: str = "cpu") -> None:
    """Equal hashes of codes, scales, values and transposes."""
    found = {case.key: recorded(case, device) for case in chosen}
    assert found
    assert differences(found, {key: RECORD[key] for key in found}) == []


def test_the_record_is_of_the_cases_there_are():
    assert RECORD.keys() == {case.key for case in cases()}


@pytest.mark.parametrize("name", NAMES)
def test_a_third_of_the_small_inputs_of_every_spec_have_the_recorded_bits(name):
    assert_recorded([case for case in SMALL_CASES[::3] if case.name == name])


def test_an_input_that_is_compiled_for_has_the_recorded_bits():
    assert_recorded([case for case in cases() if case.name == COMPILED and case.shape in LARGE])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:fourbits. the eager reference quantizes")  # specs without a kernel
@pytest.mark.parametrize("name", NAMES)
def test_every_input_has_on_a_gpu_the_bits_recorded_on_a_cpu(name):
    assert_recorded([case for case in cases() if case.name == name], "cuda")


def test_a_hash_tells_numbers_dtypes_and_shapes_apart_but_not_nans():
    x = torch.tensor([0x7FC00000, 0x7F800001, -1, 0], dtype=torch.int32).view(torch.float32)
    nans = torch.tensor([torch.nan, torch.nan, torch.nan, 0.0])
    assert hashed(x) == hashed(nans)
    others = [nans.copysign(-nans), nans.nan_to_num(1.0), nans.double(), nans.reshape(2, 2), nans[:3]]
    assert len({hashed(other) for other in [nans, *others]}) == 6
    codes = torch.tensor([0x7F, 0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert hashed(codes[:1]) != hashed(codes[1:])


def test_a_comparison_finds_what_was_changed_added_and_left_out(tmp_path):
    write(tmp_path / "a.json", {"bits/same": "1", "bits/changed": "2", "bits/left out": "3"})
    write(tmp_path / "b.json", {"bits/same": "1", "bits/changed": "4", "bits/added": "5"})
    found = differences(read(tmp_path / "a.json"), read(tmp_path / "b.json"))
    assert found == ["bits/added", "bits/changed", "bits/left out"]
