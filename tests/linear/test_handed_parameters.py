"""A parameter that a module hands to one below it is counted if that one multiplies by it."""

import torch
from torch import Tensor, nn

import fourbits as fb


class Rotation(nn.Module):
    """Multiplies by what it gets, in a method of its own."""

    def forward(self, pos: Tensor, x: Tensor) -> Tensor:
        return self._turned(pos.float(), x)

    def _turned(self, pos: Tensor, x: Tensor) -> Tensor:
        return torch.einsum("bi,io->bo", x, pos)


class Shift(nn.Module):
    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        return x + by


class Hands(nn.Module):
    """Hands parameters to modules below it, as Mochi's transformer of diffusers does."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_mix, self.pos_shift = (nn.Parameter(torch.randn(32, 32) / 6) for _ in range(2))
        self.rotation, self.shift, self.body = Rotation(), Shift(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.shift(self.rotation(self.pos_mix, x), by=self.pos_shift))


def test_a_parameter_is_counted_if_a_submodule_multiplies_by_it_and_not_if_it_adds_it():
    summary = fb.convert(Hands(), "nvfp4-naive")
    assert {row.name for row in summary.rows} == {"pos_mix", "body"}
    assert [row.name for row in summary.others] == ["pos_shift"]
