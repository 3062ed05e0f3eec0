"""What two processes compute of experts whose parameters are DTensors: rank, store and result as
arguments.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fourbits.linear.audit import audit
from fourbits.linear.step import set_step
from linear import test_experts, test_stacked_weights
from linear.test_stacked_weights import COUNTS, EXPERTS, WIDTH, Einsum, GroupedExperts, Iterated, converted
from support.straight_through import grad_of
from support.two_processes import WORLD, write_result


class Outer(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.inner(*inputs)


#: kinds of experts that find their products as they run
OWN: dict[str, Callable[[], nn.Module]] = {
    "grouped": lambda: GroupedExperts(True),
    "loop": lambda: GroupedExperts(False),
    "einsum": Einsum,
    "iterated": Iterated,
}
#: (kind, what comes first)
FULLY_SHARDED = [(kind, first) for kind in (*test_experts.FAMILIES, *OWN) for first in ("convert", "shard")]


def inputs_of(kind: str, experts: slice = slice(0, EXPERTS)) -> tuple[Tensor, ...]:
    """The rows of these experts."""
    generator = torch.Generator().manual_seed(0)
    if kind in ("einsum", "iterated"):
        return (torch.randn(EXPERTS, 8, WIDTH, generator=generator)[experts],)
    rows = torch.randn(int(COUNTS.sum()), WIDTH, generator=generator)
    ends = [0, *COUNTS.cumsum(0).tolist()]
    return rows[ends[experts.start] : ends[experts.stop]], COUNTS[experts]


def fully_sharded(kind: str, first: str | None, mesh: Any) -> dict[str, Any]:
    """Output and gradients of a step, whole. first: convert or shard; None: not sharded."""
    model: Any = Outer(initialized(kind)) if kind in OWN else test_experts.mixture(kind)
    if first != "shard":
        converted(model)
    if first is not None:
        fully_shard(model, mesh=mesh)
    if first == "shard":
        converted(model)
    if kind in OWN:
        return trained(model, *inputs_of(kind))
    torch.manual_seed(0)
    route = test_experts.routing()
    y = test_experts.step(model, torch.randn(test_experts.TOKENS, WIDTH), route)["y"]
    return found_in(model, y)


def by_experts(kind: str, mesh: Any, parallel: bool) -> dict[str, Any]:
    """The rows of this process's experts, and gradients of all. parallel: or all of them in one process."""
    model, experts = initialized(kind), slice(0, EXPERTS)
    if parallel:
        place, each = mesh.get_local_rank(), EXPERTS // WORLD
        experts = slice(place * each, (place + 1) * each)
        distribute(model, Shard(0), mesh)
    converted(model)
    return trained(model, *inputs_of(kind, experts))


def replicated(mesh: Any) -> dict[str, Any]:
    """As `by_experts` in one process, with DTensors of which each process has all."""
    model = initialized("einsum")
    distribute(model, Replicate(), mesh)
    converted(model)
    return trained(model, *inputs_of("einsum"))


def refused(mesh: Any) -> str:
    """The error of a DTensor that is sharded by features."""
    model = initialized("einsum")
    distribute(model, Shard(1), mesh)
    converted(model)
    try:
        model(*inputs_of("einsum"))
    except ValueError as error:
        return str(error)
    return ""


def initialized(kind: str) -> Any:
    return test_stacked_weights.initialized(OWN[kind]())


def distribute(model: nn.Module, placement: Any, mesh: Any) -> None:
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(parameter.data, mesh, [placement])))


def trained(model: nn.Module, *inputs: Tensor) -> dict[str, Any]:
    """A step in which the gradient of a row of the output does not depend on other rows."""
    set_step(model, 2)
    y = model(*inputs)
    (y.float() * torch.linspace(-1, 1, y.shape[-1])).sum().backward()
    return found_in(model, y)


def found_in(model: nn.Module, y: Tensor) -> dict[str, Any]:
    """The output, the whole gradients, and the weights that were multiplied in high precision."""
    grads = {name: grad_of(parameter) for name, parameter in model.named_parameters()}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
    return {"y": y.detach(), **whole, "bypassed": audit(model).bypassed}


def compute(_rank: int) -> dict[str, object]:
    mesh = init_device_mesh("cpu", (WORLD,))
    return {
        "fully sharded": {case: fully_sharded(*case, mesh) for case in FULLY_SHARDED},
        "by experts": {kind: by_experts(kind, mesh, True) for kind in OWN},
        "refused": refused(mesh),
        "replicated": replicated(mesh),
    }


if __name__ == "__main__":
    write_result(compute)
