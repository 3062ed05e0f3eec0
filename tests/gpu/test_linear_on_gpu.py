"""A converted model on a GPU: what it computes once and uses again, and CUDA graphs, change no bit."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from fourbits import convert, get_recipe, set_step
from fourbits.linear import plan
from fourbits.linear.module import QuantizedLinear
from fourbits.linear.operand_cache import KeptWeight, SharedInput
from fourbits.model.lm import LanguageModel
from fourbits.recipe.recipe import GemmSpec, KeepBF16
from fourbits.train import cuda_graph
from fourbits.train.config import OptimConfig
from fourbits.train.cuda_graph import CapturedGradients
from fourbits.train.optim import MasterOptimizer
from model.shapes import small_config
from support.branches import Branches, assert_same, gradients

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
MICRO_BATCHES = 2


def delayed(name):
    recipe = get_recipe(name)
    lhs = replace(recipe.fprop.lhs, amax_policy="delayed")
    return replace(recipe, fprop=GemmSpec(lhs=lhs, rhs=recipe.fprop.rhs))


def plans_of(model):
    """The plans of one of the linears that read one tensor, and whether a cast comes before them."""
    linear = model.inputs["a"]
    assert isinstance(linear, QuantizedLinear)
    return list(linear.quantization.plans.values())


@pytest.fixture
def own_plans():
    """Plans that a test has changed are not for others."""
    plan.linear_plan.cache_clear()
    yield
    plan.linear_plan.cache_clear()


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "fp8", "nvfp4-naive", "quartet2"])
@pytest.mark.parametrize("shape", [(2, 64), (3, 17)], ids=str)
def test_a_shared_input_and_its_one_read_give_the_operators_bits(recipe, shape, monkeypatch, own_plans):
    model = Branches().to(GPU)
    convert(model, recipe)
    x = torch.randn(*shape, 48, device=GPU).to(torch.bfloat16).float()
    found = gradients(model, x)
    with monkeypatch.context() as patch:
        patch.setattr("fourbits.linear.module.runs_eagerly", lambda x: False)
        assert_same(found, gradients(model, x))
    monkeypatch.setattr(SharedInput, "operands", lambda self, source, how, make: make())
    assert_same(found, gradients(model, x))
    plan.linear_plan.cache_clear()
    monkeypatch.setattr(plan, "one_pass", lambda x, requests: False)
    separate = copy.deepcopy(model)  # which has no plans yet
    assert_same(found, gradients(separate, x))
    assert all(made.keeps_input == plan.keeps_row(made.table) for made, _ in plans_of(separate))


@pytest.mark.parametrize("trains", [False, True], ids=["evaluation", "training"])
def test_an_input_written_between_two_linears_is_quantized_anew(trains):
    first = nn.Linear(48, 64, bias=False).to(GPU)
    second = copy.deepcopy(first)
    model = nn.ModuleList((first, second))
    convert(model, "nvfp4")
    set_step(model, 0)
    x = torch.randn(32, 48, device=GPU, requires_grad=trains) * 1.0
    before = first(x)
    with torch.no_grad():
        x.mul_(-1.5)
    after = second(x)
    assert torch.equal(after, second(x.clone()))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("write", ["fused", "data", "foreach"])
def test_no_optimizer_leaves_a_stale_weight(write):
    """The fused one and writes through .data leave the version of a weight as it was."""
    linear = nn.Linear(64, 64, bias=False).to(GPU)
    model = nn.Sequential(linear)
    convert(model, "nvfp4")
    x = torch.randn(32, 64, device=GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=write == "fused")

    def update():
        if write == "data":
            linear.weight.data.mul_(-1.5)
        else:
            optimizer.step()

    for step in range(3):
        for micro_batch in range(2):
            set_step(model, step, first_token=32 * micro_batch, same_weights=micro_batch > 0)
            y = model(x)
            fresh = copy.deepcopy(model)
            assert torch.equal(y, fresh(x)), (step, micro_batch)
            y.square().sum().backward()
        update()
        assert torch.equal(model(x), copy.deepcopy(model)(x)), "before the next set_step"


def test_a_weight_is_quantized_once_for_all_micro_batches_of_a_step(monkeypatch):
    model = nn.Sequential(nn.Linear(64, 64)).to(GPU)
    convert(model, "nvfp4")
    x = torch.randn(32, 64, device=GPU)
    made = []
    operand = KeptWeight.operand

    def counting(self, weight, plan, counter, make):
        return operand(self, weight, plan, counter, lambda: made.append(1) or make())

    monkeypatch.setattr(KeptWeight, "operand", counting)
    for step in range(3):
        for micro_batch in range(4):
            set_step(model, step, first_token=32 * micro_batch, same_weights=micro_batch > 0)
            model(x).sum().backward()
    assert len(made) == 2 + 1 + 1  # in the first step it is not known at once that there are several


def with_inputs_packed(name):
    return replace(get_recipe(name), saved_inputs="packed")


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "mxfp8"])
def test_packed_inputs_give_the_gradients_of_exact_ones(recipe):
    x, found = torch.randn(144, 48, device=GPU), []
    for name in (recipe, with_inputs_packed(recipe)):
        torch.manual_seed(1)
        model = Branches().to(GPU)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fourbits: the eager reference")  # nothing unpacks mxfp8
            convert(model, name)
            found.append(gradients(model, x))
    assert_same(*found)


@pytest.mark.parametrize("blocks", ["kept", "recomputed"])
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4", "fp8", "nvfp4 packed", "nvfp4 with sums of sm_100"])
def test_captured_steps_have_the_bits_of_eager_ones(recipe: str, blocks: str):
    samples = torch.randint(64, (4, MICRO_BATCHES, 2, 33), device=GPU)
    changed = {
        "nvfp4 packed": with_inputs_packed("nvfp4"),
        "nvfp4 with sums of sm_100": replace(get_recipe("nvfp4"), sums="sm_100"),
    }

    def trained(captures):
        model = LanguageModel(small_config("M-*T"), seed=0).to(GPU)
        model.recompute_blocks = captures and blocks == "recomputed"
        convert(model, changed.get(recipe, recipe))
        masters = list(model.parameters())
        optimizer = MasterOptimizer(dict(model.named_parameters()), OptimConfig(lr=1e-2))

        def add_gradients(batch):
            loss = model.loss(batch[:, :-1], batch[:, 1:])[0] / 128
            loss.backward()
            return loss.detach()

        assert cuda_graph.unsupported(model, GPU) is None
        captured = CapturedGradients(add_gradients, model, masters)
        losses = []
        for step, batches in enumerate(samples):
            total = torch.zeros((), device=GPU)
            for i, batch in enumerate(batches):
                set_step(model, step, first_token=64 * i, same_weights=i > 0)
                total += captured(batch, i == 0) if captures else add_gradients(batch)
            optimizer.step(1e-2, total, torch.zeros((), device=GPU))
            losses.append(total)
        return [*losses, *masters]

    assert_same(trained(captures=True), trained(captures=False))


@pytest.mark.parametrize("trains", [False, True], ids=["evaluation", "training"])
def test_a_graph_of_ones_own_quantizes_what_its_replays_find(trains):
    """A linear that has read the graph's input before its capture keeps operands of what was in it then."""
    model = nn.Sequential(nn.Linear(48, 64)).to(GPU)
    convert(model, replace(get_recipe("nvfp4"), keep_bf16=KeepBF16(names=())))
    set_step(model, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.set_grad_enabled(trains):
        x = torch.randn(32, 48, device=GPU, requires_grad=trains) * 1.0
        model(x)
        with torch.cuda.graph(graph):
            y = model(x)
        x.data.copy_(torch.randn(32, 48, device=GPU))
        graph.replay()
        assert torch.equal(y, model(x.clone()))


#: recipes whose kernels read an FP32 input as autocast rounds it, and one whose packed operands need a cast
AUTOCAST = ["nvfp4", "mxfp4", "fp8", "nvfp4-46", "quartet2", "nvfp4 packed"]


@pytest.mark.parametrize("recipe", AUTOCAST)
def test_fp32_inputs_under_autocast_give_the_bits_of_a_cast_before(recipe):
    model = Branches().to(GPU)
    convert(model, with_inputs_packed("nvfp4") if recipe == "nvfp4 packed" else recipe)
    cast, x = copy.deepcopy(model), torch.randn(3, 40, 48, device=GPU)
    for linear in cast.inputs.values():
        linear.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(torch.bfloat16),))
    with torch.autocast("cuda", torch.bfloat16):
        found, wanted = gradients(model, x), gradients(cast, x)
    assert found[0].dtype == torch.bfloat16
    assert_same(found, wanted)
    if recipe == "nvfp4":
        ((used, casts),) = plans_of(model)
        assert (used.x.dtype, casts) == (torch.float32, False), "kernels round as they read"


def test_sums_that_the_host_decides_on_are_not_captured():
    model = Branches().to(GPU)
    convert(model, replace(get_recipe("nvfp4"), sums="sm_90"))
    assert "sums sm_90 have no kernel" in (cuda_graph.unsupported(model, GPU) or "")


def test_recipes_that_depend_on_past_steps_are_not_captured():
    model = Branches().to(GPU)
    convert(model, delayed("nvfp4"))
    assert "amax policies" in (cuda_graph.unsupported(model, GPU) or "")
