"""torch.compile sees a converted model as one graph, whatever the recipe, and changes no bit."""

import pytest
import torch
from torch import Tensor, nn

from fourbits.linear import sr_counter
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from support.assertions import assert_same_bytes
from support.straight_through import grad_of

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
