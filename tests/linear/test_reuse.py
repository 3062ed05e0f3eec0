"""Operands that are computed once: when they may serve again, and when they may not."""

import copy
import pickle
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from fourbits import convert, get_recipe, set_step
from fourbits.linear import compute, operand_cache
from fourbits.linear import module as linear_module
from fourbits.linear.module import runs_eagerly
from fourbits.linear.operand_cache import KeptWeight, SharedInput
from fourbits.linear.sr_counter import SrCounter
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import exact_operand
from fourbits.quant.tensor import ExactOperand
from fourbits.recipe.recipe import GemmSpec


class Maker:
    """Makes operands of a tensor and counts how often."""

    def __init__(self, x):
        self.x, self.made = x, 0

    def __call__(self):
        self.made += 1
        return exact_operand(self.x.detach(), OperandSpec(), 1)

    def both(self):
        return (self(),)


class Micro:
    """A weight, what is kept of it, and the micro-batches that use it."""

    def __init__(self):
        self.weight = nn.Parameter(torch.randn(16, 32))
        self.kept, self.counter = KeptWeight(), SrCounter(0, torch.device("cpu"))
        self.make = Maker(self.weight)

    def begin(self, same_weights):
        self.counter.advance(0, 0, same_weights)

    def used(self, plan="plan"):
        """The operand that a forward gets, which must always be that of the weight as it is."""
        operand = self.kept.operand(self.weight, plan, self.counter, self.make)
        assert isinstance(operand, ExactOperand)
        assert torch.equal(operand.values, exact_operand(self.weight.detach(), OperandSpec(), 1).values)
        return operand


@pytest.fixture
def micro():
    """After a first step with two micro-batches, which showed that there are several."""
    micro = Micro()
    micro.begin(same_weights=False)
    micro.begin(same_weights=True)
    return micro


def test_later_micro_batches_use_the_weight_of_the_first(micro):
    for same in (False, True, True, True):
        micro.begin(same)
        micro.used()
    assert micro.make.made == 1


def test_a_layer_that_is_called_twice_leaves_what_later_micro_batches_read(micro):
    """A graph captured for them reads it in its place: after a third one it read what stood there instead."""
    micro.begin(same_weights=False)
    first, second = (micro.used() for _ in range(2))
    assert second is not first
    for _ in range(3):
        micro.begin(same_weights=True)
        assert micro.used() is first
        assert micro.used() is not first


def test_a_second_forward_without_set_step_quantizes_again(micro):
    """An optimizer may have written the weight in between without advancing its version."""
    micro.used()
    micro.weight.data.mul_(-1.5)
    micro.used()
    assert micro.make.made == 2


@pytest.mark.parametrize("write", ["data", "storage", "fused optimizer"])
def test_no_write_between_micro_batches_leaves_a_stale_weight_unless_the_caller_promised(micro, write):
    def update():
        if write == "data":
            micro.weight.data.mul_(-1.5)
        elif write == "storage":
            torch.empty(0).set_(micro.weight.untyped_storage()).mul_(-1.5)
        else:
            micro.weight.grad = torch.ones_like(micro.weight)
            torch.optim.AdamW([micro.weight], lr=0.1, fused=True).step()

    for _ in range(3):
        micro.begin(same_weights=False)
        micro.used()
        update()
    assert micro.make.made == 3


@pytest.mark.parametrize("change", ["in place", "another dtype", "another plan", "other weights"])
def test_whatever_changes_is_computed_again(micro, change):
    micro.used()
    micro.begin(same_weights=change != "other weights")
    if change == "in place":
        with torch.no_grad():
            micro.weight.mul_(-1.5)
    elif change == "another dtype":
        micro.weight.data = micro.weight.data.to(torch.bfloat16)
    micro.used("another" if change == "another plan" else "plan")
    assert micro.make.made == 2


@pytest.mark.parametrize("captured", [(False, True), (True, False)])
def test_what_was_computed_outside_of_a_cuda_graph_is_not_used_in_one_nor_the_other_way_round(
    micro, captured, monkeypatch
):
    """A replay finds other numbers in the same tensors, and what a graph computes exists at replays only."""
    shared, x = SharedInput(), graph_output()
    reads = Maker(x)
    for is_captured in captured:
        monkeypatch.setattr(operand_cache, "_is_captured", lambda tensor, now=is_captured: now)
        for _ in range(2):
            shared.operands(x, "plan", reads.both)
            micro.used()
            micro.begin(same_weights=True)
    assert (micro.make.made, reads.made) == (2, 2)


def test_nothing_is_kept_of_steps_with_one_micro_batch_or_of_sharded_weights():
    for plain, steps in ((True, (False, False)), (False, (False, True, True))):
        micro = Micro()
        micro.kept.plain = plain
        for same in steps:
            micro.begin(same)
            micro.used()
        assert micro.make.made == len(steps)
        assert micro.kept._kept is None


def test_copies_and_files_of_a_model_hold_no_operands(micro):
    micro.used()
    for other in (copy.deepcopy(micro.kept), pickle.loads(pickle.dumps(micro.kept))):
        assert other._kept is None


def test_fused_optimizers_do_not_advance_a_version():
    """Why a version counter alone would not do. Once this fails, `KeptWeight` may do with less."""
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    before, version = parameter.detach().clone(), parameter._version
    torch.optim.AdamW([parameter], fused=True).step()
    assert not torch.equal(parameter, before)
    assert parameter._version == version


def graph_output() -> torch.Tensor:
    """What an autograd graph has just computed."""
    return torch.randn(16, 32, requires_grad=True) * 2


def test_readers_of_one_tensor_share_its_operands_while_it_lives_unwritten():
    shared, x = SharedInput(), graph_output()
    make = Maker(x)
    first = shared.operands(x, "plan", make.both)
    assert shared.operands(x, "plan", make.both) is first
    assert shared.operands(x, "another", make.both) is not first
    with torch.no_grad():
        x.mul_(2)
    shared.operands(x, "another", make.both)
    shared.operands(x.view(16, 32), "another", make.both)
    assert make.made == 4


def test_shared_operands_go_with_their_tensor_whichever_thread_frees_it():
    shared, x = SharedInput(), [graph_output()]
    shared.operands(x[0], "plan", lambda: (exact_operand(torch.ones(16, 16), OperandSpec(), 1),))
    assert shared._threads.last.entry is not None
    thread = threading.Thread(target=x.clear)
    thread.start()
    thread.join()
    assert shared._threads.last.entry is None


def test_threads_share_no_operands():
    shared, x = SharedInput(), graph_output()
    make = Maker(x)

    def read():
        for _ in range(2):
            shared.operands(x, "plan", make.both)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert make.made == 3


class Siblings(nn.Module):
    """Layers that read one tensor."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, width) for width in (48, 32, 64))

    def forward(self, x):
        return torch.cat([layer(x) for layer in self.layers], -1)


@pytest.fixture
def siblings(monkeypatch):
    """Converted siblings, and the tensors that are quantized as inputs."""
    model, quantized = Siblings(), []
    convert(model, "nvfp4-naive")
    set_step(model, 0)
    monkeypatch.setattr(linear_module, "_last_input", SharedInput())
    operands = compute._operands

    def counting(side, call, x):
        if side.roles[0] == "fprop.lhs":
            quantized.append(x)
        return operands(side, call, x)

    monkeypatch.setattr(compute, "_operands", counting)
    return model, quantized


def test_sibling_layers_quantize_the_output_of_an_autograd_graph_once(siblings):
    model, quantized = siblings
    x = graph_output()
    y = model(x)
    assert len(quantized) == 1
    assert torch.equal(y, torch.cat([layer(x.clone()) for layer in model.layers], -1))


@pytest.mark.parametrize("kind", ["a buffer", "no_grad", "inference_mode", "frozen weights"])
def test_tensors_that_others_may_write_unseen_are_quantized_at_every_use(siblings, kind):
    """Collectives, raw kernels and replays of CUDA graphs write buffers without advancing their version."""
    model, quantized = siblings
    x = torch.randn(16, 32) if kind == "a buffer" else graph_output()
    if kind in ("no_grad", "inference_mode"):
        with getattr(torch, kind)():
            model(x)
    else:
        model(x) if kind == "a buffer" else model.requires_grad_(False)(x)
    assert len(quantized) == 3


def test_tensors_that_something_traces_go_through_the_operators():
    assert runs_eagerly(torch.ones(2))
    assert not runs_eagerly(torch.ones(2, device="meta"))


def test_a_shared_input_in_high_precision_is_freed_with_its_graph():
    """With a BF16 forward they share the input itself; the cache must not hold the graph that computed it."""
    recipe = replace(get_recipe("nvfp4-naive"), name="backward-only", fprop=GemmSpec())
    first, second = (nn.Linear(32, 32, dtype=torch.bfloat16) for _ in range(2))
    model = nn.Sequential(first, second)
    convert(model, recipe)
    set_step(model, 0)
    hidden = first(torch.ones(16, 32, dtype=torch.bfloat16))
    second(hidden).float().sum().backward()
    alive = weakref.ref(hidden)
    del hidden
    assert alive() is None
