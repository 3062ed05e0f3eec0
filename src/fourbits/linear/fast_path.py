"""nn.TransformerEncoderLayer without its fused inference kernel, while its linear layers are quantized.

In training its forward calls linear1 and linear2. In evaluation without gradients one kernel reads their
weights instead, and nn.TransformerEncoder packs padded batches for it. Both first check an attribute that has
no other use; here it switches the kernel off, so that evaluation computes as training does.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from fourbits.linear.layer_state import converted_state

#: where a module keeps its attribute's old value
_KEPT = "_before_quantization"


def settle_fast_paths(modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Switch fast paths of encoder layers off where linear layers are converted, and on again elsewhere."""
    encoders: list[nn.TransformerEncoder] = []
    slow = set[nn.Module]()
    for _, module in modules:
        if isinstance(module, nn.TransformerEncoderLayer):
            if any(converted_state(layer) is not None for layer in (module.linear1, module.linear2)):
                slow.add(module)
            _settle(module, "activation_relu_or_gelu", 0, module in slow)
        elif isinstance(module, nn.TransformerEncoder):
            encoders.append(module)
    for encoder in encoders:
        _settle(encoder, "use_nested_tensor", False, not slow.isdisjoint(encoder.layers))


def _settle(module: Any, name: str, value: object, off: bool) -> None:
    """Give an attribute the value that switches a fast path off, or its old value."""
    kept = vars(module)
    if off and _KEPT not in kept and name in kept:
        kept[_KEPT] = kept[name]
        kept[name] = value
    elif not off and _KEPT in kept:
        kept[name] = kept.pop(_KEPT)
