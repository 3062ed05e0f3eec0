"""Whatever is written between calls, seen by autograd or not, layers compute from what is there."""

import pytest
import torch

from fourbits.linear import module
from fourbits.linear.operand_cache import KeptWeight, SharedInput
from support.random_writes import Sequence


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are small: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("recipe", "packed", "seeds"),
    [("nvfp4-naive", False, range(20)), ("nvfp4", False, range(20, 24)), ("nvfp4", True, range(24, 26))],
)
def test_writes_between_calls_leave_the_bits_of_a_fresh_model(recipe, packed, seeds):
    for seed in seeds:
        Sequence(seed, recipe, "cpu", packed=packed).run()


@pytest.mark.parametrize("cache", [KeptWeight.operand, SharedInput.operands], ids=["weights", "inputs"])
def test_these_sequences_use_operands_again(cache, monkeypatch):
    asked, made = [], []

    def counting(self, tensor, *how):
        *how, make = how
        asked.append(1)
        return cache(self, tensor, *how, lambda: made.append(1) or make())

    monkeypatch.setattr(KeptWeight if cache is KeptWeight.operand else SharedInput, cache.__name__, counting)
    for seed in range(6):
        Sequence(seed, "nvfp4-naive", "cpu").run()
    assert 0 < len(made) < len(asked)


def runs_of_other_bits() -> int:
    """How many sequences find bits that a fresh model does not have."""
    found = 0
    for seed in range(8):
        try:
            Sequence(seed, "nvfp4-naive", "cpu").run()
        except AssertionError:
            found += 1
    return found


def test_these_sequences_would_find_weights_that_are_kept_by_their_version(monkeypatch):
    kept = {}

    def by_version(self, weight, plan, counter, make):
        key = weight.data_ptr(), weight._version, plan
        if kept.get(self, (None,))[0] != key:
            kept[self] = key, make()
        return kept[self][1]

    monkeypatch.setattr(KeptWeight, "operand", by_version)
    assert runs_of_other_bits() >= 4


def test_these_sequences_would_find_inputs_that_are_shared_by_their_version(monkeypatch):
    last, forward = {}, module.forward

    def by_version(plan, call, bias, reuse_input=None, reuse_weight=None):
        key = call.x.data_ptr(), call.x._version, plan.input.quantize

        def shared(x, make):
            if last.get("key") != key:
                last.update(key=key, operands=make(), x=x)
            return last["operands"]

        return forward(plan, call, bias, shared, reuse_weight)

    monkeypatch.setattr(module, "forward", by_version)
    assert runs_of_other_bits() >= 4
