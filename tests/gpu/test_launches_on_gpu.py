"""What a linear layer launches on a GPU: how many kernels, and by the fast path after the first time."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fourbits
from fourbits import convert, set_step
from fourbits.gemm.kernels.launch_bf16 import bf16_gemm
from fourbits.gemm.kernels.tiles import best_work, gpu_model
from fourbits.linear.plan import linear_plan
from fourbits.quant.kernels import launcher as launcher_module
from fourbits.quant.kernels.launcher import Launcher
from support.branches import Branches, assert_same, gradients

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
TOKENS, WIDTH = 512, 768
SOURCES = Path(fourbits.__file__).parent
#: names of all kernels that linear layers may launch
OURS = {
    name
    for room in ("quant", "gemm", "linear")
    for path in (SOURCES / room).rglob("*_triton.py")
    for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
}


class Layer:
    """Training calls of one nvfp4 linear on inputs of one shape, in BF16 or under autocast."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False, device=GPU, dtype=dtype))
        convert(self.model, "nvfp4")
        self.x = torch.randn(TOKENS, WIDTH, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        self.dy = torch.randn(TOKENS, WIDTH, device=GPU, dtype=torch.bfloat16)

    def __call__(self) -> list[Tensor]:
        set_step(self.model, 0)
        with torch.autocast("cuda", torch.bfloat16):
            y = self.model(self.x)
        return [y.detach(), *torch.autograd.grad(y, [self.x, *self.model.parameters()], self.dy)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["FP32 weight", "BF16 weight"])
def layer(request):
    return Layer(request.param)


@pytest.fixture
def used(monkeypatch):
    """The launchers that are called from here on."""
    found: dict[int, Launcher] = {}
    launch = Launcher.__call__

    def counting(launcher, *arguments):
        found[id(launcher)] = launcher
        launch(launcher, *arguments)

    monkeypatch.setattr(Launcher, "__call__", counting)
    return found


def launched(call) -> Counter[str]:
    """How often a call that has run before launches each of our kernels."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        call()
        torch.cuda.synchronize()
    on_gpu = [event.name for event in recorded.events() or () if event.device_type.name == "CUDA"]
    return Counter(name for name in on_gpu if name in OURS)


def split_products() -> int:
    """How many of the three GEMMs leave their sums to a second kernel."""
    gpu = gpu_model(torch.zeros(0, device=GPU).device)
    shapes = [(TOKENS, WIDTH, WIDTH, False)] * 2 + [(WIDTH, WIDTH, TOKENS, True)]
    return sum(best_work(gpu, *shape).split_k > 1 for shape in shapes)


def product_kernel() -> str:
    return "tma_kernel" if gpu_model(torch.zeros(0, device=GPU).device).tma else "pointer_kernel"


def test_a_training_call_launches_two_kernels_per_tensor_and_one_per_gemm_at_most_eleven(layer):
    layer()
    found, sums = launched(layer), split_products()
    wanted = Counter({"amax_kernel": 3, "operands_kernel": 3, product_kernel(): 3, "sum_kernel": sums})
    assert found == wanted
    assert found.total() <= 11


def test_linears_that_read_one_tensor_launch_the_kernels_of_one():
    model, x = Branches().to(GPU), torch.randn(64, 48, device=GPU)
    convert(model, "nvfp4")
    gradients(model, x)
    found = launched(lambda: gradients(model, x))
    # four weights, four dY, and X for the three that read it together and for the one behind them
    assert (found["amax_kernel"], found["operands_kernel"]) == (10, 10)


def test_after_the_first_call_no_launch_goes_through_triton(layer, used, monkeypatch):
    first = layer()
    assert len(used) == 9 + split_products()
    for launcher in used.values():
        assert launcher._compiled
        assert None not in launcher._compiled.values(), launcher._kernel.fn.__name__

    def start(launcher, arguments):
        raise AssertionError(f"{launcher._kernel.fn.__name__} was launched by Triton")

    monkeypatch.setattr(Launcher, "_start", start)
    for _ in range(2):
        assert_same(layer(), first)


def test_a_tensor_map_is_encoded_once_per_address(layer, used, monkeypatch):
    if product_kernel() != "tma_kernel":
        pytest.skip("this GPU has no TMA")
    encoded: list[int] = []
    map_maker = launcher_module._map_maker

    def counting(meta, box):
        make = map_maker(meta, box)
        return lambda address: encoded.append(address) or make(address)

    monkeypatch.setattr(launcher_module, "_map_maker", counting)
    linear_plan.cache_clear()
    bf16_gemm.cache_clear()
    for _ in range(10):
        layer()
    by_tma = [launcher for launcher in used.values() if launcher._boxes]
    assert len(by_tma) == 3
    assert len(encoded) == sum(len(maps) for launcher in by_tma for maps in launcher._maps)
