"""One instruction of a tensor core: its rules by probes that other rules fail, and recorded results."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

import fourbits as fb
from fourbits.formats.codes import decode
from fourbits.formats.descriptors import E2M1
from fourbits.gemm.native.probes import PROBES, WIDTH_PROBE, Probe, operands
from fourbits.gemm.reference.tensor_core import TENSOR_CORES, TensorCore, tensor_core_dot
from fourbits.gemm.reference.tensor_core_sums import Rows, chained_sum
from support.recorded import VECTORS
from support.recorded_tensor_cores import RECORDED, recorded

FP4 = TENSOR_CORES["sm_100-fp4"]


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_results_of_gpus_are_equal_bytes(name):
    """Longer rows are a chain of instructions, and shorter ones are padded with zeros."""
    a, b, c, d = recorded(VECTORS / "tensor_cores.safetensors", name)
    core = TENSOR_CORES[RECORDED[name]]
    for first in range(0, a.shape[1], core.products):
        left, right = (_padded(x[:, first : first + core.products], core.products) for x in (a, b))
        c = tensor_core_dot(left, right, c, core)
    assert torch.equal(c.view(torch.int32), d.view(torch.int32))


def _padded(x: Tensor, length: int) -> Tensor:
    return torch.cat((x, x.new_zeros((x.shape[0], length - x.shape[1]))), 1)


def sum_of(probe: Probe, core: str) -> float:
    """The probe as a chain of instructions."""
    rows = [Rows(q.element_codes(), q.block_scale) for q in operands(probe, torch.device("cpu"))]
    return float(chained_sum(rows[0], rows[1], TENSOR_CORES[core])[0, 0])


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_an_fp4_sum(probe):
    assert sum_of(probe, "sm_100-fp4") == probe.expected


def test_the_width_of_a_step_shows():
    """Products 100 and 140 are in one step of 96 (96..191), and in different ones of 64."""
    (probe,) = [probe for probe in PROBES if probe.name == WIDTH_PROBE]
    assert (sum_of(probe, "sm_100-fp4"), sum_of(probe, "sm_103-fp4")) == (16777216, 16777218)


def test_a_nan_scale_poisons_even_codes_of_zero():
    scale = torch.ones(1, 4).to(torch.float8_e4m3fn)
    poisoned = scale.clone()
    poisoned[0, 3] = torch.nan
    zeros = torch.zeros(1, 64, dtype=torch.uint8)
    result = tensor_core_dot(zeros, zeros, torch.zeros(1), FP4, poisoned, scale)
    assert result.view(torch.int32).item() == 0x7FFFFFFF


def test_hopper_keeps_13_bits_of_fp8_and_blackwell_25():
    for extra, sums in ((1.0, (65536, 65540)), (2.0, (65544, 65544))):
        a = torch.zeros(1, 32)
        a[0, :2] = torch.tensor([256.0, 4.0])
        b = torch.zeros(1, 32)
        b[0, :2] = torch.tensor([256.0, extra])
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        found = [float(tensor_core_dot(a, b, torch.zeros(1), name)) for name in ("sm_90-fp8", "sm_100-fp8")]
        assert tuple(found) == sums


def rational(a: Tensor, b: Tensor, c: float, scale: list[Fraction]) -> Fraction:
    """c plus the exact sum of E2M1 products under scales of 16."""
    pairs = zip(decode(a, E2M1).tolist(), decode(b, E2M1).tolist(), strict=True)
    return Fraction(c) + sum(Fraction(x) * Fraction(y) * scale[k // 16] for k, (x, y) in enumerate(pairs))


def test_without_truncation_it_is_the_exact_sum_toward_zero():
    """Scales within 2^6 keep every bit: the FP32 number next to the exact sum, and not beyond it."""
    a, b = (torch.randint(0, 16, (200, 64), dtype=torch.uint8) for _ in range(2))
    scales = [
        torch.randint(0x30, 0x48, (200, 4), dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in range(2)
    ]
    c = torch.randn(200) * 1000
    found = tensor_core_dot(a, b, c, "sm_100-fp4", *scales)
    for row in range(200):
        scale = [
            Fraction(float(x)) * Fraction(float(y)) for x, y in zip(*(s[row] for s in scales), strict=True)
        ]
        exact, got = rational(a[row], b[row], float(c[row]), scale), found[row]
        beyond = torch.nextafter(got, got + got.sign())
        assert abs(Fraction(float(got))) <= abs(exact) < abs(Fraction(float(beyond)))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("sm_100-fp5", {}, "core must be one of sm_100-fp4, sm_103-fp4.*got 'sm_100-fp5'"),
        ("sm_103-fp4", {}, r"the 96 products of sm_103-fp4, got \[1, 64\]. Pad it with zeros"),
        ("sm_90-bf16", {}, "a must be torch.bfloat16 or torch.float16 for sm_90-bf16, got torch.uint8"),
        ("sm_100-fp4", {"scale_a": None}, "scale_a must be .* with 4 or 2 in the last dimension .* got None"),
        ("sm_100-fp4", {"c": torch.zeros(1, dtype=torch.float64)}, "c must be float32, got torch.float64"),
        (
            "sm_100-fp4",
            {"scale_a": torch.ones(1, 4).to(torch.float8_e8m0fnu)},
            "must have one dtype for sm_100",
        ),
    ],
)
def test_other_operands_are_refused(name, change, message):
    codes, scale = torch.zeros(1, 64, dtype=torch.uint8), torch.ones(1, 4).to(torch.float8_e4m3fn)
    given = {"a": codes, "b": codes, "c": torch.zeros(1), "scale_a": scale, "scale_b": scale} | change
    with pytest.raises(ValueError, match=message):
        tensor_core_dot(core=name, **given)


def test_users_can_describe_an_instruction():
    """Anything that the fields say: 8 products with 24 bits, as on Ampere."""
    core = TensorCore(
        name="mine", operands=(torch.bfloat16,), products=8, fraction_bits=24, zero_exponent=-132
    )
    a, b = (torch.randn(50, 8).to(torch.bfloat16) for _ in range(2))
    c = torch.randn(50)
    assert torch.equal(fb.tensor_core_dot(a, b, c, core), fb.tensor_core_dot(a, b, c, "sm_80-bf16"))
