"""The causal convolution as shifted multiply-adds in PyTorch, which the compiler fuses with its neighbors."""

from torch import Tensor
from torch.nn import functional as F

from fourbits.model.documents import same_as_before
from fourbits.model.ops.inputs import at_least_fp32


def causal_conv(x: Tensor, taps: Tensor, bias: Tensor, documents: Tensor | None = None) -> Tensor:
    """Depthwise convolution over a token and the W-1 before it, within the token's document if given.

    x: [B, T, C], taps: [W, C], bias: [C], documents: int [B, T] or None -> [B, T, C].
    """
    y = bias
    # W shifted multiply-adds fuse with the operations around them; a call of a convolution would not.
    for back, tap in enumerate(taps.flip(0)):
        term = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]] * tap
        if documents is not None and back:
            term = term * same_as_before(documents, back)[..., None]
        y = y + term
    return y


def conv_silu(x: Tensor, taps: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
    """SiLU of `causal_conv`, in FP32."""
    return F.silu(causal_conv(at_least_fp32(x), taps, bias, documents))
