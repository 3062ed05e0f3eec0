"""Which parameters matrix multiplications read, found by watching a forward pass rather than by names."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
PRODUCTS = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.addbmm, aten.dot, aten.mv, aten.addmv,
    aten._grouped_mm,
}  # fmt: skip
#: products whose first argument is added
ADDS_FIRST = {aten.addmm, aten.baddbmm, aten.addbmm, aten.addmv}
#: operators whose results hold a parameter's values in new memory
COPIES = {aten._to_copy, aten.clone, aten.cat, aten.stack, aten.repeat, aten.index, aten.index_select}


class Multiplied(TorchDispatchMode):
    """Names of the parameters that products read while it is active, also through views, casts and copies."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._of: dict[int, set[str]] = {}
        self._kept: list[Tensor] = []  # so that no address is used twice
        for name, parameter in model.named_parameters():
            self._of[address(parameter)] = {name}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet, read = func.overloadpacket, set[str]()
        factors = args[1:] if packet in ADDS_FIRST else args[:2] if packet is aten.convolution else args
        for leaf in tree_leaves(factors):
            if isinstance(leaf, Tensor):
                read |= self._of.get(address(leaf), set())
        depthwise = packet is aten.convolution and args[8] > 1 and args[8] == args[0].shape[1]
        if packet in PRODUCTS and not depthwise:
            self.names |= read
        elif packet in COPIES and read:
            for leaf in tree_leaves(result):
                self._of[address(leaf)] = read
                self._kept.append(leaf)
        return result


def address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
