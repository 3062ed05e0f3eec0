"""Tensor parallelism: the layers of each block split over ranks, in place, before FSDP2 shards the parts.

Layers that read the residual stream (q, k, v, up, gate, in_proj) are split by output features, those that
write to it (o, down, out_proj) by input features. Heads and groups stay whole, so that a mixer sends nothing
inside. in_proj's rows z, x, B, C and dt are each split. Every parameter stays a plain tensor: kernels,
regions and FSDP2 see a smaller model. Embedding, norms and head are whole, and each rank has a part of the
tokens there (sequence.py).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from fourbits.linear.feature_shard import shard_features
from fourbits.linear.layer_state import converted_state
from fourbits.linear.ranks.features import group_reduction, shard_at, split_table
from fourbits.model.attention import Attention
from fourbits.model.layers import FFN
from fourbits.model.lm import LanguageModel
from fourbits.model.mamba2 import Mamba2
from fourbits.recipe.recipe import table_from_text
from fourbits.train.ranks.sequence import share_tokens
from fourbits.train.ranks.splits import Split, rows_of

_COLUMNS = "q_proj", "k_proj", "v_proj", "up_proj", "gate_proj", "in_proj"
_ROWS = "o_proj", "down_proj", "out_proj"


class TensorRanks(NamedTuple):
    """The ranks that share layers: their process group, and this one's number in it."""

    group: Any
    rank: int
    size: int


def split_layers(model: LanguageModel, ranks: TensorRanks) -> dict[str, Split]:
    """Split the blocks of a converted model on the meta device, in place. Returns each parameter's split.

    The numbers of layers, which select their random bits, do not change. Raises ValueError on all ranks for a
    recipe or a model that cannot be split.
    """
    _refuse(model, ranks.size)
    splits = {name: Split(parameter.shape) for name, parameter in model.named_parameters()}
    for name, mixer in list(_mixers(model)):
        children: list[tuple[str, Any]] = list(mixer.named_children())
        for child, layer in children:
            if child in _COLUMNS + _ROWS:
                split = Split(layer.weight.shape, 0 if child in _COLUMNS else 1, _segments(child, mixer))
                splits[f"{name}.{child}.weight"] = split
                _split_linear(f"{name}.{child}", layer, split, ranks)
        if isinstance(mixer, Mamba2):
            splits |= {f"{name}.{child}": split for child, split in _split_heads(mixer, ranks).items()}
        share_tokens(mixer, ranks.group)
    model.share_tokens(ranks.rank, ranks.size)
    return splits


def _mixers(model: LanguageModel) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, Attention | FFN | Mamba2):
            yield name, module


def _segments(child: str, mixer: nn.Module) -> tuple[int, ...]:
    """Sizes of z, x, B, C and dt in a Mamba mixer's in_proj; of x, B and C in its convolution; else ()."""
    if not isinstance(mixer, Mamba2):
        return ()
    heads, d_mamba = len(mixer.A_log), len(mixer.norm_weight)
    state = (len(mixer.conv_bias) - d_mamba) // 2
    of_conv = d_mamba, state, state
    segments = {"in_proj": (d_mamba, *of_conv, heads), "conv_weight": of_conv, "conv_bias": of_conv}
    return segments.get(child, ())


def _split_heads(mixer: Mamba2, ranks: TensorRanks) -> dict[str, Split]:
    """Keep this rank's heads and groups of a mixer, whose linear layers are split already."""
    own = dict(mixer.named_parameters(recurse=False))
    splits = {name: Split(parameter.shape, 0, _segments(name, mixer)) for name, parameter in own.items()}
    for name, split in splits.items():
        setattr(mixer, name, nn.Parameter(split.part(own[name].detach(), ranks.rank, ranks.size)))
    mixer.num_groups //= ranks.size
    return splits


def _split_linear(name: str, layer: Any, split: Split, ranks: TensorRanks) -> None:
    """Keep this rank's rows (dim 0) or columns (dim 1) of a linear layer's weight."""
    assert split.dim is not None
    dim = split.dim
    layer.weight = nn.Parameter(split.part(layer.weight.detach(), ranks.rank, ranks.size))
    layer.out_features, layer.in_features = layer.weight.shape
    state = converted_state(layer)
    if state is None:
        return
    runs = rows_of(split.segments, ranks.rank, ranks.size)
    reduction = group_reduction(ranks.group, dim, runs)
    for size in split.segments or (split.shape[dim],):
        try:
            split_table(table_from_text(state.table), dim, size, ranks.size, reduction)
        except ValueError as error:
            raise ValueError(
                f"parallel.tensor {ranks.size}: {name}: {error} `fourbits lint CONFIG --tensor "
                f"{ranks.size}` names the sizes and a number that fits."
            ) from error
    first = 0 if runs else ranks.rank * layer.weight.shape[dim]
    shard_features(layer, *shard_at(dim, first), reduction)


def _refuse(model: LanguageModel, size: int) -> None:
    """Raises ValueError for what cannot be split."""
    what = f"parallel.tensor must be 1, got {size}, with"
    states = [(name, state) for name, m in model.named_modules() if (state := converted_state(m)) is not None]
    if any(getattr(block, "_compiled_call_impl", None) is not None for block in model.blocks):
        raise ValueError(
            f"{what} train.compile model: graphs of whole blocks would contain messages between ranks. Set "
            "train.compile to regions."
        )
    if any(name == "head" for name, _ in states):
        raise ValueError(
            f"{what} a recipe that quantizes the head, whose tokens are divided among ranks. Put head into "
            "recipe.keep_bf16.names, or set parallel.tensor to 1."
        )
    if any(state.recipe_state is not None for _, state in states):
        raise ValueError(
            f"{what} amax policies, adaptive layouts or shared amaxes: they would count several times what "
            "all ranks hold. Set every amax_policy to current and adaptive to none."
        )
    if any(state.phases is not None for _, state in states):
        raise ValueError(f"{what} a precision schedule, whose phases are not split. Remove recipe.schedule.")
    if any(table_from_text(state.table).sums != "fp32" for _, state in states):
        raise ValueError(
            f"{what} sums modelled on tensor cores, which are those of one rank. Set sums to fp32."
        )
