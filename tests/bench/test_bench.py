"""The benchmarks measure and report; the numbers themselves need a quiet machine."""

import json

import pytest
import torch

from fourbits.bench import hf, linear, processes, quantize, quantize_recipe, ssd, sums, timing
from fourbits.linear.amax_policy import IN_USE, OPERANDS
from fourbits.linear.checkpoint_state import recipe_states_of
from fourbits.model import linear as model_linear
from fourbits.quant.cpu import compiled

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(timing._COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(timing, "product_rate", lambda device: 1e12)
    for module in (quantize, quantize_recipe, linear, ssd, sums, hf):
        monkeypatch.setattr(module, "product_rate", lambda device: 1e12)
    monkeypatch.setattr(quantize, "_CPU_SHAPE", (64, 64))
    monkeypatch.setitem(quantize_recipe._SHAPE, "cpu", (64, 128))
    monkeypatch.setattr(linear, "_CPU_SHAPE", (32, 48, 64))
    monkeypatch.setattr(ssd, "_CPU_TOKENS", {"tiny": (1, 64)})
    monkeypatch.setattr(torch, "compile", lambda layer: layer)


@pytest.mark.parametrize(
    ("bench", "name"),
    [(quantize.bench_quantize, "quantize"), (linear.bench_linear, "linear"), (ssd.bench_ssd, "ssd")],
)
def test_a_report_is_plain_data_with_a_result_for_everything_measured(bench, name):
    report = json.loads(json.dumps(bench(CPU).to_dict()))
    assert report["benchmark"] == name
    assert report["copy_bandwidth"] > 0
    assert len(report["bars"]) >= 4
    assert all(result["seconds"] > 0 and result["value"] > 0 for result in report["bars"])


def test_sums_are_measured_on_normal_wide_and_recorded_operands(monkeypatch):
    """Normal operands take one dot per instruction, random scales need every term."""
    monkeypatch.setattr(compiled, "COMPILE_FROM", 1 << 62)
    monkeypatch.setattr(sums, "_REPEATS", 1)
    launched = set()

    def gemm(a, b, dtype, bias, *asked):
        if asked:
            launched.add((dtype, *((q.spec, q.codes.shape, q.codes.stride()) for q in (a, b))))
        return gemm_of(a, b, dtype, bias, *asked)

    gemm_of = sums.gemm
    monkeypatch.setattr(sums, "gemm", gemm)
    report = sums.bench_sums(CPU)
    measured = launched.copy()
    launched.clear()
    for part in sums._parts(CPU):
        sums._compile(CPU, part)
    assert launched == measured, "what other processes compile is what is measured"
    units = {result.name.split(", ", 1)[1]: result.unit for result in report.results[:3]}
    assert "100% short" in units["normal"]
    assert " 0% exact, 100% every term" in units["random scales"]
    recorded = [result.name for result in report.results[3:]]
    assert {name.rsplit(", ", 1)[1] for name in recorded} == {"fprop", "dgrad", "wgrad"}
    assert len(recorded) >= 3 * 6


@pytest.mark.parametrize(("cores", "gigabytes", "count"), [(16, 141, 16), (16, 24, 6), (2, 141, 0)])
def test_processes_that_compile_fit_into_cores_and_memory(cores, gigabytes, count, monkeypatch):
    asked = [0]
    monkeypatch.setattr(processes, "cores", lambda: cores)
    monkeypatch.setattr(sums, "_memory", lambda device: gigabytes << 30)
    monkeypatch.setattr(sums, "call_in_processes", lambda run, parts, n, limits: asked.append(n))
    with sums._compiling(torch.device("cuda")):
        pass
    assert asked[-1] == count


def test_each_scan_is_logged_when_measured_and_an_excluded_one_does_not_run():
    lines = []
    report = ssd.bench_ssd(CPU, lines.append, "tiny", compiled=False)
    assert [line.split(": ")[0] for line in lines] == [result.name for result in report.results]
    assert len(lines) == 2
    ssd.bench_ssd(CPU, lines.append, "tiny")
    assert sum("compiled torch" in line for line in lines) == 3  # its start and two results
    with pytest.raises(ValueError, match=r"--preset: must be one of tiny on cpu, got 'hybrid-12b'"):
        ssd.bench_ssd(CPU, preset="hybrid-12b")


def test_a_linear_is_compared_with_bf16_of_the_same_run():
    results = {result.name: result for result in linear.bench_linear(CPU).results}
    base, ours = results["32x48x64 bf16"], results["32x48x64 nvfp4"]
    assert ours.value == pytest.approx(base.seconds / ours.seconds)
    assert ours.goal == 0.4
    assert ours.ceiling is not None
    assert ours.ceiling < 1


def test_the_targets_of_a_linear_depend_on_the_gpu():
    large, *_ = linear._shapes("cuda", "NVIDIA H200").items()
    assert large == ((8192, 5120, 20480), (0.93, 0.95))
    large, *_ = linear._shapes("cuda", "NVIDIA H100 80GB HBM3").items()
    assert large == ((8192, 5120, 20480), (0.90, 0.92))


def test_supplied_amaxes_exist_when_a_linear_is_timed(monkeypatch):
    """A delayed amax exists from the second step on; until then each operand measures its own."""
    monkeypatch.setattr(linear, "medians", lambda runs, *_, **__: [1.0 for _ in runs])
    convert, layers = linear.convert, []
    monkeypatch.setattr(
        linear, "convert", lambda layer, recipe: layers.append(layer) or convert(layer, recipe)
    )
    linear.bench_linear(CPU)
    (tracked,) = [tracked for layer in layers for tracked in recipe_states_of(layer)]
    shared = OPERANDS.index("dgrad.rhs")  # is Fprop's weight
    assert [amax > 0 for amax in tracked.amaxes[0, :, IN_USE].tolist()] == [i != shared for i in range(6)]


def test_every_operand_of_a_recipe_is_compared_with_its_plain_form():
    results = {result.name: result for result in quantize_recipe.bench_recipe(CPU, "quartet2-46").results}
    roles = [role for names in results for role in names.split(", ")]
    assert sorted(roles) == sorted(set(roles))
    assert results["fprop.lhs"].goal == pytest.approx(1 / 1.3)
    assert any(result.goal == pytest.approx(1 / 1.6) for result in results.values())


@pytest.mark.parametrize("bench", [quantize.bench_quantize, linear.bench_linear])
def test_inputs_are_the_same_every_time_and_leave_the_callers_generator_unchanged(bench):
    before = torch.get_rng_state()
    bench(CPU)
    quantize_recipe.bench_recipe(CPU, "nvfp4-46")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(timing.normal(3, 2, device=CPU, seed=1), timing.normal(3, 2, device=CPU, seed=1))
    assert not torch.equal(timing.normal(3, 2, device=CPU, seed=1), timing.normal(3, 2, device=CPU))


def test_calls_are_timed_in_turns():
    order = []
    timing.medians([lambda: order.append("a"), lambda: order.append("b")], CPU, repeats=3)
    assert order[-6:] == ["a", "b"] * 3


@pytest.mark.parametrize("has_units", [False, True])
def test_the_gemm_rate_is_measured_on_the_gemms_of_linear_layers(has_units, monkeypatch):
    """A CPU without BF16 units would take minutes for a BF16 GEMM, which no linear layer runs on it."""
    monkeypatch.undo()
    monkeypatch.setattr(model_linear, "CPU_MULTIPLIES_BF16", has_units)
    monkeypatch.setitem(timing._PRODUCT_SIZE, "cpu", 32)
    products = []
    monkeypatch.setattr(timing, "median_seconds", lambda run, *_, **__: products.append(run()) or 1.0)
    assert timing.product_rate(CPU) == 2 * 32**3
    assert products[0].dtype == (torch.bfloat16 if has_units else torch.float32)


def test_a_users_llama_is_compared_with_its_own_bf16_in_the_same_mode():
    lines = []
    results = {result.name: result for result in hf.bench_hf(CPU, lines.append, ["tiny"], ["eager"]).results}
    base, ours = results["64x2, 2x32 eager bf16"], results["64x2, 2x32 eager nvfp4"]
    assert ours.value == pytest.approx(base.seconds / ours.seconds)
    assert ours.host_seconds is not None
    assert 0 < ours.host_seconds <= ours.seconds
    supplied = results["64x2, 2x32 eager nvfp4, amax supplied"]
    assert supplied.value == pytest.approx(base.seconds / supplied.seconds)
    assert [line.split(":")[0] for line in lines] == [base.name, ours.name, supplied.name]


@pytest.mark.parametrize(("option", "value"), [("sizes", "huge"), ("modes", "fast")])
def test_an_unknown_size_or_mode_of_hf_is_refused_by_name(option, value):
    known = {"sizes": ["tiny"], "modes": ["eager"], option: [value]}
    with pytest.raises(ValueError, match=f"--{option}: must be one of .*, got {value}"):
        hf.bench_hf(CPU, print, known["sizes"], known["modes"])
