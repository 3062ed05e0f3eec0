"""Checks the state_dict to export, which must be the whole model's, and rounds its tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fourbits.exchange.shown import not_parameters
from fourbits.exchange.weights import require_finite, require_fit, require_unwrapped, shapes
from fourbits.model.config import ModelConfig


def require_state(state: object, config: ModelConfig) -> None:
    """Raise ValueError, naming the tensor, unless this is the state_dict of a model of this configuration."""
    if not isinstance(state, Mapping):
        raise ValueError(
            f"save_hf: state must be a state_dict, got {type(state).__name__}. Pass model.state_dict()."
        )
    if not isinstance(config, ModelConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"save_hf: config must be a ModelConfig, got {type(config).__name__}. Pass model.config."
        )
    require_unwrapped(state)
    expected = shapes(config)
    for name, shape in expected.items():
        if name not in state:
            raise ValueError(f"save_hf: {name!r} is missing in the state_dict. Pass that of the whole model.")
        tensor = state[name]
        if not isinstance(tensor, Tensor) or tensor.is_meta or hasattr(tensor, "full_tensor"):
            raise ValueError(
                f"save_hf: {name!r} must be a tensor with its values, got {_kind(tensor)}. Gather the state "
                "of a sharded model first (torch.distributed.checkpoint.state_dict, full_state_dict=True)."
            )
        require_fit(name, tensor, shape)
    if unknown := [name for name in state if name not in expected]:
        raise ValueError(f"save_hf: {not_parameters(unknown)}")


def rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy on the CPU in dtype. Raises ValueError for values that are not finite, before or after.

    Always a copy, because a file cannot hold two tensors that share storage.
    """
    require_finite(name, tensor)
    copy = tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
    require_finite(name, copy, f"{dtype} has a smaller range than {tensor.dtype}; save in torch.bfloat16.")
    return copy


def _kind(value: object) -> str:
    return "one on the meta device" if isinstance(value, Tensor) and value.is_meta else type(value).__name__
