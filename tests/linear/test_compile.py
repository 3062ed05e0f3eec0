"""torch.compile sees a converted model as one graph, whatever the recipe, and changes no bit."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from fourbits.linear import sr_counter
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.operators import OVERLOAD
from support.assertions import assert_same_bytes
from support.straight_through import grad_of
from support.tables import TABLES, Parallel

# the compiler's own way to trace an autograd.Function
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def model_of(recipe: str) -> nn.Sequential:
    """Widths of 16 and not, with bias and without."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 32, bias=False))
    convert(model, recipe, seed=2)
    return model


def run(model: nn.Module, call, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    y.backward(torch.ones_like(y))
    return [y.detach(), grad_of(leaf), *(grad_of(p).clone() for p in model.parameters())]


def assert_equal_runs(actual: list[Tensor], expected: list[Tensor]) -> None:
    for got, want in zip(actual, expected, strict=True):
        assert_same_bytes(got, want)


@pytest.fixture(scope="module", autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_a_compiled_step_is_one_graph_with_eager_bits_and_new_steps_compile_nothing():
    model, x = model_of("nvfp4"), torch.randn(48, 32)
    compiled = torch.compile(model, fullgraph=True)
    for step in range(3):
        set_step(model, step)
        expected = run(model, model, x)
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            assert_equal_runs(run(model, compiled, x), expected)


class _SlicesItsBlocks(nn.Module):
    """As transformers' models do: a slice of a ModuleList is a new one, which registers its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        return x


def test_a_forward_that_registers_modules_compiles_once():
    """A model that has nothing of ours, too: what watches registrations watches those of the process."""
    model, x = _SlicesItsBlocks(), torch.randn(4, 32)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for step in range(3):
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            compiled(x)
        nn.Sequential(nn.Identity())


def test_a_counter_is_an_input_whose_address_may_change():
    """CUDA graphs are recorded again where an input moves that was taken to stay, as parameters are."""
    kinds = {}

    def backend(graph, _):
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                kinds[node.name] = node.meta["tensor_dict"].get("_dynamo_static_input_type")
        return graph.forward

    model = model_of("nvfp4")
    set_step(model, 0)
    torch.compile(model, backend=backend)(torch.randn(48, 32))
    counters = {name: kind for name, kind in kinds.items() if "counter" in name}
    assert list(counters.values()) == [None]
    assert "unguarded" in kinds.values()  # the parameters


def test_a_copied_model_has_a_separate_counter_in_graphs():
    model, x = model_of("nvfp4"), torch.randn(48, 32)
    set_step(model, 1)
    other = copy.deepcopy(model)
    set_step(other, 7)
    compiled = [torch.compile(m, fullgraph=True, backend="aot_eager") for m in (model, other)]
    assert_equal_runs(run(model, compiled[0], x), run(model, model, x))
    assert_equal_runs(run(other, compiled[1], x), run(other, other, x))


def test_a_compiled_layer_that_counts_itself_draws_the_bits_of_an_eager_one(monkeypatch):
    monkeypatch.setattr(sr_counter, "_warned", [True])
    eager, other, x = model_of("nvfp4"), model_of("nvfp4"), torch.randn(48, 32)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        assert_equal_runs(run(other, compiled, x), run(eager, eager, x))


def test_autocast_and_dtypes_compile_to_eager_bits():
    model, x = model_of("nvfp4-naive"), torch.randn(48, 32)
    set_step(model, 0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal_runs(run(model, compiled, x), run(model, model, x))


def compiled_graphs(model: nn.Module, *inputs: Tensor, train: bool = True) -> tuple[Any, list[GraphModule]]:
    """The model compiled without code generation, and the graphs that its runs add: forward and backward."""
    graphs: list[GraphModule] = []

    def record(graph: GraphModule, _inputs: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    # with Inductor's partitioner, which computes equal nodes once
    backend = aot_autograd(
        fw_compiler=record, bw_compiler=record, partition_fn=min_cut_rematerialization_partition
    )
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for x in inputs:
        y = compiled(x)
        if train:
            y.sum().backward()
    return compiled, graphs


def calls(graph: GraphModule, name: str) -> int:
    return sum(str(node.target) == f"fourbits.{name}.{OVERLOAD}" for node in graph.graph.nodes)


@pytest.mark.parametrize("shape", [(45, 50, 33), (130, 144, 48)], ids=str)
def test_every_recipe_compiles_to_eager_bits_over_odd_shapes(shape):
    """One graph for all tables: compilers have read strides that only multiples of a block have."""
    tokens, width, out = shape
    model, x = Parallel(TABLES.values(), width, out), torch.randn(tokens, width)
    set_step(model, 3)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_equal_runs(run(model, compiled, x), run(model, model, x))


@pytest.mark.parametrize("recipe", ["fp8", "mxfp4 packed"])
def test_code_is_generated_for_scales_in_odd_shapes(recipe):
    model, x = Parallel([TABLES[recipe]], 50, 33), torch.randn(45, 50)
    set_step(model, 3)
    assert_equal_runs(run(model, torch.compile(model), x), run(model, model, x))


def test_layers_that_read_the_same_tensor_quantize_it_once():
    model = Parallel([TABLES["nvfp4"]] * 3, 64, 32)
    set_step(model, 0)
    _, (forward, backward) = compiled_graphs(model, torch.randn(16, 64))
    assert calls(forward, "linear_inputs") == 1
    assert calls(forward, "linear_forward") == calls(backward, "linear_backward") == 3


def test_a_layer_adds_few_nodes_to_the_front_ends_graph_and_few_to_the_back_ends():
    """Compile time, as a count: the front end takes milliseconds per node. An nn.Linear has one of each."""

    def nodes(layers: int) -> list[int]:
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(layers)))
        convert(model, "nvfp4")
        set_step(model, 0)
        front, x = torch._dynamo.export(model)(torch.randn(16, 32)).graph_module, torch.randn(16, 32)
        torch._dynamo.reset()
        _, back = compiled_graphs(model, x)
        return [len(graph.graph.nodes) for graph in (front, *back)]

    few, more = nodes(2), nodes(4)
    front, forward, backward = ((b - a) / 2 for a, b in zip(few, more, strict=True))
    assert front <= 2  # the operator, and the weight it reads
    assert forward <= 11
    assert backward <= 8


def test_a_switch_of_the_recipe_compiles_once_and_other_steps_nothing():
    model, x = model_of("nvfp4"), torch.randn(48, 32)
    set_step(model, 0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    run(model, compiled, x)
    convert(model, "mxfp4", seed=2)
    set_step(model, 1)
    run(model, compiled, x)
    for step in range(2, 5):
        set_step(model, step)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert_equal_runs(run(model, compiled, x), run(model, model, x))


def test_new_numbers_of_tokens_compile_once_more_and_then_nothing():
    model = model_of("nvfp4")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for tokens in (48, 80, 33, 17, 121, 16):
        x = torch.randn(tokens, 32)
        set_step(model, tokens)
        with torch.compiler.set_stance("default" if tokens in (48, 80) else "fail_on_recompile"):
            assert_equal_runs(run(model, compiled, x), run(model, model, x))


class _Chunks(nn.Module):
    """Calls each layer on two chunks of a sequence, of which the first ends within a block."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.recomputes = first, False
        self.layers = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))

    def forward(self, x: Tensor) -> Tensor:
        chunks = x.split([self.first, x.shape[0] - self.first])
        if self.recomputes:
            return torch.cat([checkpoint(self.layers, chunk, use_reentrant=False) for chunk in chunks])
        return torch.cat([self.layers(chunk) for chunk in chunks])


@pytest.mark.parametrize("set_steps", [True, False])
def test_a_layer_called_in_chunks_draws_in_a_graph_what_it_draws_eagerly(set_steps, monkeypatch):
    """Each chunk bits of its own, for new numbers of tokens, too, without another compilation."""
    monkeypatch.setattr(sr_counter, "_warned", [True])
    model = _Chunks(20)
    convert(model, "nvfp4", keep_first=0, keep_last=0)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for step, tokens in enumerate((53, 90, 41)):
        x = torch.randn(tokens, 32)
        if set_steps:
            set_step([model, other], step)
        with torch.compiler.set_stance("default" if step < 2 else "fail_on_recompile"):
            assert_equal_runs(run(other, compiled, x), run(model, model, x))


def test_equal_chunks_get_gradients_with_different_noise():
    model, half = _Chunks(32), torch.randn(32, 32)
    convert(model, "nvfp4", keep_first=0, keep_last=0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    set_step(model, 0)
    y, dx, *_ = run(model, compiled, torch.cat([half, half]))
    assert_same_bytes(y[:32], y[32:])  # the forward pass rounds to nearest
    assert not torch.equal(dx[:32], dx[32:])


def test_chunks_that_a_graph_recomputes_repeat_their_bits():
    model, x = _Chunks(32), torch.randn(80, 32)
    convert(model, "nvfp4", keep_first=0, keep_last=0)
    set_step(model, 0)
    expected = run(model, model, x)
    model.recomputes = True
    assert_equal_runs(run(model, torch.compile(model, fullgraph=True, backend="aot_eager"), x), expected)


def test_blocks_that_are_compiled_one_by_one_share_their_code():
    """They differ in the layer's number and in weights; the third is served by the code of the second."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4))
    convert(blocks, "nvfp4-naive")
    set_step(blocks, 0)
    x = torch.randn(16, 32)
    for place, block in enumerate(blocks):
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        with torch.compiler.set_stance("default" if place < 2 else "fail_on_recompile"):
            assert_equal_runs(run(block, compiled, x), run(block, block, x))
