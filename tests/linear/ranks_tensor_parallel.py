"""What the ranks of a tensor-parallel group compute, written to a file for test_parallelized.py."""

import copy
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from fourbits.linear import compute as gemms
from fourbits.linear.audit import audit
from fourbits.linear.convert import convert
from fourbits.linear.plan import linear_plan
from fourbits.linear.step import set_step
from fourbits.quant.cpu import compiled
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe
from fourbits.settings import override
from linear.unshareable import errors
from support import parallel_llama
from support.straight_through import grad_of
from support.two_processes import WORLD, write_result

ROLES = [f"{gemm}.{side}" for gemm in ("fprop", "dgrad", "wgrad") for side in ("lhs", "rhs")]
WHOLE = {"keep_bf16.first_blocks": 0, "keep_bf16.last_blocks": 0}
#: all operands stochastic, so that random bits are drawn for every role
STOCHASTIC = {**WHOLE, **{f"{role}.rounding": "sr" for role in ROLES}}
#: name of the layer -> features and style; sequence parallel or not
LAYERS = {"up": (64, 128), "down": (128, 64)}
ORDERS = ("converted first", "sharded first")
CASES = list(product(LAYERS, (False, True), ORDERS))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(*LAYERS["up"]), nn.Linear(*LAYERS["down"])

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def recipe(changes: dict[str, Any] = STOCHASTIC, name: str = "nvfp4") -> Recipe:
    return override(get_recipe(name), changes)


def plan(sequence: bool) -> dict[str, Any]:
    if not sequence:
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}
    up = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    return {"up": up, "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}


def built(mesh: Any, sequence: bool = False, order: str = ORDERS[0], dtype: Any = torch.float32) -> MLP:
    model = MLP().to(dtype)
    steps: list[Callable[[], Any]] = [lambda: convert(model, recipe(), seed=3)]
    if mesh is not None:
        steps.append(lambda: parallelize_module(model, mesh, plan(sequence)))
    for step in steps if order == ORDERS[0] else reversed(steps):
        step()
    return model


def tensors(name: str) -> tuple[Tensor, Tensor]:
    """X [2, 16, K] and dY [2, 16, N] of a layer, with the largest entries in the last features."""
    generator = torch.Generator().manual_seed(len(name))
    x, dy = (torch.randn(2, 16, size, generator=generator) for size in LAYERS[name])
    x[0, 3, -1], dy[1, 7, -2] = 11.0, 13.0
    return x, dy


@contextmanager
def recording() -> Generator[list[Any]]:
    """Values and scale of both operands of each GEMM, in the order of calls."""
    found, plain = list[Any](), gemms.gemm

    def planned(*args: Any) -> Callable[..., Any]:
        multiply = plain(*args)

        def multiplied(lhs: Any, rhs: Any, bias: Any) -> Any:
            found.append(tuple((each.values.clone(), each.scale.clone()) for each in (lhs, rhs)))
            return multiply(lhs, rhs, bias)

        return multiplied

    linear_plan.cache_clear()
    gemms.gemm = planned
    try:
        yield found
    finally:
        gemms.gemm = plain
        linear_plan.cache_clear()


def whole(x: Any) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()  # of a message that has arrived


def part(x: Tensor, rank: int, dim: int | None) -> Tensor:
    return x if dim is None else x.chunk(WORLD, dim)[rank].contiguous()


def layer_called(
    name: str,
    sequence: bool,
    order: str,
    mesh: Any = None,
    rank: int = 0,
    first_token: int = 64,
    shift: int = 0,
) -> dict[str, Any]:
    """Operands, output and gradients of one layer, whose X and dY are given, plus shift."""
    with recording() as operands:
        model = built(mesh, sequence, order)
        layer = getattr(model, name)
        set_step(model, 5, first_token)
        x, dy = (each + shift for each in tensors(name))
        places = {"up": (1 if sequence else None, -1), "down": (-1, 1 if sequence else None)}[name]
        own = (
            [x, dy] if mesh is None else [part(t, rank, dim) for t, dim in zip((x, dy), places, strict=True)]
        )
        leaf = own[0].clone().requires_grad_()
        y = layer(leaf)
        local = y.to_local() if isinstance(y, DTensor) else y
        local.backward(own[1])
    grads = {key: grad_of(parameter) for key, parameter in layer.named_parameters()}
    return {
        "operands": operands,
        "y": local.detach().clone(),
        "dx": grad_of(leaf).clone(),
        **{key: whole(grad) for key, grad in grads.items()},
        "placements": {key: str(getattr(grad, "placements", "")) for key, grad in grads.items()},
        "bias_values": whole(layer.bias.detach()),
    }


def in_bf16(mesh: Any) -> dict[str, Tensor]:
    """The partial sums of a layer split by input features, and their sum."""
    model = MLP().to(torch.bfloat16)
    convert(model, recipe(), seed=3)
    parallelize_module(
        model, mesh, {"down": RowwiseParallel(output_layouts=Partial(), use_local_output=False)}
    )
    set_step(model, 5)
    rank = mesh.get_local_rank()
    y: Any = model.down(part(tensors("down")[0].to(torch.bfloat16), rank, -1))
    return {"partial": y.to_local().detach(), "sum": whole(y).detach()}


def same_results(mesh: Any, sequence: bool) -> dict[str, bool]:
    """Whether recomputed and compiled calls have the bits of eager ones."""
    x = part(tensors("up")[0], mesh.get_local_rank(), 1 if sequence else None)

    def result(wrap: Callable[[nn.Module], Callable[..., Any]]) -> list[Tensor]:
        model = built(mesh, sequence)
        set_step(model, 5)
        leaf = x.clone().requires_grad_()
        y: Any = wrap(model)(leaf)
        local = y.to_local() if isinstance(y, DTensor) else y
        local.backward(torch.ones_like(local))
        return [local.detach(), grad_of(leaf), *(grad_of(p).to_local() for p in model.parameters())]  # pyright: ignore

    eager = result(lambda model: model)
    others = {
        "recomputed": result(lambda model: partial(checkpoint, model, use_reentrant=False)),
        "compiled": result(lambda model: torch.compile(model, fullgraph=True, backend="aot_eager")),
    }
    return {
        name: all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))
        for name, found in others.items()
    }


def keeps_operand(model: nn.Module, layer: Any, x: Tensor) -> list[bool]:
    """Whether each micro-batch reused the weight's operand: the first two are of one step, as the others."""
    kept = list[Any]([None])
    for number in range(4):
        set_step(model, 1 + number // 2, 0, same_weights=bool(number % 2))
        model(x).sum().backward()
        kept.append(layer.quantization.weight._kept and layer.quantization.weight._kept[2])
    return [after is not None and after is before for before, after in pairwise(kept)]


def kept_operand(mesh: Any, data: Any = None) -> list[bool]:
    """`keeps_operand` of a layer whose weight is rounded to nearest. data: the ranks of FSDP2, if any."""
    model = nn.Sequential(nn.Linear(*LAYERS["up"]))
    convert(model, recipe(WHOLE), include=["0"])
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    if data is not None:
        fully_shard(model, mesh=data)
    return keeps_operand(model, model[0], tensors("up")[0])


def trained_llama(mesh: Any) -> dict[str, Any]:
    """Losses of a few steps, warnings of the audit, and the state_dict before training."""
    model = parallel_llama.Llama()
    convert(model, "nvfp4", keep_first=0, keep_last=1)
    parallel_llama.parallelize(model, mesh)
    state: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    state = {key: value.clone() for key, value in state.items()}  # training writes the parameters
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = parallel_llama.trained(model, set_step)
    report = audit(model)
    return {
        "losses": losses,
        "warnings": [str(each.message) for each in caught if "fourbits" in str(each.message)],
        "state": state,
        "called": len(report.called),
        "bypassed": report.bypassed,
    }


def replicated(mesh: Any) -> dict[str, Tensor]:
    """A layer that every rank has in full, and its gradient, in one process without mesh."""
    model = nn.Sequential(nn.Linear(64, 128))
    model.load_state_dict(copy.deepcopy({f"0.{k}": v for k, v in MLP().up.state_dict().items()}))
    convert(model, recipe(), include=["0"], seed=3)
    x, dy = tensors("up")
    if mesh is not None:
        layer: Any = model[0]
        for key, value in list(layer.named_parameters()):
            setattr(layer, key, nn.Parameter(distribute_tensor(value.data, mesh, [Replicate()])))
        x = distribute_tensor(x, mesh, [Replicate()])
    set_step(model, 5)
    y = whole(model(x))
    y.backward(dy)
    return {"y": y.detach(), **{key: whole(grad_of(p)) for key, p in model.named_parameters()}}


def sharded_layer(name: str, mesh: Any) -> dict[str, Any]:
    """Operands and gradients of one layer that two ranks share and FSDP2 shards over two more."""
    data, tensor = mesh["data"], mesh["tensor"]
    with recording() as operands:
        model = nn.Sequential()
        model.add_module(name, getattr(built(tensor), name))
        fully_shard(model, mesh=data)
        set_step(model, 5, 64 + 32 * data.get_local_rank())
        x, dy = (each + data.get_local_rank() for each in tensors(name))
        dims = (None, -1) if name == "up" else (-1, None)
        x, dy = (part(t, tensor.get_local_rank(), dim) for t, dim in zip((x, dy), dims, strict=True))
        model(x.requires_grad_()).backward(dy)
    grads = {key: grad_of(parameter) for key, parameter in model[0].named_parameters()}
    return {
        "operands": operands,
        **{key: whole(grad) for key, grad in grads.items()},
        "placements": {key: str(getattr(grad, "placements", "")) for key, grad in grads.items()},
    }


def compute(rank: int) -> dict[str, object]:
    compiled.COMPILE_FROM = 1 << 40  # compiling quantizers would take longer than the tests
    if dist.get_world_size() > WORLD:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        kept = kept_operand(square["tensor"], square["data"])
        return {**{name: sharded_layer(name, square) for name in LAYERS}, "kept": kept}
    mesh = init_device_mesh("cpu", (WORLD,))
    return {
        "layers": {case: layer_called(*case, mesh, rank) for case in CASES},
        "bf16": in_bf16(mesh),
        "same": {sequence: same_results(mesh, sequence) for sequence in (False, True)},
        "kept": kept_operand(mesh),
        "llama": trained_llama(mesh),
        "errors": errors(mesh),
        "replicated": replicated(mesh),
    }


if __name__ == "__main__":
    write_result(compute)
