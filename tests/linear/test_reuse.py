"""What is quantized once: when it may serve again, and when it may not."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fourbits import convert, set_step
from fourbits.linear import operand_cache as reuse
from fourbits.linear.operand_cache import KeptWeight, SharedInput, runs_directly
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import exact_operand


class Maker:
    """Makes operands of a tensor and counts how often."""

    def __init__(self, x):
        self.x, self.made = x, 0

    def __call__(self):
        self.made += 1
        return exact_operand(self.x.detach(), OperandSpec(), 1)

    def both(self):
        return (self(),)


@pytest.fixture
def weight():
    return nn.Parameter(torch.randn(16, 32))


@pytest.fixture
def accumulating():
    kept = KeptWeight()
    kept.begin(same_step=False, plain=True)
    kept.begin(same_step=True, plain=True)
    return kept


def used(kept, weight, make, table="table"):
    """The operand that a forward gets, which must always be that of the weight as it is."""
    operand = kept.operand(weight, table, make)
    assert torch.equal(operand.values, exact_operand(weight.detach(), OperandSpec(), 1).values)
    return operand


def test_later_micro_batches_use_the_weight_of_the_first(accumulating, weight):
    make = Maker(weight)
    accumulating.begin(same_step=False, plain=True)
    for same_step in (False, True, True, True):
        accumulating.begin(same_step, plain=True)
        used(accumulating, weight, make)
    assert make.made == 1


def test_a_layer_that_is_called_twice_leaves_what_later_micro_batches_read(accumulating, weight):
    """A graph captured for them reads it in its place: after a third one it read what stood there instead."""
    make = Maker(weight)
    accumulating.begin(same_step=False, plain=True)
    first, second = (used(accumulating, weight, make) for _ in range(2))
    assert second is not first
    for _ in range(3):
        accumulating.begin(same_step=True, plain=True)
        assert used(accumulating, weight, make) is first
        assert used(accumulating, weight, make) is not first


def test_a_second_forward_without_set_step_makes_its_own(accumulating, weight):
    """An optimizer may have written the weight in between, and need not have told."""
    make = Maker(weight)
    used(accumulating, weight, make)
    weight.data.mul_(-1.5)
    used(accumulating, weight, make)
    assert make.made == 2


def test_no_micro_batch_of_a_new_step_uses_the_weight_of_the_last(accumulating, weight):
    make = Maker(weight)
    used(accumulating, weight, make)
    weight.data.mul_(-1.5)  # as optimizers write that do not tell
    for same_step in (False, True):
        accumulating.begin(same_step, plain=True)
        used(accumulating, weight, make)
    assert make.made == 2


@pytest.mark.parametrize("change", ["in place", "another dtype", "another table", "a new step"])
def test_whatever_changes_is_made_anew(accumulating, weight, change):
    make = Maker(weight)
    used(accumulating, weight, make)
    accumulating.begin(same_step=change != "a new step", plain=True)
    if change == "in place":
        with torch.no_grad():
            weight.mul_(-1.5)
    elif change == "another dtype":
        weight.data = weight.data.to(torch.bfloat16)
    used(accumulating, weight, make, "another" if change == "another table" else "table")
    assert make.made == 2


@pytest.mark.parametrize("captured", [(False, True), (True, False)])
def test_what_was_made_outside_of_a_cuda_graph_is_not_used_in_one_nor_the_other_way_round(
    accumulating, weight, captured, monkeypatch
):
    """A replay finds other numbers in the same tensors, and what a graph makes is there at replays only."""
    shared, x = SharedInput(), torch.randn(16, 32)
    makes, reads = Maker(weight), Maker(x)
    for is_captured in captured:
        monkeypatch.setattr(reuse, "_is_captured", lambda tensor, now=is_captured: now)
        for _ in range(2):
            shared.operands(x, ("how",), reads.both)
            used(accumulating, weight, makes)
            accumulating.begin(same_step=True, plain=True)
    assert (makes.made, reads.made) == (2, 2)


def test_nothing_is_kept_of_steps_with_one_micro_batch_or_of_sharded_weights(weight):
    for plain, steps in ((True, (False, False)), (False, (False, True, True))):
        kept, make = KeptWeight(), Maker(weight)
        for same_step in steps:
            kept.begin(same_step, plain)
            used(kept, weight, make)
        assert make.made == len(steps)
        assert kept._kept is None


def test_copies_and_files_of_a_model_hold_no_operands(accumulating, weight):
    used(accumulating, weight, Maker(weight))
    for other in (copy.deepcopy(accumulating), pickle.loads(pickle.dumps(accumulating))):
        assert other._kept is None
        assert not other._valid


def test_fused_optimizers_do_not_advance_a_version():
    """Why a version counter alone would not do. Once this fails, `KeptWeight` may do with less."""
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    before, version = parameter.detach().clone(), parameter._version
    torch.optim.AdamW([parameter], fused=True).step()
    assert not torch.equal(parameter, before)
    assert parameter._version == version


def test_readers_of_one_tensor_share_its_operands_while_it_lives_unwritten():
    shared, x = SharedInput(), torch.randn(16, 32)
    make = Maker(x)
    first = shared.operands(x, ("how",), make.both)
    assert shared.operands(x, ("how",), make.both) is first
    assert shared.operands(x, ("otherwise",), make.both) is not first
    x.mul_(2)
    shared.operands(x, ("otherwise",), make.both)
    shared.operands(x.view(16, 32), ("otherwise",), make.both)
    assert make.made == 4


def test_tensors_of_inference_mode_which_count_no_writes_are_quantized_at_every_use():
    with torch.inference_mode():
        shared, x = SharedInput(), torch.randn(16, 32)
        make = Maker(x)
        for _ in range(2):
            shared.operands(x, (), make.both)
    assert make.made == 2


def test_shared_operands_go_with_their_tensor():
    shared, x = SharedInput(), torch.randn(16, 32)
    shared.operands(x, (), lambda: (exact_operand(torch.ones(16, 16), OperandSpec(), 1),))
    del x
    assert shared._made == ()


def test_set_step_tells_where_a_step_goes_on(monkeypatch):
    model, seen = nn.Sequential(nn.Linear(32, 32)), []
    convert(model, "nvfp4")
    monkeypatch.setattr(KeptWeight, "begin", lambda self, same_step, plain: seen.append((same_step, plain)))
    for step, token in ((0, 0), (0, 32), (0, 64), (1, 0), (1, 32), (1, 32), (1, 0), (0, 32)):
        set_step(model, step, first_token=token)
    assert [same for same, _ in seen] == [False, True, True, False, True, False, False, False]
    assert all(plain for _, plain in seen)


def test_tensors_off_a_card_go_through_the_operators():
    assert not runs_directly(torch.ones(2))
