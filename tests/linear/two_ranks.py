"""What two processes compute together, written to a file for test_distributed.py: rank, store and result as
arguments.

Every case trains the same model on the same 64 tokens, 32 on each rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fourbits.linear.amax_policy import Reduce
from fourbits.linear.checkpoint_state import recipe_state
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.quant.request import ROLES
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe
from fourbits.settings import override
from support.straight_through import grad_of
from support.two_processes import WORLD, write_result

TOKENS, STEP = 32, 3


class Block(nn.Module):
    def __init__(self, recompute: bool):
        super().__init__()
        self.up, self.down, self.recompute = nn.Linear(32, 64), nn.Linear(64, 32), recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return x + checkpoint(self.branch, x, use_reentrant=False)
        return x + self.branch(x)

    def branch(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, recompute: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(recompute) for _ in range(4)])
        self.head = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def data(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(TOKENS, 32, generator=generator), torch.randn(TOKENS, 32, generator=generator)


def backward(model: nn.Module, rank: int, step: int = STEP, reduce: Reduce | None = None) -> Tensor:
    """Loss of this rank's tokens, gradients in the parameters."""
    set_step(model, step, rank * TOKENS, reduce)
    x, target = data(rank)
    loss = (model(x).float() - target).square().mean()
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        grad = grad_of(parameter)
        found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).float()
    return found


def data_parallel(rank: int) -> dict[str, object]:
    model = Model()
    convert(model, "nvfp4")
    wrapped = DistributedDataParallel(model)
    loss = backward(wrapped, rank)
    return {"loss": loss, "gradients": gradients(model), "keys": list(model.state_dict())}


def fully_sharded(rank: int, dtype: torch.dtype | None = None, recompute: bool = False) -> dict[str, object]:
    model = Model(recompute)
    convert(model, "nvfp4")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    loss = backward(model, rank)
    found = gradients(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    convert(model, "bf16")
    after = model(data(rank)[0]).detach()
    return {"loss": loss, "gradients": found, "keys": list(state), "after": after}


def delayed() -> Recipe:
    """nvfp4 with the amax of the step before, where a tensor has one."""
    policies = {f"{role}.amax_policy": "delayed" for role in ROLES[:6]}
    return override(get_recipe("nvfp4"), policies)


def with_amax_policies(rank: int) -> dict[str, object]:
    model = Model()
    convert(model, delayed())
    wrapped = DistributedDataParallel(model)
    backward(wrapped, rank, STEP, all_reduced)
    refused = ""
    try:
        set_step(model, STEP + 1)
    except ValueError as error:
        refused = str(error)
    model.zero_grad()
    loss = backward(wrapped, rank, STEP + 1, all_reduced)
    state = recipe_state(model, all_reduced)
    return {"loss": loss, "gradients": gradients(model), "state": state, "refused": refused}


def all_reduced(x: Tensor, how: str) -> Tensor:
    dist.all_reduce(x, op=dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
    return x


def compute(rank: int) -> dict[str, object]:
    return {
        "ddp": data_parallel(rank),
        "fsdp2": fully_sharded(rank),
        "fsdp2, recomputed": fully_sharded(rank, recompute=True),
        "fsdp2, bf16": fully_sharded(rank, torch.bfloat16),
        "amax policies": with_amax_policies(rank),
    }


if __name__ == "__main__":
    write_result(compute)
