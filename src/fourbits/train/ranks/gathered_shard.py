"""The format in which a sharded weight is gathered: FSDP2's all-gather extension, on a rank's shard.

FSDP2 calls two methods of a sharded parameter's local tensor, if its subclass has them: one returns the
tensors to send, the other receives those of all ranks. Only FSDP2 and DTensor see this subclass; optimizer,
checkpoints and layers have plain tensors.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_OPS = torch.ops.aten
#: operators whose result is a shard, too: FSDP2 splits a parameter with them, and modules move it
_SHARDS: set[Any] = {
    _OPS.alias.default,
    _OPS.as_strided.default,
    _OPS.clone.default,
    _OPS.detach.default,
    _OPS.empty_like.default,
    _OPS.new_empty.default,
    _OPS.new_zeros.default,
    _OPS.slice.Tensor,
    _OPS.split.Tensor,
    _OPS.view.default,
    _OPS._to_copy.default,
}


class GatherFormat(Protocol):
    """The format in which a gather sends a weight, and how the weight is restored."""

    def sent(self, shard: Tensor) -> tuple[Tensor, ...]:
        """The tensors to send for a shard, FP32 [N / ranks, K]: rows, or rows of blocks, in their order."""
        ...

    def arrive(self, parts: tuple[Tensor, ...], weight: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Receive all ranks' parts. Returns the weight's tensor, and tensors whose memory FSDP2 may free.

        weight: the tensor that an earlier call returned, with its memory again; None at the first.
        """
        ...


class GatheredShard(Tensor):
    """A rank's shard of a weight and the format in which it is sent."""

    shard: Tensor
    format: GatherFormat

    @staticmethod
    def __new__(cls: type["GatheredShard"], shard: Tensor, format: GatherFormat) -> "GatheredShard":
        """A tensor with the shape of the shard."""
        return Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            shard.shape,
            strides=shard.stride(),
            storage_offset=shard.storage_offset(),
            dtype=shard.dtype,
            device=shard.device,
            layout=shard.layout,
        )

    def __init__(self, shard: Tensor, format: GatherFormat) -> None:
        self.shard, self.format = shard, format
        self.fsdp_pre_all_gather = _Sender(shard, format)

    def __repr__(self, *_: Any, **__: Any) -> str:
        """The shard and its format."""
        return f"GatheredShard({self.shard!r}, {type(self.format).__name__})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The tensors inside, for code that looks into subclasses."""
        return ["shard"], self.format

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], format: Any, *_: Any) -> "GatheredShard":
        return GatheredShard(inner["shard"], format)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator on the shards; splitting and moving keeps the format."""
        if func is _OPS.copy_.default:
            plain(args[0]).copy_(plain(args[1]))
            return args[0]
        format = next(arg.format for arg in args if isinstance(arg, GatheredShard))
        found = func(
            *tree_map_only(GatheredShard, plain, args),
            **tree_map_only(GatheredShard, plain, dict(kwargs or {})),
        )
        return tree_map_only(Tensor, lambda x: GatheredShard(x, format), found) if func in _SHARDS else found

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Restore the weight from the gathered parts. out: the weight that an earlier call returned."""
        found = self.format.arrive(all_gather_outputs, out)
        return found if out is None else None


class _Sender:
    """The function that FSDP2 calls before it sends. It reads the signature each time: 50 us for a method."""

    __signature__: inspect.Signature

    def __init__(self, shard: Tensor, format: GatherFormat) -> None:
        self.shard, self.format = shard, format

    def __call__(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """The tensors that FSDP2 sends, and no metadata."""
        return self.format.sent(self.shard), None


_Sender.__signature__ = inspect.signature(_Sender.__call__).replace(
    parameters=list(inspect.signature(_Sender.__call__).parameters.values())[1:]
)


def plain(tensor: Tensor) -> Tensor:
    """The shard itself, of a GatheredShard or of a plain tensor."""
    return tensor.shard if isinstance(tensor, GatheredShard) else tensor
