"""The state-space recurrence of Mamba-2, one token at a time: the specification of the SSD scan.

    S_t = exp(dt_t a) S_{t-1} + dt_t b_t x_t^T        y_t = S_t^T c_t + d x_t

per head, with a state S of [N, P] and S_0 = 0 (arXiv:2405.21060 section 2). d x_t is the skip connection,
which bypasses the state. The heads of a group share b and c.
"""

import torch
from torch import Tensor


def ssd(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Run the recurrence in the dtype of the arguments.

    x: [B, T, H, P]; dt: [B, T, H] > 0; a: [H] < 0; b, c: [B, T, G, N] with H a multiple of G; d: [H]
    -> [B, T, H, P].
    """
    heads_per_group = x.shape[2] // b.shape[2]
    b, c = (group.repeat_interleave(heads_per_group, dim=2) for group in (b, c))  # [B, T, H, N]
    state = x.new_zeros(x.shape[0], x.shape[2], b.shape[3], x.shape[3])
    outputs = []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        state = torch.exp(step * a[:, None, None]) * state + step * b[:, t, :, :, None] * x[:, t, :, None, :]
        outputs.append((state * c[:, t, :, :, None]).sum(2))
    return torch.stack(outputs, dim=1) + d[:, None] * x
