"""Stacked weights of any module: its own forward runs, and its products have the bits of linear layers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional as F

from fourbits.linear.audit import audit
from fourbits.linear.convert import convert
from fourbits.linear.stacked.find import order_of_einsum
from fourbits.linear.step import set_step
from support.assertions import assert_same_bytes

library: Any = torch  # whose grouped GEMM has no public name before 2.10
EXPERTS, WIDTH, INNER = 4, 32, 48
COUNTS = torch.tensor([5, 0, 32, 11])


def _run_grouped(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """As torchtitan's GroupedExperts."""
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    h = F.silu(library._grouped_mm(x.bfloat16(), w1.bfloat16().transpose(-2, -1), offs=ends))
    h = h * library._grouped_mm(x.bfloat16(), w3.bfloat16().transpose(-2, -1), offs=ends)
    return library._grouped_mm(h, w2.bfloat16().transpose(-2, -1), offs=ends).type_as(x)


def _run_loop(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    found = []
    for expert, rows in enumerate(torch.split(x, counts.tolist(), dim=0)):
        h = F.silu(torch.matmul(rows, w1[expert].transpose(-2, -1)))
        h = h * torch.matmul(rows, w3[expert].transpose(-2, -1))
        found.append(torch.matmul(h, w2[expert].transpose(-2, -1)))
    return torch.cat(found)


class GroupedExperts(nn.Module):
    """torchtitan's: three parameters [E, out, in], tokens sorted by expert, counts on the device."""

    def __init__(self, use_grouped_mm: bool) -> None:
        super().__init__()
        self.num_experts, self.use_grouped_mm = EXPERTS, use_grouped_mm
        self.w1 = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.w2 = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.w3 = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        run = _run_grouped if self.use_grouped_mm else _run_loop
        return run(self.w1, self.w2, self.w3, x, counts)


class _Plain(nn.Module):
    """Two parameters; `experts_in` is [E, in, out] and `experts_out` [E, out, in]."""

    def __init__(self) -> None:
        super().__init__()
        self.experts_in = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.experts_out = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))


class Bmm(nn.Module):
    """Whose names say nothing of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.second = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(F.relu(torch.bmm(x, self.first)), self.second.mT)


class Operators(_Plain):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x @ self.experts_in) @ self.experts_out.transpose(1, 2)


class Einsum(_Plain):
    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(torch.einsum("ecd,edh->ech", x, self.experts_in))
        return torch.einsum("e c h, e d h -> e c d", h, self.experts_out)


class Iterated(_Plain):
    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(x.unbind(0), self.experts_in, self.experts_out.unbind(0), strict=True)
        return torch.stack([F.linear(F.relu(rows @ up), down) for rows, up, down in pairs])


PLAIN: list[Callable[[], Any]] = [Bmm, Operators, Einsum, Iterated]


class Loop(nn.Module):
    """The same products by linear layers: first all of one parameter, then all of the next."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for weight in weights:
            for one in weight:
                linear = nn.Linear(one.shape[1], one.shape[0], bias=False)
                linear.weight.data.copy_(one)
                self.layers.append(linear)

    def grouped(self, place: int, x: Tensor, counts: list[int]) -> Tensor:
        parts = x.split(counts)
        found = [self.layers[place * EXPERTS + e](part) for e, part in enumerate(parts) if len(part)]
        return torch.cat(found)


def converted(model: nn.Module) -> Any:
    convert(model, "nvfp4", seed=5, keep_first=0, keep_last=0, stacks=[])
    return model


def initialized(model: Any) -> Any:
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def gradients(model: Any, *inputs: Tensor) -> list[Tensor]:
    """Output, and gradients of the input and of the parameters."""
    model.zero_grad()
    set_step(model, 2)
    x = inputs[0].clone().requires_grad_()
    y = model(x, *inputs[1:])
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # pyright: ignore


@pytest.mark.parametrize("use_grouped_mm", [True, False])
def test_grouped_experts_of_torchtitan_have_the_bits_of_linear_layers(use_grouped_mm):
    model = initialized(GroupedExperts(use_grouped_mm))
    loop = Loop([p.detach() for p in (model.w1, model.w2, model.w3)])
    x, counts = torch.randn(int(COUNTS.sum()), WIDTH).bfloat16(), COUNTS.tolist()
    found = gradients(converted(model), x, COUNTS)
    report = audit(model)
    assert (set(report.called), report.bypassed) == ({"w1", "w2", "w3"}, ())
    converted(loop)
    set_step(loop, 2)
    given = x.clone().requires_grad_()
    h = F.silu(loop.grouped(0, given, counts)) * loop.grouped(2, given, counts)
    y = loop.grouped(1, h, counts)
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    assert_same_bytes(found[0], y.detach())
    layers: list[Any] = list(loop.layers)
    stacks = [
        [torch.zeros_like(x.weight) if x.weight.grad is None else x.weight.grad for x in part]
        for part in (layers[i * EXPERTS : (i + 1) * EXPERTS] for i in range(3))
    ]
    for result, expected in zip(found[2:], stacks, strict=True):
        assert_same_bytes(result, torch.stack(expected))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_plain_parameters_of_either_order_have_the_bits_of_linear_layers(kind):
    model = initialized(kind())
    first, second = (p.detach() for p in model.parameters())
    loop = Loop([first.mT, second])
    x, rows = torch.randn(EXPERTS, 7, WIDTH), [7] * EXPERTS
    found = gradients(converted(model), x)
    assert list(audit(model).called) == [name for name, _ in model.named_parameters()]
    converted(loop)
    set_step(loop, 2)
    given = x.clone().requires_grad_()
    y = loop.grouped(1, F.relu(loop.grouped(0, given.flatten(0, 1), rows)), rows).view_as(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    assert_same_bytes(found[0], y.detach())
    assert_same_bytes(found[1], given.grad)  # pyright: ignore[reportArgumentType]
    weights: list[Any] = [layer.weight.grad for layer in loop.layers]
    assert_same_bytes(found[2], torch.stack(weights[:EXPERTS]).mT)
    assert_same_bytes(found[3], torch.stack(weights[EXPERTS:]))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [GroupedExperts, *PLAIN], ids=lambda kind: kind.__name__)
def test_graphs_do_not_break_and_keep_the_bits(kind: Any):
    torch._dynamo.reset()
    inputs: tuple[Tensor, ...] = (torch.randn(EXPERTS, 7, WIDTH),)
    if kind is GroupedExperts:
        inputs = torch.randn(int(COUNTS.sum()), WIDTH).bfloat16(), COUNTS
    arguments = (True,) if kind is GroupedExperts else ()
    made: Any = kind(*arguments)
    model = converted(initialized(made))
    expected = gradients(model, *inputs)
    assert torch._dynamo.explain(model)(*inputs).graph_break_count == 0
    model.compile(backend="aot_eager", fullgraph=True)
    for found, true in zip(gradients(model, *inputs), expected, strict=True):
        assert_same_bytes(found, true)


def test_outside_of_its_forward_a_parameter_is_a_parameter_and_bf16_restores_the_module():
    model = initialized(Bmm())
    before, x = dict(model.named_parameters()), torch.randn(EXPERTS, 7, WIDTH)
    plain = model(x)
    converted(model)
    assert model.first is before["first"]
    assert list(model.state_dict()) == ["first", "second"]
    assert_same_bytes(copy.deepcopy(model).first.detach(), model.first.detach())
    assert not torch.equal(model(x), plain)
    convert(model, "bf16")
    assert type(model) is Bmm
    assert_same_bytes(model(x), plain)


def test_a_use_that_is_no_product_of_experts_runs_in_high_precision_and_the_audit_lists_it():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
            self.mixed = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))

        def forward(self, x: Tensor) -> Tensor:
            equation = "ecd,fdh->ech"  # a source that spells it out in the call is not claimed
            return torch.bmm(x, self.up) + torch.einsum(equation, x, self.mixed)

    model, x = Experts(), torch.randn(EXPERTS, 3, WIDTH)
    converted(model)
    set_step(model, 0)
    y = model(x)
    y.sum().backward()
    report = audit(model)
    assert (report.called, report.bypassed) == (("up",), ("mixed",))
    mixed = torch.einsum("ecd,fdh->ech", x, model.mixed)
    assert 0 < torch.dist(y, torch.bmm(x, model.up) + mixed) < 0.3 * y.norm()


@pytest.mark.parametrize(
    ("equation", "order"),
    [
        ("ecd,edh->ech", True),
        ("ecd, ehd -> ech", False),
        ("bhd,hde->bhe", None),
        ("ecd,edh->ceh", None),
        ("ecd,edd->ecd", None),
        ("cd,edh->ech", None),
        ("ecd,edh", None),
        (None, None),
    ],
)
def test_products_of_stacks_are_known_among_equations(equation, order):
    assert order_of_einsum(equation) is order


@pytest.mark.parametrize("name", ["no product", "no experts"])
def test_a_class_that_shows_no_products_of_experts_is_listed_and_stays(name):
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))

    class Heads(Experts):
        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bhd,hde->bhe", x, self.w)

    model = nn.Sequential(nn.Linear(16, 16), {"no product": Experts, "no experts": Heads}[name]())
    summary = convert(model, "nvfp4-naive")
    kept = {row.name: row.reason for row in summary.rows if not row.quantized}
    kind = type(model[1]).__name__
    assert kept == {"1.w": f"stacked weights of {kind}, not a known group of linear layers"}


def test_a_stack_is_found_whatever_its_forward_calls_the_module():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1 = nn.Parameter(torch.randn(4, 32, 48))

        def forward(this, x):  # noqa: N805 - this is what is tested  # pyright: ignore[reportSelfClsParameterName]
            return torch.einsum("ecd,edh->ech", x, this.w1)

    (row,) = convert(nn.ModuleDict({"ffn": Stack()}), "nvfp4").rows
    assert row.quantized, row.reason
