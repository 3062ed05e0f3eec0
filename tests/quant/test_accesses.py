"""What quantizing kernels read and write lies within their tensors: a GPU's plans in Triton's interpreter."""

import pytest

from support.triton_interpreter import run


def test_kernels_of_every_spec_access_elements_of_their_tensors_only():
    result = run("access_cases")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_kernels_access_elements_of_their_tensors_only_in_every_golden_case():
    result = run("access_cases", "all")
    assert result.returncode == 0, result.stdout + result.stderr
