"""One token of a Mamba-2 mixer: convolution, state update and scan output, then the norm of training.

Between them the outputs of convolution and scan pass through memory. They are a hundredth of the states, each
of which one program reads and writes once.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false
# (Triton types the kernels, and launches also pass compiler options)

import torch
import triton
import triton.language as tl
from torch import Tensor

from fourbits.model.ops.gated_norm.kernels import gated_norm_triton
from fourbits.model.ops.mamba_step.weights import StepWeights

#: channels per program of the convolution, and warps of both kernels: 8 share a state of 64 x 128
_CHANNELS, _WARPS = 512, (2, 8)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log(1 + e) with e = exp(-|x|), with FP32 accuracy for small e, too.

    log(1 + e) = 2 atanh(s) with s = e / (2 + e) <= 1/3, by the first nine terms of its series in s^2.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    square = s * s
    series = square / 17.0 + 1.0 / 15.0
    for term in tl.static_range(7):
        series = series * square + 1.0 / (13.0 - 2.0 * term)
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def conv_step_kernel(projected_ptr, projected_row, inputs_ptr, begins_ptr, weight_ptr, bias_ptr, out_ptr,
                     M: tl.constexpr, C: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Write out [B, C], SiLU of a convolution with four taps, and shift inputs [B, 3, C] by a token.

    projected: [B, z | new input | dt], z having M channels. Grid: sequences, blocks of channels.
    """
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BC + tl.arange(0, BC)
    inside = channel < C
    known = inside & (tl.load(begins_ptr + row) == 0)
    inputs_ptr += row * 3 * C
    new = tl.load(projected_ptr + row * projected_row + M + channel, mask=inside, other=0.0)
    first = tl.load(inputs_ptr + channel, mask=known, other=0.0)
    second = tl.load(inputs_ptr + C + channel, mask=known, other=0.0)
    third = tl.load(inputs_ptr + 2 * C + channel, mask=known, other=0.0)
    weight_ptr += channel * 4
    total = tl.load(bias_ptr + channel, mask=inside, other=0.0)
    total += new.to(tl.float32) * tl.load(weight_ptr + 3, mask=inside, other=0.0)
    total += third.to(tl.float32) * tl.load(weight_ptr + 2, mask=inside, other=0.0)
    total += second.to(tl.float32) * tl.load(weight_ptr + 1, mask=inside, other=0.0)
    total += first.to(tl.float32) * tl.load(weight_ptr, mask=inside, other=0.0)
    tl.debug_barrier()  # several threads may have loaded a channel that one of them overwrites
    tl.store(inputs_ptr + channel, second, mask=inside)
    tl.store(inputs_ptr + C + channel, third, mask=inside)
    tl.store(inputs_ptr + 2 * C + channel, new, mask=inside)
    silu = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr + row * C + channel, silu.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def state_step_kernel(projected_ptr, projected_row, conv_ptr, state_ptr, begins_ptr, dt_bias_ptr, a_log_ptr,
                      d_ptr, y_ptr, min_step, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
                      N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Update state [B, H, P, N] and write y [B, H * P].

    projected: [B, others | dt]; conv: [B, x | B | C], the convolution's output. Grid: B * H.
    """
    M: tl.constexpr = H * P
    C: tl.constexpr = M + 2 * G * N
    row, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    p, n = tl.arange(0, BP), tl.arange(0, BN)
    within = (p < P)[:, None] & (n < N)[None, :]
    known = within & (tl.load(begins_ptr + row) == 0)
    state_ptr += (row * H + head) * P * N
    place = p[:, None] * N + n[None, :]
    state = tl.load(state_ptr + place, mask=known, other=0.0)

    conv_ptr += row * C
    group = head // (H // G)
    x = tl.load(conv_ptr + head * P + p, mask=p < P, other=0.0).to(tl.float32)
    b = tl.load(conv_ptr + M + group * N + n, mask=n < N, other=0.0).to(tl.float32)
    c = tl.load(conv_ptr + M + G * N + group * N + n, mask=n < N, other=0.0).to(tl.float32)
    dt = tl.load(projected_ptr + row * projected_row + M + C + head).to(tl.float32)
    dt = tl.maximum(_softplus(dt + tl.load(dt_bias_ptr + head)), min_step)
    decay = tl.exp(dt * -tl.exp(tl.load(a_log_ptr + head)))
    state = decay * state + x[:, None] * (dt * b)[None, :]
    tl.store(state_ptr + place, state, mask=within)
    y = tl.sum(state * c[None, :], 1) + tl.load(d_ptr + head) * x
    tl.store(y_ptr + row * M + head * P + p, y.to(y_ptr.dtype.element_ty), mask=p < P)


def mamba_step(
    projected: Tensor, inputs: Tensor, state: Tensor, begins: Tensor, weights: StepWeights
) -> Tensor:
    """[B, H*P] in projected's dtype, contiguous; see `op.mamba_step`."""
    rows, heads, head_dim, states = state.shape
    channels = inputs.shape[2]
    conv, y = projected.new_empty((rows, channels)), projected.new_empty((rows, heads * head_dim))
    begins = begins.view(torch.int8)
    conv_step_kernel[(rows, triton.cdiv(channels, _CHANNELS))](
        projected,
        projected.stride(0),
        inputs,
        begins,
        weights.conv_weight,
        weights.conv_bias,
        conv,
        M=heads * head_dim,
        C=channels,
        BC=_CHANNELS,
        num_warps=_WARPS[0],
    )
    state_step_kernel[(rows * heads,)](
        projected,
        projected.stride(0),
        conv,
        state,
        begins,
        weights.dt_bias,
        weights.a_log,
        weights.d,
        y,
        weights.min_time_step,
        H=heads,
        G=weights.num_groups,
        P=head_dim,
        N=states,
        BP=triton.next_power_of_2(head_dim),
        BN=triton.next_power_of_2(states),
        num_warps=_WARPS[1],
    )
    z = projected[:, : heads * head_dim]
    norm = gated_norm_triton.forward(y[None], z[None], weights.norm_weight, weights.num_groups, weights.eps)
    return norm[0]
