"""What a call of a converted layer costs the host: Python calls, files entered, launches.

On a GPU the host must start kernels faster than the GPU finishes them. The kernels' path is walked here on
CPU tensors, with launches that do nothing.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import fourbits
from fourbits import convert, set_step

SOURCES = str(Path(fourbits.__file__).parent)


class Counted:
    """Our Python functions that ran while it watched, and the files that they are in."""

    def __init__(self) -> None:
        self.calls, self.files = 0, set[str]()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            self.calls += 1
            self.files.add(frame.f_code.co_filename)

    @classmethod
    def of(cls, run: Callable[[], object]) -> "Counted":
        counted = cls()
        sys.setprofile(counted)
        try:
            run()
        finally:
            sys.setprofile(None)
        return counted


class Layer:
    """A converted layer under autocast, as most models have it, and a batch."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 96, bias=False))
        convert(self.model, "nvfp4")
        set_step(self.model, 0)
        self.x = torch.randn(48, 64, dtype=torch.bfloat16, requires_grad=True)
        self.dy = torch.randn(48, 96, dtype=torch.bfloat16)
        for _ in range(2):
            self.backward(self.forward())
        set_step(self.model, 1)

    def forward(self) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(self.x)

    def backward(self, y: torch.Tensor) -> None:
        y.backward(self.dy)


def test_a_training_call_launches_two_kernels_per_tensor_and_one_per_gemm(launches):
    layer = Layer()
    launches.clear()
    layer.backward(layer.forward())
    assert sorted(launches) == ["amax_kernel"] * 3 + ["operands_kernel"] * 3 + ["tma_kernel"] * 3


@pytest.mark.usefixtures("launches")
def test_a_training_call_allocates_its_outputs_and_eight_small_tensors(monkeypatch):
    """Small: partial maxima of X, W and dY, global scales of two operands of X and dY and of one of W."""
    layer, sizes = Layer(), list[int]()

    def counting(allocate):
        def allocated(*arguments, **options):
            made = allocate(*arguments, **options)
            sizes.append(made.numel())
            return made

        return allocated

    for name in ("empty", "empty_strided", "zeros", "ones", "full", "tensor", "arange", "stack", "cat"):
        monkeypatch.setattr(torch, name, counting(getattr(torch, name)))
    layer.backward(layer.forward())
    values = [48 * 64] * 2 + [48 * 96] * 2 + [64 * 96]
    outputs = [48 * 96, 48 * 64, 64 * 96]
    assert sorted(size for size in sizes if size > 4) == sorted(values + outputs)
    assert len([size for size in sizes if size <= 4]) == 8


def test_a_second_call_runs_few_python_functions(launches):
    """About a microsecond each on a slow host, which leaves 0.2 ms for allocations and launches."""
    layer = Layer()
    y = layer.forward()
    forward = Counted.of(layer.forward)
    backward = Counted.of(lambda: layer.backward(y))
    assert forward.calls <= 55, forward.calls
    assert backward.calls <= 40, backward.calls


@pytest.mark.parametrize(
    ("path", "files"),
    [
        ("of a GPU", 12),
        # the specification has a file for each of its steps: docs/decisions.md, 10
        ("of a CPU", 19),
    ],
)
def test_a_call_enters_few_files(path, files, request):
    if path == "of a GPU":
        request.getfixturevalue("launches")
    layer = Layer()
    y = layer.forward()
    for walked in (Counted.of(layer.forward), Counted.of(lambda: layer.backward(y))):
        names = sorted(Path(name).relative_to(SOURCES).as_posix() for name in walked.files)
        assert len(names) <= files, names
