"""Which runs are replayed from CUDA graphs, and why others are not."""

from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from fourbits import convert, get_recipe, set_step
from fourbits.linear.step import counters_of
from fourbits.recipe.recipe import GemmSpec, KeepBF16
from fourbits.train import cuda_graph
from fourbits.train.cuda_graph import CapturedGradients
from fourbits.train.opening import with_vocabulary
from fourbits.train.trainer import Trainer

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def converted(recipe):
    model = nn.Sequential(nn.Linear(32, 32))
    convert(model, recipe)
    return model


def test_a_gpu_replays_recipes_that_do_not_depend_on_past_steps(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    recipe = get_recipe("nvfp4")
    delayed = replace(recipe.fprop.lhs, amax_policy="delayed")
    past = replace(recipe, fprop=GemmSpec(lhs=delayed, rhs=recipe.fprop.rhs))
    assert cuda_graph.unsupported(converted("nvfp4"), GPU) is None
    assert cuda_graph.unsupported(converted("bf16"), GPU) is None
    assert "amax policies" in (cuda_graph.unsupported(converted(past), GPU) or "")
    assert "NVIDIA GPU" in (cuda_graph.unsupported(converted("nvfp4"), CPU) or "")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "NVIDIA GPU" in (cuda_graph.unsupported(converted("nvfp4"), GPU) or "")


@pytest.mark.parametrize(("setting", "reason"), [(True, "NVIDIA GPU"), (False, "train.cuda_graph is false")])
def test_a_run_says_why_it_is_not_replayed(config, data, setting, reason):
    changed = replace(config, train=replace(config.train, cuda_graph=setting))
    trainer = Trainer(with_vocabulary(changed, data), data, CPU)
    assert reason in (trainer.eager_because or "")


class Recording:
    """Stands in for a CUDA graph: records operations during its capture and runs them at every replay."""

    captured: "ClassVar[list[Recording]]"
    running: "ClassVar[Recording | None]" = None

    def __init__(self):
        self.operations, self.shared = [], None
        self.captured.append(self)

    def pool(self):
        return self

    def replay(self):
        for operation in self.operations:
            operation()


@contextmanager
def capture(graph, pool):
    Recording.running, graph.shared = graph, pool
    yield
    Recording.running = None


def test_replays_read_the_samples_and_counter_of_their_micro_batch_and_set_its_gradients(monkeypatch):
    """The captured work reads and writes the tensors of the capture."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(Recording, "captured", [], raising=False)
    model, eager = nn.Sequential(nn.Linear(32, 32)), []
    convert(model, replace(get_recipe("nvfp4"), keep_bf16=KeepBF16(names=())))
    master = nn.Parameter(torch.zeros(3))

    def gradients(samples):
        (clock,), loss, is_first = counters_of(model), torch.full((), torch.nan), master.grad is None
        grad = torch.full_like(master, torch.nan) if master.grad is None else master.grad
        master.grad = grad

        def work():
            loss.copy_(samples.sum() + 1000 * clock.sum())
            grad.copy_(loss.expand(3) + (0 if is_first else grad))

        if Recording.running is None:
            eager.append(work())
        else:
            Recording.running.operations.append(work)
        return loss

    def trained(run):
        found = []
        for step in range(4):
            for part in range(3):
                set_step(model, step, first_token=16 * part)
                found.append(run(torch.tensor([[step, 10.0 * part]]), part == 0).clone())
            assert master.grad is not None
            found.append(master.grad.clone())
            master.grad = None
        return found

    replayed = trained(CapturedGradients(gradients, model, [master]))
    assert len(eager) == 3, "the first step warms up"
    first, later = Recording.captured
    assert later.shared is first, "the later graph reads tensors in the pool of the first"
    for one, other in zip(replayed, trained(lambda samples, first: gradients(samples)), strict=True):
        assert torch.equal(one, other)


def test_the_step_after_the_warm_up_captures(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(Recording, "captured", [], raising=False)
    captured, found = CapturedGradients(lambda samples: samples.sum(), nn.Sequential(), []), []
    for _ in range(4):
        found.append(captured.captures_next)
        captured(torch.ones(1, 2), first=True)
    assert found == [False, True, False, False]


@pytest.mark.parametrize("ends_well", [True, False], ids=["end of capture passes", "end of capture fails"])
def test_a_capture_that_runs_out_of_memory_says_so(monkeypatch, ends_well):
    @contextmanager
    def capture_that_may_fail(graph, pool):
        try:
            yield
        finally:
            if not ends_well:
                raise RuntimeError("operation failed due to a previous error during capture")

    def gradients(samples):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", capture_that_may_fail)
    monkeypatch.setattr(Recording, "captured", [], raising=False)
    captured = CapturedGradients(gradients, nn.Sequential(), [])
    captured._steps = 1
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        captured(torch.ones(1, 2), first=True)
