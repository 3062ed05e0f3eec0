"""A model over ranks: FSDP2 gathers FP32 master weights before some blocks, and sums gradients after them.

A layer quantizes the gathered weight, so its codes are those of one process. Gradients are sums, not means:
the loss is divided by the tokens of all ranks.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fourbits.model.config import ModelConfig
from fourbits.model.init import initial_value
from fourbits.model.lm import LanguageModel
from fourbits.train.parallel import ParallelConfig, Reshard
from fourbits.train.ranks.block_groups import block_groups
from fourbits.train.ranks.sharding import Meshes, Sharding


def shard(model: LanguageModel, meshes: Meshes, config: ParallelConfig) -> None:
    """Split the parameters of a converted model on the meta device, in place: blocks first, in groups."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.gradients]
    policy = MixedPrecisionPolicy(reduce_dtype=dtype, cast_forward_inputs=False)
    groups = block_groups(model.blocks, config.gather_weights)
    for group in groups:  # the backward pass begins with the last one, which stays until then
        freed = config.reshard == "pass" and group is not groups[-1]
        fully_shard(group, mesh=meshes.blocks, mp_policy=policy, reshard_after_forward=freed)
    fully_shard(model, mesh=meshes.rest, mp_policy=policy)
    for module in _sharded(model):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


@torch.no_grad()
def fill(
    sharding: Sharding, masters: Mapping[str, Tensor], config: ModelConfig, seed: int, *, hashed: bool
) -> str | None:
    """Give the masters, this rank's parts of the parameters, their initial weights: drawn whole, then split.

    So they do not depend on the number of ranks. Returns, if `hashed`, the SHA-256 of names and weights.
    """
    digest = hashlib.sha256()
    for name, master in masters.items():
        whole = initial_value(name, sharding.shape(name), config, seed)
        if hashed:
            digest.update(name.encode() + whole.contiguous().numpy().tobytes())
        master.copy_(sharding.own_part(name, whole))
    return digest.hexdigest() if hashed else None


def begin_micro_batch(model: nn.Module, sums: bool, last: bool, reshard: Reshard) -> None:
    """Set whether the next backward pass sums gradients over ranks, and frees the gathered weights.

    Parameters outside blocks are gathered once for all micro-batches of a step, each of which needs them
    throughout.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(sums)
    model.set_reshard_after_backward(last, recurse=reshard == "step")


def free_gathered(model: nn.Module) -> None:
    """Free gathered weights, so that the next pass gathers the current ones.

    A forward pass without a backward pass, as in an evaluation, leaves some of them gathered.
    """
    for module in _sharded(model):
        module.reshard()


def collect_gradients(parameters: Mapping[str, DTensor], masters: Mapping[str, nn.Parameter]) -> None:
    """Move the gradients of FSDP2's parameters to masters, which share their storage."""
    for name, parameter in parameters.items():
        grad, parameter.grad = parameter.grad, None
        assert grad is None or isinstance(grad, DTensor)
        masters[name].grad = None if grad is None else grad.to_local()


def gathered_parameters(model: LanguageModel) -> dict[str, nn.Parameter]:
    """The parameters that forward passes read, by name; FSDP2 keeps them, but not their memory.

    All ranks must call it: each group of blocks is gathered once, and freed again.
    """
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            here = dict(model.get_submodule(name).named_parameters(name))
            found |= {own: parameter for own, parameter in here.items() if not isinstance(parameter, DTensor)}
            module.reshard()
    return found


def _sharded(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
