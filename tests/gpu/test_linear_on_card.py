"""A converted model on a card: what it makes once and uses again, and CUDA graphs, change no bit."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from fourbits import convert, get_recipe, set_step
from fourbits.linear import operand_cache as reuse
from fourbits.model.lm import LanguageModel
from fourbits.recipe.recipe import GemmSpec, KeepBF16
from fourbits.train import cuda_graph
from fourbits.train.config import OptimConfig
from fourbits.train.cuda_graph import CapturedGradients
from fourbits.train.optim import MasterOptimizer
from model.shapes import small_config

pytestmark = pytest.mark.gpu

CARD = torch.device("cuda")
MICRO_BATCHES = 2


class Branches(nn.Module):
    """Three linears that read one tensor, and one behind them."""

    def __init__(self):
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(48, width, bias=width == 80) for width in (64, 64, 80))
        self.out = nn.Linear(64, 48)

    def forward(self, x):
        a, b, c = (linear(x) for linear in self.inputs)
        return self.out(a * b) + c[..., :48]


def delayed(name):
    recipe = get_recipe(name)
    lhs = replace(recipe.fprop.lhs, amax_policy="delayed")
    return replace(recipe, fprop=GemmSpec(lhs=lhs, rhs=recipe.fprop.rhs))


def gradients(model, x):
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "fp8", "nvfp4-naive", "quartet2"])
@pytest.mark.parametrize("shape", [(2, 64), (3, 17)], ids=str)
def test_a_shared_input_and_its_one_read_give_the_operators_bits(recipe, shape, monkeypatch):
    model = Branches().to(CARD)
    convert(model, recipe)
    set_step(model, 3, first_token=16)
    x = torch.randn(*shape, 48, device=CARD).to(torch.bfloat16).float()
    found = gradients(model, x)
    monkeypatch.setattr("fourbits.linear.module.runs_directly", lambda x: False)
    assert_same(found, gradients(model, x))
    monkeypatch.setattr("fourbits.linear.operands.Call.one_read_of_input", lambda call, x: False)
    assert_same(found, gradients(model, x))


def test_an_input_written_between_two_linears_is_quantized_anew():
    first = nn.Linear(48, 64, bias=False).to(CARD)
    second = copy.deepcopy(first)
    model = nn.ModuleList((first, second))
    convert(model, "nvfp4")
    set_step(model, 0)
    x = torch.randn(32, 48, device=CARD)
    with torch.no_grad():
        before = first(x)
        x.mul_(-1.5)
        after = second(x)
        assert torch.equal(after, second(x.clone()))
        assert not torch.equal(after, before)


@pytest.mark.parametrize("write", ["fused", "data", "foreach"])
def test_no_optimizer_leaves_a_stale_weight(write):
    """The fused one and writes through .data leave the version of a weight as it was."""
    linear = nn.Linear(64, 64, bias=False).to(CARD)
    model = nn.Sequential(linear)
    convert(model, "nvfp4")
    x = torch.randn(32, 64, device=CARD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=write == "fused")

    def update():
        if write == "data":
            linear.weight.data.mul_(-1.5)
        else:
            optimizer.step()

    for step in range(3):
        for micro_batch in range(2):
            set_step(model, step, first_token=32 * micro_batch)
            y = model(x)
            fresh = copy.deepcopy(model)
            assert torch.equal(y, fresh(x)), (step, micro_batch)
            y.square().sum().backward()
        update()
        assert torch.equal(model(x), copy.deepcopy(model)(x)), "before the next set_step"


def test_a_weight_is_quantized_once_for_all_micro_batches_of_a_step(monkeypatch):
    model = nn.Sequential(nn.Linear(64, 64)).to(CARD)
    convert(model, "nvfp4")
    x = torch.randn(32, 64, device=CARD)
    made = []
    operand = reuse.KeptWeight.operand

    def counting(self, weight, table, make):
        return operand(self, weight, table, lambda: made.append(1) or make())

    monkeypatch.setattr(reuse.KeptWeight, "operand", counting)
    for step in range(3):
        for micro_batch in range(4):
            set_step(model, step, first_token=32 * micro_batch)
            model(x).sum().backward()
    assert len(made) == 2 + 1 + 1  # in the first step it is not known at once that there are several


def with_inputs_packed(name):
    return replace(get_recipe(name), saved_inputs="packed")


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "mxfp8"])
def test_packed_inputs_give_the_gradients_of_exact_ones(recipe):
    x, found = torch.randn(144, 48, device=CARD), []
    for name in (recipe, with_inputs_packed(recipe)):
        torch.manual_seed(1)
        model = Branches().to(CARD)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fourbits: the eager reference")  # nothing unpacks mxfp8
            convert(model, name)
            set_step(model, 3)
            found.append(gradients(model, x))
    assert_same(*found)


@pytest.mark.parametrize("blocks", ["kept", "recomputed"])
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4", "fp8", "nvfp4 packed"])
def test_captured_steps_have_the_bits_of_eager_ones(recipe, blocks):
    samples = torch.randint(64, (4, MICRO_BATCHES, 2, 33), device=CARD)
    recipe = with_inputs_packed("nvfp4") if recipe == "nvfp4 packed" else recipe

    def trained(captures):
        model = LanguageModel(small_config("M-*T"), seed=0).to(CARD)
        model.recompute_blocks = captures and blocks == "recomputed"
        convert(model, recipe)
        masters = list(model.parameters())
        optimizer = MasterOptimizer(dict(model.named_parameters()), OptimConfig(lr=1e-2))

        def add_gradients(batch):
            loss = model.loss(batch[:, :-1], batch[:, 1:])[0] / 128
            loss.backward()
            return loss.detach()

        assert cuda_graph.unsupported(model, CARD) is None
        captured = CapturedGradients(add_gradients, model, masters)
        losses = []
        for step, batches in enumerate(samples):
            total = torch.zeros((), device=CARD)
            for i, batch in enumerate(batches):
                set_step(model, step, first_token=64 * i)
                total += captured(batch, i == 0) if captures else add_gradients(batch)
            optimizer.step(1e-2, total, torch.zeros((), device=CARD))
            losses.append(total)
        return [*losses, *masters]

    assert_same(trained(captures=True), trained(captures=False))


def test_a_graph_of_ones_own_quantizes_what_its_replays_find():
    """A linear that has read the graph's input before its capture keeps operands of what was in it then."""
    model = nn.Sequential(nn.Linear(48, 64)).to(CARD)
    convert(model, replace(get_recipe("nvfp4"), keep_bf16=KeepBF16(names=())))
    set_step(model, 0)
    x, graph = torch.randn(32, 48, device=CARD), torch.cuda.CUDAGraph()
    with torch.no_grad():
        model(x)
        with torch.cuda.graph(graph):
            y = model(x)
        x.copy_(torch.randn(32, 48, device=CARD))
        graph.replay()
        assert torch.equal(y, model(x.clone()))


def test_recipes_that_depend_on_past_steps_are_not_captured():
    model = Branches().to(CARD)
    convert(model, delayed("nvfp4"))
    assert "amax policies" in (cuda_graph.unsupported(model, CARD) or "")
