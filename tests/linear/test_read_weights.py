"""A layer whose weight its class only reads is not claimed, whatever variable, loop or function reads it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fourbits as fb

RECIPE = "nvfp4-naive"


def mixed(x: Tensor, layer: nn.Linear) -> Tensor:
    weight = layer.weight
    return F.linear(x, weight, layer.bias)


def twice(x: Tensor, layer: nn.Linear) -> Tensor:
    return mixed(mixed(x, layer), layer)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.t() @ x


class Reader(nn.Module):
    """Calls `called`, and only reads `past` and the layers in `listed` and `keyed`."""

    listed: Any
    keyed: Any

    def __init__(self) -> None:
        super().__init__()
        self.called, self.past = nn.Linear(32, 32), nn.Linear(32, 32)
        self.listed = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.keyed = nn.ModuleDict({"a": nn.Linear(32, 32)})


class InALoop(Reader):
    def forward(self, x: Tensor) -> Tensor:
        for m in self.listed:
            x = F.linear(x, m.weight)
        return self.called(x)


class ByIndex(Reader):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.listed)):
            x = x @ self.listed[i].weight.t()
        return self.called(x)


class Enumerated(Reader):
    def forward(self, x: Tensor) -> Tensor:
        for i, (m, other) in enumerate(zip(self.listed, reversed(list(self.listed)), strict=True)):
            x = F.linear(x, m.weight, other.bias) * i
        return self.called(x)


class Comprehended(Reader):
    def forward(self, x: Tensor) -> Tensor:
        return self.called(sum(F.linear(x, m.weight) for m in self.listed))


class Keyed(Reader):
    def forward(self, x: Tensor) -> Tensor:
        for key, m in self.keyed.items():
            x = F.linear(x, m.weight) + len(key)
        for m in self.keyed.values():
            x = F.linear(x, m.weight)
        return self.called(x)


class ByVariable(Reader):
    def forward(self, x: Tensor) -> Tensor:
        layer, w = self.past, self.past.weight
        return self.called(F.linear(x, w, layer.bias))


class ByName(Reader):
    def forward(self, x: Tensor) -> Tensor:
        for name in ("past",):
            x = F.linear(x, getattr(self, name).weight)
        return self.called(x)


class ByHelper(Reader):
    def forward(self, x: Tensor) -> Tensor:
        return self.called(twice(x, layer=self.past))


class ByMethod(Reader):
    def forward(self, x: Tensor) -> Tensor:
        return self.called(self._apply_to(self.past, x))

    def _apply_to(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight)


class ByFunction(Reader):
    def forward(self, x: Tensor) -> Tensor:
        return self.called(Squared.apply(x, self.past.weight))


class ByNestedFunction(Reader):
    def forward(self, x: Tensor) -> Tensor:
        def inner(layer: nn.Linear) -> Tensor:
            return F.linear(x, layer.weight)

        return self.called(inner(self.past))


class Overridden(Reader):
    """Its base calls the layer, in a method that it replaces."""

    def forward(self, x: Tensor) -> Tensor:
        return self.called(F.linear(x, self.past.weight))


class Base(Overridden):
    def forward(self, x: Tensor) -> Tensor:
        return self.called(self.past(x))


class OverridesACall(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.called(F.linear(x, self.past.weight))


LISTED, PAST = {"listed.0", "listed.1"}, {"past"}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        *((kind, LISTED) for kind in (InALoop, ByIndex, Enumerated, Comprehended)),
        (Keyed, {"keyed.a"}),
        *((kind, PAST) for kind in (ByVariable, ByName, ByHelper, ByMethod, ByFunction, ByNestedFunction)),
        (OverridesACall, PAST),
    ],
)
def test_a_layer_that_is_only_read_is_not_claimed_and_what_runs_agrees(kind, expected):
    model: Any = kind()
    with_gradient = copy_of_gradients(model)
    summary = fb.convert(model, RECIPE)
    reasons = {row.name: row.reason for row in summary.rows if not row.quantized}
    assert reasons == dict.fromkeys(expected, f"{kind.__name__} reads this weight and never calls the layer")
    fb.set_step(model, 0)
    model(torch.randn(16, 32)).square().mean().backward()
    report = fb.audit(model)
    assert (report.called, report.bypassed) == (("called",), ())
    assert with_gradient == {"called", *expected}


def copy_of_gradients(model: Any) -> set[str]:
    """The layers whose weights a backward pass of the plain model reaches."""
    model(torch.randn(16, 32)).square().mean().backward()
    found = {name.removesuffix(".weight") for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {name for name in found if not name.endswith("bias")}


class CalledInALoop(Reader):
    def forward(self, x: Tensor) -> Tensor:
        scale = sum(m.weight.square().mean() for m in self.listed)
        for layer in self.listed:
            x = layer(x)
        return x * scale


class CalledByIndex(Reader):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            x = self.listed[i](x.to(self.listed[i].weight.dtype))
        return x


class CalledByAlias(Reader):
    def forward(self, x: Tensor) -> Tensor:
        layers = [*self.listed.children()] if x.is_cuda else list(self.listed)
        print(layers[0].weight.mean(), file=None) if x.is_cuda else None
        for layer in layers:
            x = layer.forward(x) * layer.weight.mean()
        return x


class CalledByHelper(Reader):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.listed:
            x = runs(x, layer)
        return x


def runs(x: Tensor, layer: nn.Linear) -> Tensor:
    return layer(x) * layer.weight.norm()


class CalledBySequential(Reader):
    def forward(self, x: Tensor) -> Tensor:
        return nn.Sequential(*self.listed)(x) + sum(m.weight.mean() for m in self.listed)


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


class CalledInside(nn.Module):
    """Reads a weight of a block that it calls as a whole."""

    listed: Any

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ModuleList(OwnBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.listed:
            x = block(x) + F.linear(x, block.up.weight)
        return x


class Initialized(Reader):
    def start(self) -> None:
        for m in self.listed:
            nn.init.normal_(m.weight)


@pytest.mark.parametrize(
    "kind",
    [
        CalledInALoop,
        CalledByIndex,
        CalledByAlias,
        CalledByHelper,
        CalledBySequential,
        CalledInside,
        Initialized,
    ],
)
def test_a_layer_that_is_also_called_or_only_initialized_is_claimed(kind):
    summary = fb.convert(kind(), RECIPE)
    listed = [row.quantized for row in summary.rows if row.name.startswith("listed")]
    assert listed == [True, True]


class Processor:
    """Calls layers of the module that it gets, as diffusers' attention processors do."""

    def __call__(self, attention: Any, x: Tensor) -> Tensor:
        return attention.called(attention.past(x))


class Processed(nn.Module):
    """Passes itself to another object; `fuse` only copies weights."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.past, self.processor = nn.Linear(32, 32), nn.Linear(32, 32), Processor()

    @torch.no_grad()
    def fuse(self) -> Tensor:
        return torch.cat([self.called.weight, self.past.weight])

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(self, x)


def multiplied_outside(module: Any, x: Tensor) -> Tensor:
    return module.called(F.linear(x, module.past.weight))


class PassesItself(Reader):
    """Passes itself to a function whose source shows that it never calls `past`."""

    def forward(self, x: Tensor) -> Tensor:
        return multiplied_outside(self, x)


@pytest.mark.parametrize(("kind", "kept"), [(Processed, set()), (PassesItself, {"past"})])
def test_a_module_that_passes_itself_on_may_have_its_layers_called_unless_the_source_shows_otherwise(
    kind, kept
):
    model: Any = kind()
    summary = fb.convert(model, RECIPE)
    quantized = {row.name for row in summary.rows if row.quantized}
    assert {"called", "past"} - quantized == kept
    fb.set_step(model, 0)
    model(torch.randn(16, 32)).square().mean().backward()
    assert set(fb.audit(model).called) & {"called", "past"} == {"called", "past"} - kept
