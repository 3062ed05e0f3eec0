"""Regions: the pure functions between a model's linear layers, compiled once for all models of a process.

A training step alternates between linear layers and everything else: norms, convolution and SSD scan,
attention core, activations, loss. A precision recipe replaces the linear layers; the rest is the same for
every recipe. So the rest is in module-level functions of tensors and constants (the regions). A layer calls
them through `RegionModule.run`, and `compile_regions` makes `run` use one compiled version per function,
shared by all layers, models and recipes. A graph that contained linear layers would work for one recipe only.

Graphs have static shapes: a new batch shape is compiled again. A region returns one tensor.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.profiler import record_function

from fourbits.compile_notice import compilation_disabled

Region = Callable[..., Tensor]

# Graphs of one region in one process: one for each combination of shapes, dtypes and gradient mode.
MAX_GRAPHS = 64
COMPILE_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)


class CompiledRegion:
    """A region under torch.compile. If compilation fails, it runs eagerly from then on, after one warning."""

    def __init__(self, region: Region, mode: str) -> None:
        self.region = region
        self.function = torch.compile(region, fullgraph=True, dynamic=False, mode=mode)

    def __call__(self, *args: Any) -> Tensor:
        """The region's result, with or without a gradient according to the caller's gradient mode."""
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return self._run(*args)
        # Evaluation runs the graph of training, with the same bits, instead of compiling a second one.
        with torch.enable_grad():
            return self._run(*map(_as_in_training, args)).detach()

    def _run(self, *args: Any) -> Tensor:
        try:
            with record_function(self.region.__name__):
                return self.function(*args)
        except COMPILE_ERRORS as error:
            if self.function is self.region:
                raise
            self.function = self.region
            warnings.warn(
                f"{self.region.__name__} runs uncompiled (same results, slower): torch.compile failed with "
                f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
                stacklevel=3,
            )
            return self.region(*args)


def _as_in_training(arg: Any) -> Any:
    if isinstance(arg, nn.Parameter) or not (isinstance(arg, Tensor) and arg.is_floating_point()):
        return arg
    return arg.detach().requires_grad_()


_compiled: dict[tuple[Region, str], CompiledRegion] = {}


class RegionModule(nn.Module):
    """A module that calls regions; compile_mode is None (eager) or a mode of torch.compile."""

    compile_mode: str | None = None

    def run(self, region: Region, *args: Any) -> Tensor:
        """Call a region, eagerly or compiled according to compile_mode."""
        if self.compile_mode is None:
            return region(*args)
        key = (region, self.compile_mode)
        if key not in _compiled:
            _compiled[key] = CompiledRegion(*key)
        return _compiled[key](*args)


def compile_regions(model: nn.Module, mode: str | None = "default") -> None:
    """Compile the model's regions with a mode of torch.compile, or run them eagerly again (None).

    A region compiles at its first call. If that fails, e.g. without a C++ compiler, the region stays eager
    and one warning says why. Regions also stay eager if the user has disabled torch.compile. PyTorch's limit
    of graphs per function is raised to MAX_GRAPHS for the process.
    """
    if mode is not None and compilation_disabled():
        mode = None
    if mode is not None:
        dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, MAX_GRAPHS)
    for module in model.modules():
        if isinstance(module, RegionModule):
            module.compile_mode = mode
