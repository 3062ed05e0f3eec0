"""A small model in which several linear layers read one tensor, and the results of one training step."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fourbits import set_step


class Branches(nn.Module):
    """Three linear layers that read one tensor, and one after them."""

    def __init__(self) -> None:
        super().__init__()
        widths = {"a": 64, "b": 64, "c": 80}  # not a ModuleList, whose last entries recipes keep in BF16
        self.inputs = nn.ModuleDict({name: nn.Linear(48, widths[name], name == "c") for name in widths})
        self.out = nn.Linear(64, 48)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (linear(x) for linear in self.inputs.values())
        return self.out(a * b) + c[..., :48]


def gradients(model: nn.Module, x: Tensor, step: int = 3, first_token: int = 16) -> list[Tensor]:
    """Y and the gradients of X and of all parameters, in one new micro-batch.

    The model reads the output of an autograd graph, as layers inside a model do, so its layers share
    operands.
    """
    set_step(model, step, first_token=first_token)
    x = x.detach().requires_grad_()
    y = model(x.clone())
    grads = torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()])
    return [y.detach(), *grads]


def assert_same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
