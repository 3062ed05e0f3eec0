"""The bits of an operand do not depend on the caller's default dtype, default device or autocast."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fourbits as fb
from fourbits.quant.reference.philox import computed_once
from golden.bits import LARGE, Case, cases, recorded
from golden.test_bits import COMPILED, RECORD
from support.callers_state import STATES

SMALL = [case for case in cases() if case.shape not in LARGE]
#: one case of every spec; the stride visits other inputs of the next spec
ONE_OF_EACH = list({case.name: case for case in SMALL[::5]}.values())


def assert_recorded(chosen: list[Case], state: str) -> None:
    assert chosen
    wrong = [case.key for case in chosen if recorded(case, "cpu", STATES[state]()) != RECORD[case.key]]
    assert wrong == []


@pytest.mark.parametrize("state", STATES)
def test_every_spec_has_the_recorded_bits_whatever_the_caller_has_set(state):
    assert_recorded(ONE_OF_EACH, state)


@pytest.mark.parametrize("state", STATES)
def test_compiled_code_too(state):
    """The Hadamard transform in compiled stages, and Four Over Six in C++."""
    names = {COMPILED, "nvfp4 wgrad.lhs", "4over6-mse"}
    assert_recorded([case for case in cases() if case.name in names and case.shape in LARGE], state)


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_every_recorded_case(state):
    assert_recorded(list(cases()), state)


@pytest.mark.parametrize("state", STATES)
def test_four_over_six_in_cpp_has_the_bits_of_the_reference(state):
    """It writes FP32 scales into memory that torch.empty made, which must not be of the default dtype."""
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    spec = fb.OperandSpec(format="nvfp4", scale_rule="4over6-mse")
    expected = fb.quantize(x, spec)
    with STATES[state]():
        found = fb.quantize(x, spec)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.block_scale.view(torch.uint8), expected.block_scale.view(torch.uint8))


def test_fake_tensors_leave_nothing_behind():
    """Signs of a seed that nothing else asks for: the first caller computes them."""
    spec = fb.OperandSpec(rounding="sr", rht=16, rht_signs="fixed:20260914")
    x, entries = torch.randn(40, 48), [7, 3]
    with FakeTensorMode():
        made = fb.quantize(torch.empty(40, 48), spec, 0, sr_key=torch.tensor(entries))
        assert isinstance(made.codes, FakeTensor)
    made = fb.quantize(x, spec, 0, sr_key=torch.tensor(entries))
    assert type(made.codes) is torch.Tensor
    assert torch.equal(made.codes, fb.quantize(x, spec, 0, sr_key=torch.tensor(entries)).codes)


def test_constants_are_kept_outside_of_modes_only():
    calls: list[int] = []

    def constant(value: int) -> torch.Tensor:
        calls.append(value)
        return torch.tensor(value)

    kept = computed_once(constant)
    for _ in range(2):
        with FakeTensorMode():
            assert isinstance(kept(1), FakeTensor)
    assert [kept(1), kept(1)] == [1, 1]
    assert calls == [1, 1, 1]
