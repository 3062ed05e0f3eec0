"""The plan of a native linear layer: it lists what the code launches, and the page shows what it predicts."""

from pathlib import Path

import pytest
import torch

from fourbits.linear.native_gemms import with_native_gemms
from fourbits.plan.gpus import GPUS
from fourbits.plan.native_linear import RECIPE, Shape, bf16_launches, native_launches, predicted, seconds
from fourbits.quant.kernels.quantizers import kernel_quantizer
from fourbits.quant.request import OperandInputs, OperandRequest
from fourbits.recipe.presets import get_recipe
from support.gpus import planning_for
from support.kernel_builds import on_gpu, recording, signature

PAGE = Path(__file__).parents[2] / "docs" / "blackwell.md"
#: the shapes of `fourbits bench linear`
SHAPES = (Shape(8192, 5120, 20480), Shape(8192, 4096, 4096), Shape(8192, 2048, 6144))
KEY = torch.zeros(5, dtype=torch.int64)


def test_every_gemm_of_the_planned_recipe_is_native():
    assert with_native_gemms(get_recipe(RECIPE).table).native == ("fprop", "dgrad", "wgrad")


def test_each_operand_is_a_launch_for_its_amax_and_one_for_its_codes():
    table, found = get_recipe(RECIPE).table, []
    with planning_for(100):
        for role, axis in (("fprop.lhs", 1), ("fprop.rhs", 1), ("dgrad.lhs", 1), ("dgrad.rhs", 0)):
            x = on_gpu(256, 128, dtype=torch.float32 if role.endswith("rhs") else torch.bfloat16)
            request = OperandRequest(table.operand(role), axis, packed=True)
            with recording() as starts:
                kernel_quantizer(signature(x), (request,))(x, (OperandInputs(KEY),), None)
            found.append([start.kernel.__name__ for start in starts])
    assert found == [["amax_kernel", "packed_kernel"]] * 4
    planned = [launch.name.split()[0] for launch in native_launches(SHAPES[1])]
    assert planned == (["amax", "codes", "scales"] * 2 + ["GEMM"]) * 3


def test_bytes_and_flops_are_those_of_the_tensors():
    M, K, N = shape = Shape(256, 128, 64)
    launches = {launch.name: launch for launch in native_launches(shape)}
    assert launches["amax of X for Fprop"].bytes == 2 * M * K
    assert launches["codes of dY for Wgrad"].bytes == (2 + 0.5 + 1 / 16) * M * N
    assert launches["codes of W for Dgrad"].bytes == pytest.approx((4 + 0.5 + 1 / 256) * N * K)
    assert launches["GEMM of Wgrad"].bytes == (0.5 + 1 / 16) * (M * N + M * K) + 4 * N * K
    assert {launches[f"GEMM of {name}"].flops for name in ("Fprop", "Dgrad", "Wgrad")} == {2.0 * M * N * K}
    assert bf16_launches(shape)[1].bytes == 2 * (M * K + N * K + M * N)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_page_shows_the_prediction(shape):
    bf16, native = predicted(shape, GPUS["b200"])
    gemms = sum(seconds(launch, GPUS["b200"]) for launch in native_launches(shape) if launch.unit)
    times = " | ".join(f"{1e6 * time:,.0f}" for time in (bf16, native, gemms))
    assert f"| {'x'.join(map(str, shape))} | {times} | {bf16 / native:.2f} |" in PAGE.read_text()
