"""Samples of a model's health: what they measure, that they change no bit, and when each alarm is raised."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourbits import HealthReport, Recipe, convert, get_recipe, health, list_recipes, quantize, set_step
from fourbits.linear.layer_state import TappedCall
from fourbits.linear.monitor.layer import LayerTap
from fourbits.linear.monitor.operand import STATS, rotation_of, rows_of_sample, sampled, whole_amax
from fourbits.quant.cpu.compiled import uncompiled_quantizers
from fourbits.quant.operand import OperandSpec
from fourbits.settings import override
from support.assertions import assert_same_bytes
from support.straight_through import grad_of

KEY = torch.tensor([7, 40, 3, 0, 0])
M, K, N = 96, 64, 48


@pytest.fixture(autouse=True)
def without_compiler():
    with uncompiled_quantizers():
        yield


def recipe_of(name: str, **changes: Any) -> Recipe:
    return override(get_recipe(name), {"keep_bf16.first_blocks": 0, "keep_bf16.last_blocks": 0, **changes})


def layer_of(recipe: Recipe | str) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(K, N, bias=False))
    convert(model, recipe_of(recipe) if isinstance(recipe, str) else recipe)
    set_step(model, 0)
    return model


def report_of(
    model: Any, x: Tensor, dy: Tensor | None = None, previous: HealthReport | None = None
) -> HealthReport:
    with health(model, previous) as report:
        y = model(x)
        y.backward(torch.randn_like(y) if dy is None else dy)
    return report


def kinds(report: HealthReport) -> set[str]:
    return {alarm.kind for alarm in report.alarms}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "spec",
    [OperandSpec(), OperandSpec(block=(16, 16)), OperandSpec(format="mxfp4"), OperandSpec(rounding="sr")],
)
def test_a_sample_of_all_rows_is_the_operand(spec, axis):
    x = torch.randn(M, K)
    x[0] *= 1000
    rotation = rotation_of(spec, KEY)
    sample = sampled(x, spec, axis, whole_amax(x, spec, axis, rotation), KEY, rotation)
    q = quantize(x, spec, axis, sr_key=KEY)
    found, exact = q.dequantize(), x
    stored = (found.t(), exact.t()) if axis == 0 else (found, exact)
    assert_same_bytes(sample.found.contiguous(), stored[0].contiguous())
    stats = dict(zip(STATS, sample.stats.tolist(), strict=True))
    assert stats["zeros"] == pytest.approx(float((found == 0).float().mean()))
    assert stats["error"] == pytest.approx(float((found - x).square().sum()))
    assert stats["signal"] == pytest.approx(float(x.square().sum()))
    if spec.format == "nvfp4":
        scales = q.block_scale.float()
        assert stats["at_max"] == pytest.approx(float((scales == 448).float().mean()))
        assert stats["at_zero"] == pytest.approx(float((scales == 0).float().mean()))
    else:
        assert stats["at_max"] != stats["at_max"]  # E8M0 has no largest scale that matters


@pytest.mark.parametrize(("rule", "clips"), [("4over6", False), ("search", True)])
@pytest.mark.parametrize("metric", ["mse", "mae", "max"])
def test_clipping_is_not_counted_where_a_scale_rule_clips_by_choice(rule, clips, metric):
    """Only a search takes scales below the one of the maximum; all scales of Four Over Six fit."""
    x = torch.randn(M, K)
    spec = OperandSpec(scale_rule=f"{rule}-{metric}")
    amax = whole_amax(x, spec, 1, None)
    clipped = sampled(x, spec, 1, amax, KEY, None).stats[STATS.index("clipped")]
    chosen, of_maximum = (quantize(x, s, 1).block_scale.float() for s in (spec, OperandSpec(scale_bound=256)))
    assert bool((chosen < of_maximum).any()) == clips
    assert torch.isnan(clipped) if clips else clipped == 0


def test_a_sample_has_whole_blocks_from_all_parts_of_a_tensor():
    for spec in (OperandSpec(), OperandSpec(format="fp8", block=(128, 128))):
        ranges = rows_of_sample(4096, spec)
        height = (spec.block_size or (1, 1))[0]
        assert all(first % height == 0 and (last - first) % height == 0 for first, last in ranges)
        assert sum(last - first for first, last in ranges) == 128
        assert ranges[-1][1] == 4096 or len(ranges) == 1
    assert rows_of_sample(100, OperandSpec()) == [(0, 100)]


@pytest.mark.parametrize("signs", ["te16", "fixed:5", "per-layer", "per-call"])
def test_exact_values_are_transformed_as_the_operand_is(signs):
    """Both operands of Wgrad have one transform, which cancels in their product."""
    x, dy = torch.randn(M, K), torch.randn(M, N)
    spec = OperandSpec(rht=16, rht_signs=signs)
    rotation = rotation_of(spec, KEY)
    of_x, of_dy = (sampled(t, spec, 0, whole_amax(t, spec, 0, rotation), KEY, rotation) for t in (x, dy))
    torch.testing.assert_close(of_dy.exact @ of_x.exact.t(), dy.t() @ x, atol=1e-4, rtol=1e-4)
    error = float((of_x.found - of_x.exact).square().sum() / of_x.exact.square().sum())
    assert error < 0.02  # NVFP4 of normal numbers: 0.009


@pytest.mark.parametrize("name", [name for name in list_recipes() if name != "bf16"])
def test_every_recipe_is_measured_and_raises_no_alarm_on_normal_numbers(name):
    model = layer_of(name)
    report = report_of(model, torch.randn(M, K, requires_grad=True))
    (layer,) = report.layers
    table = recipe_of(name).table
    for gemm, snr in layer.snr_db.items():
        assert (snr is None) == getattr(table, gemm).high_precision
        assert snr is None or 12 < snr < 40, gemm  # FP4: about 16 dB, MXFP4 and SR less; FP8: about 30
    assert kinds(report) - {"clipping"} == set()
    assert ("clipping" in kinds(report)) == (name == "mxfp4")
    assert "1 quantized layers sampled" in str(report)


@pytest.mark.parametrize("call", ["eager", "compiled"])
def test_a_sampled_step_has_the_bits_of_others(call):
    model, other = layer_of("nvfp4"), layer_of("nvfp4")
    x = torch.randn(M, K)
    torch.compiler.reset()
    run = torch.compile(model, backend="eager") if call == "compiled" else model
    found = []
    for each, samples in ((model, True), (other, False)):
        leaf = x.clone().requires_grad_()
        target = run if each is model else each
        for step in range(2):
            set_step(each, step)
            if samples and step == 0:
                with health(each) as report:
                    target(leaf).square().sum().backward()
                assert [layer.name for layer in report.layers] == ["0"]
            else:
                target(leaf).square().sum().backward()
        found.append((grad_of(leaf), grad_of(each[0].weight)))
    for one, two in zip(*found, strict=True):
        assert_same_bytes(one, two)
    torch.compiler.reset()


def test_amax_policies_see_nothing_of_a_sample():
    recipe = recipe_of("nvfp4", **{"fprop.lhs.amax_policy": "delayed"})
    model, other = layer_of(recipe), layer_of(recipe)
    x = torch.randn(M, K)
    for step in range(3):
        for each in (model, other):
            set_step(each, step)
        y = other(x * (step + 1))
        with health(model) as report:
            assert_same_bytes(model(x * (step + 1)).detach(), y.detach())
        assert [layer.name for layer in report.layers] == ["0"]


def test_a_forward_pass_alone_is_sampled_and_layers_not_called_are_named():
    model: Any = nn.Sequential(nn.Linear(K, N), nn.Linear(N, K))
    convert(model, recipe_of("nvfp4"))
    set_step(model, 0)
    with health(model) as report:
        model[0](torch.randn(M, K))
    (layer,) = report.layers
    assert layer.snr_db["fprop"] is not None
    assert layer.snr_db["wgrad"] is None
    assert report.unseen == ("1",)
    assert all(module.quantization.tap is None for module in (*model, *copy.deepcopy(model)))


def test_only_the_first_call_of_a_layer_is_sampled():
    tap = LayerTap()
    x, w = torch.randn(M, K), torch.randn(N, K)
    call = TappedCall(recipe_of("nvfp4").table.to_text(), torch.zeros(9, dtype=torch.int64), None, 0)
    assert tap.forward(x, w, call)
    assert not tap.forward(x, w, call)


def test_a_model_without_quantized_layers_is_refused():
    with (
        pytest.raises(ValueError, match=r"no quantized layer. Call fourbits.convert"),
        health(nn.Linear(16, 16)),
    ):
        pass


def outlier(value: float) -> Tensor:
    x = torch.randn(M, K)
    x[3, 5] = value
    return x


def sparse() -> Tensor:
    """One element of each block is 100 times as large as the others."""
    x = 0.01 * torch.randn(M, K)
    x[:, ::16] = 1
    return x


def cancelling(gradient: bool) -> tuple[Tensor, Tensor]:
    """Tokens in pairs whose contributions to dW cancel but for a hundredth."""
    x, dy = torch.randn(M // 2, K), torch.randn(M // 2, N)
    sign = -1 if gradient else 1
    return torch.cat((x, x)), torch.cat((dy, sign * dy + 0.01 * torch.randn(M // 2, N)))


@pytest.mark.parametrize(
    ("kind", "name", "bad", "good"),
    [
        ("clipping", "mxfp4", "normal", None),
        ("zero scales", "nvfp4-naive", "outlier", "normal"),
        ("few rows", "nvfp4-naive", "outlier", "normal"),
        ("zero codes", "nvfp4-naive", "sparse", "normal"),
    ],
)
def test_alarms_about_inputs(kind, name, bad, good):
    inputs = {"normal": torch.randn(M, K), "outlier": outlier(1e7), "sparse": sparse()}
    report = report_of(layer_of(name), inputs[bad].requires_grad_())
    assert kind in kinds(report)
    (alarm,) = [alarm for alarm in report.alarms if alarm.kind == kind]
    assert alarm.layers == ("0",)
    assert "'0'" in alarm.text
    other = report_of(layer_of(name if good else "mxfp4-ceil"), inputs[good or bad].detach().requires_grad_())
    assert kind not in kinds(other)


def test_the_alarm_about_stale_scales_gives_the_advice_of_practice():
    recipe = recipe_of("nvfp4", **{"fprop.lhs.amax_policy": "delayed"})
    for growth, raised in ((4.0, True), (1.0, False)):
        model, x = layer_of(recipe), torch.randn(M, K)
        for step in range(2):
            set_step(model, step)
            report = report_of(model, (x * growth**step).requires_grad_())
            assert ("saturation" in kinds(report)) == (raised and step == 1)
    text = report_of_saturation(recipe)
    assert "Update the scale more often" in text
    assert "lower the learning rate" in text


def report_of_saturation(recipe: Recipe) -> str:
    model, x = layer_of(recipe), torch.randn(M, K)
    report_of(model, x.clone().requires_grad_())
    set_step(model, 1)
    report = report_of(model, (4 * x).requires_grad_())
    return next(alarm.text for alarm in report.alarms if alarm.kind == "saturation")


@pytest.mark.parametrize("raised", [True, False])
def test_the_alarm_about_gradients_below_their_noise(raised):
    x, dy = cancelling(raised)
    report = report_of(layer_of("nvfp4"), x.requires_grad_(), dy)
    (layer,) = report.layers
    assert ("gradient below noise" in kinds(report)) == raised
    assert layer.gradient_to_noise is not None
    assert (layer.gradient_to_noise < 3**0.5) == raised
    exact = x.detach().t() @ dy  # of all of it: the sample covers a model this small
    assert report.numbers()["health_gradient_to_noise"] == pytest.approx(layer.gradient_to_noise)
    assert exact.isfinite().all()


@pytest.mark.parametrize("raised", [True, False])
def test_the_alarm_about_a_gemm_that_is_mostly_noise(raised):
    """A common offset of X that W's rows cancel: the operands are rounded as if it mattered."""
    model = layer_of("nvfp4")
    with torch.no_grad():
        model[0].weight -= model[0].weight.mean(1, keepdim=True)
    x = torch.randn(M, K) + (100 if raised else 0)
    assert ("noise" in kinds(report_of(model, x.requires_grad_()))) == raised


@pytest.mark.parametrize("raised", [True, False])
def test_the_alarm_about_dead_gradients(raised):
    """Tokens with an input have gradients that a large one in their block rounds to zero."""
    x, dy = torch.randn(M, K), torch.randn(M, N)
    if raised:
        x[::16], dy[::16] = 0, 1e4
    report = report_of(layer_of("nvfp4-naive"), x.requires_grad_(), dy)
    assert ("dead gradients" in kinds(report)) == raised


@pytest.mark.parametrize(("path", "raised"), [((0, 1, 0), True), ((0, 1, 2), False), ((0, 0, 0), False)])
def test_the_alarm_about_oscillating_weights(path, raised):
    """Weights that leave a code and come back between three samples; W's amax stays."""
    model, x = layer_of("nvfp4"), torch.randn(M, K)
    torch.manual_seed(5)
    weights = [torch.randn(N, K).clamp(-1, 1) + 0.7 * i for i in range(3)]
    report = None
    for each in path:
        with torch.no_grad():
            model[0].weight.copy_(weights[each])
            model[0].weight[0, 0] = 3
        report = report_of(model, x.clone().requires_grad_(), previous=report)
        set_step(model, 0)
    assert report is not None
    assert ("oscillation" in kinds(report)) == raised
    (layer,) = report.layers
    assert (layer.oscillating or 0) > 0.5 if raised else (layer.oscillating or 0) < 0.2


def test_a_report_is_plain_data_too():
    report = report_of(layer_of("nvfp4"), torch.randn(M, K, requires_grad=True))
    (layer,) = report.to_dict()["layers"]
    assert layer["operands"]["fprop.rhs"]["at_max"] > 0
    assert layer["stale"] == []
    assert set(layer["rows"]) == {"x", "dy"}
    numbers = report.numbers()
    assert numbers["health_alarms"] == 0
    assert numbers["health_snr_fprop"] == layer["snr_db"]["fprop"]
