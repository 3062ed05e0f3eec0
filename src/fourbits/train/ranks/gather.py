"""The format in which each weight is gathered: codes and scales, BF16, or FP32. It changes no bit of a step.

A weight that its layer quantizes is sent quantized, with the amax over all shards; one that is only read
rounded to BF16 is sent in BF16; others are sent in FP32.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourbits.linear.packed_shards import PackedShards, reads_as_bf16, unsupported_packed
from fourbits.linear.weight_source import set_weight_source
from fourbits.model.lm import LanguageModel
from fourbits.train.ranks.gathered_shard import GatheredShard

#: name of a parameter -> its whole master, FP32
Gather = Callable[[str], Tensor]


class Packed:
    """A weight that is sent as codes and block scales."""

    def __init__(self, weight: PackedShards) -> None:
        self.weight = weight

    def sent(self, shard: Tensor) -> tuple[Tensor, ...]:
        """The codes and scales of `RankGroup.weights_changed`."""
        return self.weight.sent()

    def arrive(self, parts: tuple[Tensor, ...], weight: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Pass the parts to the layer; the returned weight has a shape, but no values."""
        self.weight.receive(parts)
        if weight is not None:
            return weight, ()
        return torch.empty(self.weight.shape, device=parts[0].device, dtype=torch.float32), ()


class Rounded:
    """A weight that is sent in BF16 and widened on arrival."""

    def sent(self, shard: Tensor) -> tuple[Tensor, ...]:
        """The shard, rounded."""
        return (shard.to(torch.bfloat16),)

    def arrive(self, parts: tuple[Tensor, ...], weight: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The values in FP32, in memory that FSDP2 frees."""
        if weight is None:
            found = parts[0].float()
        else:
            found = weight
            found.data.copy_(parts[0])  # not counted as a change of what autograd saved
        parts[0].untyped_storage().resize_(0)  # FSDP2 gives it memory again before the next gather
        return found, (found,)


class Choice(NamedTuple):
    """The format in which one weight is sent, and why not in a more compact one."""

    format: Packed | Rounded | None
    why: str
    elements: int

    @property
    def word(self) -> str:
        """The format in words."""
        if self.format is None:
            return "in FP32"
        return "as codes and scales" if isinstance(self.format, Packed) else "in BF16"


def choose_formats(model: LanguageModel, ranks: Callable[[str], int], gather: Gather) -> dict[str, Choice]:
    """Choose the gather formats of a converted model's linear layers, and set up their parameters.

    model: on the meta device, before it is sharded; ranks: (parameter) -> how many ranks shard it, where 1
    means that nothing is gathered; gather: for samples of the layers' health, which read whole masters.
    Returns the choices by the name of the parameter.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found: dict[str, Choice] = {}
    for name, layer in list(model.named_modules()):
        weight = vars(layer)["_parameters"].get("weight")
        count = ranks(f"{name}.weight")
        if isinstance(layer, nn.Linear) and weight is not None and count > 1:
            tied = uses[id(weight)] > 1
            found[f"{name}.weight"] = choice = _choice(model, layer, count, tied)
            if isinstance(choice.format, Packed):
                values = _master(gather, f"{name}.weight")
                set_weight_source(layer, choice.format.weight, returns=True, values=values)
            if choice.format is not None:
                layer.weight = nn.Parameter(GatheredShard(weight.detach(), choice.format))
    return found


def _choice(model: LanguageModel, layer: nn.Linear, ranks: int, tied: bool) -> Choice:
    rows, size = layer.out_features, layer.weight.numel()
    if tied:
        return Choice(None, "tied to the embedding", size)
    why = "the model is compiled as a whole" if _is_compiled(model) else unsupported_packed(layer, ranks)
    if why is None:
        return Choice(Packed(PackedShards(layer)), "", size)
    if rows % ranks:
        return Choice(None, f"{rows} rows do not divide into {ranks} equal shards", size)
    bf16 = model.norm.out_dtype == torch.bfloat16 and reads_as_bf16(layer)
    return Choice(Rounded() if bf16 else None, why, size)


def describe(choices: Mapping[str, Choice]) -> list[str]:
    """The formats of all weights, a line per format and reason, for the log."""
    groups: dict[tuple[str, str], list[Choice]] = {}
    for choice in choices.values():
        groups.setdefault((choice.word, choice.why), []).append(choice)
    return [
        f"{len(found)} of {len(choices)} weights are gathered {word}, "
        f"{sum(c.elements for c in found) / 1e6:,.1f}M values{f': {why}' if why else ''}"
        for (word, why), found in groups.items()
    ]


def _master(gather: Gather, name: str) -> Callable[[Tensor], Tensor]:
    return lambda weight: gather(name)


def _is_compiled(model: LanguageModel) -> bool:
    return any(getattr(block, "_compiled_call_impl", None) is not None for block in model.blocks)
