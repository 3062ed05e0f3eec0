"""Small models written in ways that nothing in the conversion is made for; each takes [8, 32] floats."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 6)


class TiedAcross(nn.Module):
    """One weight held by two layers of different modules."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.free = (nn.Sequential(nn.Linear(32, 32)) for _ in range(3))
        self.decode[0].weight = self.encode[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.free(self.encode(x)))


class TiedTransposed(nn.Module):
    """An autoencoder whose decoder is the encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle = nn.Linear(32, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.middle(self.encoder(x)), self.encoder.weight.t())


def outer(x: Tensor, module: Any) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return scaled(y, module.kernel)

    return inner(x)


def scaled(x: Tensor, kernel: Tensor) -> Tensor:
    return torch.einsum("bi,io->bo", x, kernel / 2)


class NestedHelpers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.table, self.body = matrix(32, 32), matrix(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return scaled(self.body(outer(x, self)), self.table)


class Einsums(nn.Module):
    """Attention by einsum with a matrix per head, and a low-rank one."""

    def __init__(self) -> None:
        super().__init__()
        self.w_query, self.w_key, self.w_value = (matrix(4, 32, 8) for _ in range(3))
        self.latent, self.out = matrix(32, 4), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("td,hde->hte", x, w) for w in (self.w_query, self.w_key, self.w_value))
        mixed = torch.einsum("hts,hse->the", (q @ k.mT).softmax(-1), v).flatten(1)
        return self.out(mixed + torch.einsum("td,dr,er->te", x, self.latent, self.latent))


class InDicts(nn.Module):
    """Parameters in a dict of dicts, and layers in a plain list beside a registered one."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({"query": matrix(32, 32), "mask": matrix(32, 32)})
        self.nested = nn.ModuleDict({"a": nn.ParameterDict({"pos_table": matrix(32, 32)})})
        self.registered = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.plain = [*self.registered]

    def forward(self, x: Tensor) -> Tensor:
        for name in self.scales:
            x = x @ self.scales[name]
        for group in self.nested.values():
            for each in group.values():  # pyright: ignore[reportCallIssue]
                x = x @ each
        for layer in self.plain:
            x = layer(x)
        return x


class MadeLater(nn.Module):
    """Layers added by name in a loop, and found by name again."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(3):
            self.add_module(f"stage{i}", nn.Linear(32, 32))
            setattr(self, f"skip_{i}", nn.Linear(32, 32, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            x = getattr(self, f"stage{i}")(x) + F.linear(x, getattr(self, f"skip_{i}").weight)
        return x


class Bilinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.body = nn.Bilinear(32, 32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.pair(x, x))


class Cells(nn.Module):
    """Recurrent cells, called in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.gru, self.body = nn.RNNCell(32, 32), nn.GRUCell(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        for _ in range(2):
            h = self.gru(x, self.cell(x, h))
        return self.body(h)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.t() @ x


class OwnFunctions(nn.Module):
    """A custom autograd function on a parameter with a misleading name, and on a layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.codebook, self.read, self.called = matrix(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        product = Product.apply
        return self.called(product(Product.apply(x, self.codebook), self.read.weight))  # pyright: ignore


class LoRALike(nn.Module):
    """A frozen layer and two raw matrices beside it, merged on the fly in one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.merged = nn.Linear(32, 32), nn.Linear(32, 32)
        self.lora_A, self.lora_B, self.scale_A, self.scale_B = (
            matrix(4, 32), matrix(32, 4), matrix(4, 32), matrix(32, 4),
        )  # fmt: skip
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(x) + x @ self.lora_A.t() @ self.lora_B.t()
        return F.linear(x, self.merged.weight + self.scale_B @ self.scale_A, self.merged.bias)


class HandMoE(nn.Module):
    """Experts as layers in a list, chosen token by token; one of them by its functional form."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.Linear(32, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)) for _ in range(4)
        )
        self.shared = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.choose(x).softmax(-1)
        y = self.shared(x)
        for i, expert in enumerate(self.experts):
            rows = weights.argmax(-1) == i
            rows[i] = True  # so that each has one
            y = y.index_add(0, rows.nonzero().flatten(), expert(x[rows]) * weights[rows, i, None])
        return y


class Hypernetwork(nn.Module):
    """A network that computes the weight of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.makes = matrix(1, 16), nn.Linear(16, 32 * 32)
        self.body = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        made = self.makes(self.code).view(32, 32)
        return self.body(F.linear(x, made / 32))


class Checkpointed(nn.Module):
    """Recomputed blocks that read a parameter of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_mix, self.up, self.down = matrix(32, 32), nn.Linear(32, 64), nn.Linear(64, 32)

    def block(self, x: Tensor) -> Tensor:
        return self.down(self.up(x @ self.pos_mix).relu())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + checkpoint(self.block, x, use_reentrant=False)  # pyright: ignore[reportOperatorIssue]
        return x


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.proj, self.used = matrix(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)


class User(nn.Module):
    def forward(self, x: Tensor, owner: Owner) -> Tensor:
        return owner.used(F.linear(x @ owner.query, owner.proj.weight))


class ThroughArguments(nn.Module):
    """A module that multiplies by what another one holds, which it gets as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.owner, self.user = Owner(), User()

    def forward(self, x: Tensor) -> Tensor:
        return self.user(x, self.owner)


class Property(nn.Module):
    """Weights behind properties and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self._table, self.inner, self.body = matrix(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    @property
    def kernel(self) -> Tensor:
        return self._table * 0.5

    @property
    def weights(self) -> list[Tensor]:
        return [self.inner.weight, self.kernel]

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.linear(x, weight)
        return self.body(x)


class Scripted(nn.Module):
    """Code without a source, which reads a layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.past, self.table, self.body = nn.Linear(32, 32), matrix(32, 32), nn.Linear(32, 32)

    exec(
        "def forward(self, x):\n"
        "    import torch\n"
        "    return self.body(torch.nn.functional.linear(x, self.past.weight) @ self.table)\n"
    )


class Functional(nn.Module):
    """A module called with parameters that are computed from its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.body = nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        halved = {name: p * 0.5 for name, p in self.inner.named_parameters()}
        return self.body(torch.func.functional_call(self.inner, halved, (x,)))


class Normalized(nn.Module):
    """Weights that are normalized before each product."""

    def __init__(self) -> None:
        super().__init__()
        self.raw, self.body = matrix(32, 32), nn.Linear(32, 32)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ F.normalize(self.raw, dim=0)
        return self.body(self.conv(self.normed(x)))


class Stateful(nn.Module):
    """Chooses between two layers by a dict of methods, and keeps one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.spare = (nn.Linear(32, 32) for _ in range(3))
        self.routes: dict[str, Callable[[Tensor], Tensor]] = {
            "left": self.left.__call__,
            "right": self.go_right,
        }

    def go_right(self, x: Tensor) -> Tensor:
        return torch.addmm(self.right.bias, x, self.right.weight.t())

    def forward(self, x: Tensor) -> Tensor:
        for route in self.routes.values():
            x = route(x)
        return x


ODD_MODELS: list[type[nn.Module]] = [
    TiedAcross, TiedTransposed, NestedHelpers, Einsums, InDicts, MadeLater, Bilinears, Cells, OwnFunctions,
    LoRALike, HandMoE, Hypernetwork, Checkpointed, ThroughArguments, Property, Scripted, Functional,
    Normalized, Stateful,
]  # fmt: skip
