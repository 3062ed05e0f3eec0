"""Measurements of whole steps are correct: bytes, FLOPs, and the layer that launched a kernel."""

import gc
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.profiler import ProfilerActivity, profile

from fourbits.bench import timing
from fourbits.bench.steps import layer_times, model, training_step
from fourbits.bench.steps.saved_bytes import memory_breakdown, saved_bytes
from fourbits.bench.steps.training_step import TrainingStep
from fourbits.cli.main import main
from fourbits.linear.convert import convert
from fourbits.linear.sr_counter import COUNTER_FIELDS
from fourbits.model import loss
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel
from fourbits.recipe.presets import get_recipe
from fourbits.train.config import RunConfig, TrainConfig
from fourbits.train.presets import RUN_PRESETS
from model.shapes import small_config

CPU = torch.device("cpu")
TOKENS = 2 * 32


def run_config(config: ModelConfig) -> RunConfig:
    return RunConfig(
        model=config, train=TrainConfig(steps=1, micro_batch_size=2, gradient_accumulation=4, seq_len=32)
    )


def small_step(recipe: str, pattern: str = "M-*-", **changes) -> TrainingStep:
    config = small_config(pattern, **changes)
    built = LanguageModel(config, seed=0)
    convert(built, model._recipe(recipe))
    return TrainingStep(built, run_config(config))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(timing._COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(model, "product_rate", lambda device: 1e12)
    monkeypatch.setattr(model, "compile_model", lambda built, how: None)
    monkeypatch.setitem(RUN_PRESETS, "small", run_config(small_config("M-*-")))


def test_a_report_compares_recipes_with_bf16_and_is_plain_data(small):
    lines = []
    request = model.ModelRequest(preset="small", accumulation=1, repeats=1)
    report = model.bench_model(CPU, request, lines.append)
    assert [line.split(": ")[0] for line in lines] == list(model.RECIPES)
    plain = json.loads(json.dumps(report.to_dict()))
    base, nvfp4, packed = report.runs
    assert [run["recipe"] for run in plain["runs"]] == ["bf16", "nvfp4", "nvfp4:packed"]
    results = {result.name: result for result in report.results}
    assert results["nvfp4"].value == pytest.approx(base.seconds / nvfp4.seconds)
    assert base.tokens_per_second == pytest.approx(TOKENS / base.seconds)
    # Unknown, not a guess: a CPU has no peak in the table.
    assert base.mfu is None
    assert not base.quantized
    assert packed.quantized == nvfp4.quantized != ()


def test_after_a_failed_capture_the_eager_step_is_reported_and_nothing_more(small, monkeypatch):
    def fails(*_):
        raise RuntimeError("train.cuda_graph: not here")

    monkeypatch.setattr(training_step.cuda_graph, "unsupported", lambda *_: None)
    monkeypatch.setattr(training_step, "CapturedGradients", lambda *_: fails)
    lines = []
    request = model.ModelRequest(preset="small", accumulation=1, repeats=1, peers=("transformers",))
    report = model.bench_model(CPU, request, lines.append)
    (run,) = report.runs
    assert run.eager_because == "the capture failed: train.cuda_graph: not here"
    assert run.tokens_per_second == TOKENS / run.eager_seconds
    assert not report.peers
    assert lines[-1].endswith("Nothing is measured after it.")


def test_a_stopped_benchmark_reports_what_was_measured(small, monkeypatch):
    run, calls = model._run, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(model, "_run", interrupted)
    lines = []
    report = model.bench_model(
        CPU, model.ModelRequest(preset="small", accumulation=1, repeats=1), lines.append
    )
    assert [found.recipe for found in report.runs] == ["bf16"]
    assert lines[-1].startswith("Stopped")
    monkeypatch.setattr(model, "_run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model.bench_model(CPU, model.ModelRequest(preset="small", accumulation=1, repeats=1))


def test_sizes_are_the_presets_with_at_most_two_micro_batches_or_those_requested(small):
    train = model.ModelRequest(preset="small").config().train
    assert (train.micro_batch_size, train.seq_len, train.gradient_accumulation) == (2, 32, 2)
    requested = model.ModelRequest(preset="small", seq_len=16, micro_batch=3, accumulation=4).config().train
    assert (requested.micro_batch_size, requested.seq_len, requested.gradient_accumulation) == (3, 16, 4)


@pytest.mark.parametrize("size", ["seq_len", "micro_batch", "accumulation", "repeats"])
def test_a_size_of_zero_is_refused_and_does_not_mean_the_presets(size, small):
    sizes: dict[str, Any] = {size: 0}
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        model.ModelRequest(preset="small", **sizes).config()


def test_saved_inputs_are_counted_once_and_by_layer():
    step = small_step("bf16")
    step.one_micro_batch()
    saved = saved_bytes(step)
    config = step.config.model
    widths = {
        "blocks.0.mixer.in_proj": config.d_model,
        "blocks.0.mixer.out_proj": config.d_mamba,
        "blocks.1.mixer.up_proj": config.d_model,
        "blocks.1.mixer.down_proj": config.d_ffn,
        "blocks.2.mixer.q_proj": config.d_model,  # k_proj and v_proj read the same
        "blocks.2.mixer.o_proj": config.num_heads * config.head_dim,
        "blocks.3.mixer.up_proj": config.d_model,
        "blocks.3.mixer.down_proj": config.d_ffn,
    }
    assert saved.inputs == {name: 2 * TOKENS * width for name, width in widths.items()}
    assert saved.weights == 0
    assert saved.total > sum(saved.inputs.values())


@pytest.mark.parametrize("recipe", model.RECIPES)
@pytest.mark.parametrize("run", [saved_bytes, TrainingStep.one_micro_batch], ids=["counted", "stepped"])
def test_no_graph_outlives_its_pass(run, recipe, monkeypatch):
    """A gradient's accumulation node stays on the stream of its first graph; an old one breaks a capture."""
    step = small_step(recipe, "M-*T")
    nodes = {name: lambda p=p: get_gradient_edge(p).node for name, p in step.masters.items()}
    hidden = step.model.hidden

    def marked(tokens):
        found = hidden(tokens)
        for node in nodes.values():
            notes: Any = node().metadata
            notes["of this pass"] = True  # the metadata of an unused node is dropped
        return found

    monkeypatch.setattr(step.model, "hidden", marked)
    run(step)
    gc.collect()
    notes: dict[str, Any] = {name: node().metadata for name, node in nodes.items()}
    assert not [name for name, of_node in notes.items() if of_node]


def test_packed_inputs_have_the_size_of_their_format():
    step = small_step("nvfp4:packed")
    step.one_micro_batch()
    saved = saved_bytes(step)
    width = step.config.model.d_ffn
    # Four bits per element, a byte per sixteen, and the FP32 scales of input and weight.
    assert saved.inputs["blocks.1.mixer.down_proj"] == TOKENS * width * 9 // 16 + 2 * 4
    exact = small_step("bf16")
    exact.one_micro_batch()
    quantized = [row for row in saved.inputs if "blocks.3" not in row]  # the last block stays in BF16
    assert quantized
    counter = 8 * len(COUNTER_FIELDS)  # all layers save the same one, which is counted at the first
    for name in set(quantized) - {f"blocks.2.mixer.{part}_proj" for part in "qkv"}:
        assert saved.inputs[name] - counter <= 0.29 * saved_bytes(exact).inputs[name]


def test_quantized_weights_are_distinguished_from_inputs_of_the_same_shape():
    step = small_step("nvfp4", "--", d_model=TOKENS, d_ffn=TOKENS)
    step.one_micro_batch()
    saved = saved_bytes(step)
    assert saved.weights == 2 * 2 * TOKENS * TOKENS  # both linears of the first block
    assert saved.inputs["blocks.0.mixer.up_proj"] < 3 * TOKENS * TOKENS


def test_the_state_of_a_step_is_sixteen_bytes_per_parameter():
    step = small_step("bf16")
    step.one_micro_batch()
    memory = memory_breakdown(step, saved_bytes(step))
    count = sum(p.numel() for p in step.model.parameters())
    assert (memory.parameters, memory.gradients) == (4 * count, 4 * count)
    assert memory.optimizer == 8 * count + 4 * len(step.masters)  # and a step count each
    assert memory.peak is None


def test_no_utilization_above_the_peak_is_reported():
    assert model.utilization(5e14, 1e15) == 0.5
    with pytest.raises(AssertionError, match="1100 TFLOP/s counted, of a peak of 1000"):
        model.utilization(1.1e15, 1e15)


def event(name, parent=None, number=-1, kernels=()):
    return SimpleNamespace(
        name=name,
        cpu_parent=parent,
        sequence_nr=number,
        kernels=[SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels],
        device_type=SimpleNamespace(name="CPU"),
    )


def test_kernels_are_attributed_to_the_innermost_layer_that_launched_them():
    mixer = event("layer type: attention")
    linear = event("layer type: attention linears", mixer)
    forward = event("LinearFunction", linear, 7, [("gemm", 30)])
    core = event("attention_core", mixer, 8, [("flash", 50)])
    backward = event("autograd::engine::evaluate_function: LinearFunctionBackward", None, 7)
    product = event("aten::mm", backward, -1, [("gemm", 60)])
    added = event("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", None, -1)
    times = layer_times.summarize(
        [mixer, linear, forward, core, backward, product, added, event("aten::add_", added, -1, [("add", 4)])]
        + [event("aten::_foreach", event("Optimizer.step#AdamW.step"), -1, [("adam", 9)])]
    )
    rest = layer_times._REST
    wanted = {"attention linears": 90e-6, "attention": 50e-6, "optimizer": 9e-6, rest: 4e-6}
    assert times.seconds == pytest.approx(wanted)
    assert times.kernels[0] == ("gemm", pytest.approx(90e-6), 2)
    assert times.total == pytest.approx(153e-6)


def test_every_layer_of_a_step_has_a_range():
    step = small_step("bf16", "M-*T")
    with (
        layer_times._ranges(step.model),
        profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded,
    ):
        step.one_micro_batch()
    prefix = layer_times._PREFIX
    names = [e.name.removeprefix(prefix) for e in recorded.events() or () if e.name.startswith(prefix)]
    # M: in and out; -: up and down, twice; *: q, k, v and out, twice; a norm before each mixer and the head.
    wanted = {"Mamba linears": 2, "FFN linears": 4, "attention linears": 8, "norm": 6, "head": 1}
    wanted |= {"scan": 1, "activation": 2, "attention": 2, "embedding": 1}
    assert {name: names.count(name) for name in names} == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model"], "required: --preset"),
        (["model", "--preset", "hybrid-12"], "no preset is called 'hybrid-12'"),
        (["model", "--preset", "tiny", "--recipes", "nvfp5"], "nvfp5"),
        (["step", "--no-profile"], "--no-profile is an option of fourbits bench model only"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, message, capsys):
    try:
        code = main(["bench", *arguments, "--device", "cpu"])
    except SystemExit as stop:  # argparse exits by itself
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_the_time_and_memory_of_a_step_on_a_gpu_are_accounted_for():
    gpu = torch.device("cuda")
    config = replace(small_config("M-*T", d_model=256, d_ffn=512), vocab_size=1024)
    built = LanguageModel(config, seed=0).to(gpu)
    convert(built, "nvfp4")
    step = TrainingStep(built, run_config(config))
    step.one_micro_batch()
    times, saved = layer_times.layer_times(step), saved_bytes(step)
    for kind in ("Mamba linears", "scan", "attention", "FFN linears", "head", "norm", "optimizer"):
        assert times.seconds.get(kind, 0) > 0, times.seconds
    torch.cuda.reset_peak_memory_stats()
    step()
    memory = memory_breakdown(step, saved)
    assert memory.peak is not None
    assert memory.other is not None
    assert memory.reserved is not None
    assert 0 <= memory.other < memory.peak <= memory.reserved


def with_head(name):
    recipe = get_recipe(name)
    return replace(recipe, keep_bf16=replace(recipe.keep_bf16, names=()))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [get_recipe("bf16"), get_recipe("nvfp4"), with_head("nvfp4")])
def test_steps_are_replayed_with_a_loss_of_several_chunks(recipe, monkeypatch):
    gpu = torch.device("cuda")
    config = replace(small_config("M-*T"), vocab_size=1024)
    monkeypatch.setattr(loss, "GPU_CHUNK_LOGITS", TOKENS // 4 * config.vocab_size)
    samples = torch.randint(config.vocab_size, (2, 33), device=gpu)

    def trained(run):
        built = LanguageModel(config, seed=0).to(gpu)
        convert(built, recipe)
        step = TrainingStep(built, run_config(config))
        step.samples = samples
        assert step.eager_because is None
        step.one_micro_batch()
        saved_bytes(step)
        return [*(run(step) for _ in range(4)), *step.masters.values()]

    for found, wanted in zip(
        trained(TrainingStep.__call__), trained(TrainingStep.kernel_by_kernel), strict=True
    ):
        assert torch.equal(found, wanted)
