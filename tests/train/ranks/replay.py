"""A step whose linear layers read recorded inputs and gradients, and one in FP32; also a program for ranks.

Arguments: a YAML file, the folder of prepared text, a recording, a folder for rank_K.pt.
"""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fourbits.data.config import open_data
from fourbits.linear import compute
from fourbits.linear.monitor.health import sampling
from fourbits.linear.plan import linear_plan
from fourbits.linear.stacked.layer import converted_layers
from fourbits.model.lm import LanguageModel
from fourbits.recipe.presets import get_recipe
from fourbits.train.config import RunConfig, load_config
from fourbits.train.opening import with_vocabulary
from fourbits.train.ranks import ranks as ranks_module
from fourbits.train.ranks.join import joined
from fourbits.train.ranks.ranks import Ranks
from fourbits.train.ranks.splits import Split
from fourbits.train.trainer import Trainer


class Call(NamedTuple):
    """What a layer read in a micro-batch, and both operands of its GEMMs in the order of calls."""

    x: Tensor
    dy: Tensor
    #: values and scale of each operand, by GEMM
    gemms: list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]


#: by micro-batch and name of the layer
Recording = dict[tuple[int, str], Call]


class _Replaced(torch.autograd.Function):
    """Another value in place of x, whose gradient x gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Recorder:
    """Records a step's layers; with an earlier recording, each of them reads its part of that."""

    def __init__(self, trainer: Trainer, given: Recording | None, part: Callable[[str, str, Tensor], Tensor]):
        """part: (layer, "x" or "dy", recorded) -> what this process has of it."""
        self.given, self.part = given, part
        self.calls: dict[tuple[int, str], list[Any]] = {}
        self.current, self.micro_batches = (-1, ""), iter(trainer._own)
        self.gradients, self.number = trainer._gradients, -1
        trainer._gradients = self.of_micro_batch
        for name, layer in converted_layers(trainer.model.named_modules()):
            layer.register_forward_pre_hook(partial(self.before, name))
            layer.register_forward_hook(partial(self.after, name))

    def of_micro_batch(self, samples: Tensor) -> Tensor:
        self.number = next(self.micro_batches)
        return self.gradients(samples)

    def recorded(self, name: str, what: str) -> Tensor | None:
        if self.given is None:
            return None
        return self.part(name, what, getattr(self.given[self.number, name], what))

    def before(self, name: str, layer: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        self.current = (self.number, name)
        call = self.calls.setdefault(self.current, [None, None, []])
        call[0] = args[0].detach().flatten(0, 1).clone()
        value = self.recorded(name, "x")
        return args if value is None else (_Replaced.apply(args[0], value.view(args[0].shape)),)

    def after(self, name: str, layer: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(self.backward, (self.number, name)))

    def backward(self, key: tuple[int, str], grad: Tensor) -> Tensor | None:
        self.current = key
        self.calls[key][1] = grad.detach().flatten(0, 1).clone()
        value = self.recorded(key[1], "dy")
        return None if value is None else value.view(grad.shape)

    def gemm(self, plan: Callable[..., Any]) -> Callable[..., Any]:
        """`plan`, whose GEMMs are recorded."""

        def planned(*args: Any) -> Callable[..., Any]:
            multiply = plan(*args)

            def multiplied(lhs: Any, rhs: Any, bias: Any) -> Any:
                operands = tuple((o.values.clone(), o.scale.clone()) for o in (lhs, rhs))
                self.calls[self.current][2].append(operands)
                return multiply(lhs, rhs, bias)

            return multiplied

        return planned


def replayed(
    trainer: Trainer, given: Recording | None = None, part: Callable[..., Tensor] = lambda n, w, t: t
) -> tuple[Recording, dict[str, Any]]:
    """Run a step. Returns what was recorded, and the sample of the layers' health in it."""
    recorder, plain = Recorder(trainer, given, part), compute.gemm
    linear_plan.cache_clear()
    compute.gemm = recorder.gemm(plain)
    try:
        with sampling(trainer.model) as sample:
            trainer.ranks.whole_samples(sample)
            trainer._accumulate_gradients()
    finally:
        compute.gemm = plain
        linear_plan.cache_clear()
    found = {key: Call(*values) for key, values in recorder.calls.items()}
    return found, sample.report().to_dict()


def plain(recording: Recording) -> dict[tuple[int, str], tuple[Any, ...]]:
    """For a file."""
    return {key: tuple(call) for key, call in recording.items()}


def part_of_layer(ranks: Any) -> Callable[[str, str, Tensor], Tensor]:
    """What a rank has of a layer's input and output gradient, from how its weight is split."""

    def part(name: str, what: str, whole: Tensor) -> Tensor:
        split: Split = ranks._sharding.split(f"{name}.weight")
        if split.dim != (1 if what == "x" else 0):
            return whole
        return Split(whole.shape, 1, split.segments).part(whole, ranks.tensor_rank, ranks.shape.tensor)

    return part


@contextmanager
def in_fp32() -> Generator[None]:
    """Models built inside have activations in FP32."""
    group = sys.modules.get("fourbits.train.ranks.group")
    modules = [ranks_module] if group is None else [ranks_module, group]
    for module in modules:
        vars(module)["LanguageModel"] = partial(LanguageModel, compute_dtype=torch.float32)
    try:
        yield
    finally:
        for module in modules:
            vars(module)["LanguageModel"] = LanguageModel


def trainer_of(config: RunConfig, cache: Path, ranks: Ranks | None = None) -> Trainer:
    data = open_data(config.data, cache)
    device = torch.device("cpu") if ranks is None else ranks.device
    return Trainer(with_vocabulary(config, data), data, device, ranks)


def fp32_trainer(config: RunConfig, cache: Path, ranks: Ranks | None = None) -> Trainer:
    """Without quantization, and with activations in FP32."""
    with in_fp32():
        return trainer_of(replace(config, recipe=get_recipe("bf16")), cache, ranks)


def gradients_of(trainer: Trainer) -> dict[str, Tensor]:
    """The gradient of every parameter, whole; "loss" of a step, "validation" loss, "norms" of gradients."""
    found = {"loss": trainer._accumulate_gradients()}
    norms: list[Tensor] = []
    for name, master in trainer.masters.items():
        assert master.grad is not None
        norms.append(master.grad.norm())
        stored: Any = trainer.ranks.stored(name, master.grad)
        found[name] = stored.full_tensor() if hasattr(stored, "full_tensor") else stored
    found["norms"] = trainer.ranks.norms(torch.stack(norms))
    trainer.step = 1
    found["validation"] = torch.tensor(trainer.validate()["loss"].per_token)
    return {name: tensor.clone() for name, tensor in found.items()}


def main() -> None:
    file, cache, recording, out = map(Path, sys.argv[1:])
    config = load_config(file, {})
    torch.set_num_threads(1)
    given: Recording = {key: Call(*values) for key, values in torch.load(recording).items()}
    with joined(config.parallel, config.train.device) as ranks:
        found: dict[str, Any] = {"fp32": gradients_of(fp32_trainer(config, cache, ranks))}
        for recomputed in ("none", "full"):
            train = replace(config.train, activation_checkpointing=recomputed)
            trainer = trainer_of(replace(config, train=train), cache, ranks)
            calls, health = replayed(trainer, given, part_of_layer(ranks))
            found[recomputed] = plain(calls), health
        group: Any = ranks
        splits = {name: tuple(group._sharding.split(f"{name}.weight")) for _, name in given}
        found["notes"] = ranks.notes()
        found["place"] = group.tensor_rank, group.shape.tensor, splits
        torch.save(found, out / f"rank_{ranks.rank}.pt")


if __name__ == "__main__":
    main()
