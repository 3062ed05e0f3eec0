"""The Mamba-2 mixer (arXiv:2405.21060 section 7): in_proj, convolution, SSD scan, gate, norm, out_proj.

in_proj's output is the concatenation z | x | B | C | dt, as Mamba-2 and NemotronH store it: z gates the
output, x is the input of the scan, B and C write and read the state, dt is the time step. Both projections
are separate modules, called and never read by a fused kernel, so that a recipe can replace them.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fourbits.model.documents import begins_document
from fourbits.model.linear import Linear
from fourbits.model.ops.conv.op import conv_silu
from fourbits.model.ops.gated_norm.op import gated_group_norm
from fourbits.model.ops.inputs import at_least_fp32
from fourbits.model.ops.self_check import use_kernels
from fourbits.model.ops.ssd.op import ssd
from fourbits.model.regions import RegionModule


def mamba_core(
    projected: Tensor,
    conv_taps: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    a_log: Tensor,
    d: Tensor,
    norm_weight: Tensor,
    num_groups: int,
    chunk_size: int,
    eps: float,
    documents: Tensor | None = None,
    min_time_step: float = 0.0,
    fused: bool = False,
) -> Tensor:
    """Region: everything between in_proj and out_proj, FP32 inside.

    projected: [B, T, z | x | B | C | dt]; a_log, d, dt_bias: [H]; norm_weight: [H*P]; documents: int [B, T]
    or None; min_time_step: lower bound of the time steps dt; fused: run convolution, scan and norm by
    kernels, each of which rounds its output to projected's dtype -> [B, T, H*P] in projected's dtype.
    """
    num_heads, d_mamba, d_conv = len(a_log), len(norm_weight), len(conv_bias)
    z, xbc, dt = projected.split((d_mamba, d_conv, num_heads), dim=-1)
    x, b, c = scan_inputs(xbc, conv_taps, conv_bias, num_heads, d_mamba, num_groups, documents, fused)
    starts = None if documents is None else begins_document(documents)
    dt = time_steps(dt, dt_bias, min_time_step)
    y = ssd(x, dt, -a_log.exp(), b, c, d, chunk_size, starts, fused)
    return gated_group_norm(y.flatten(2), z, norm_weight, num_groups, eps, fused).to(projected.dtype)


def scan_inputs(
    xbc: Tensor,
    conv_taps: Tensor,
    conv_bias: Tensor,
    num_heads: int,
    d_mamba: int,
    num_groups: int,
    documents: Tensor | None,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, T, H, P], b and c [B, T, G, N] of the scan: the convolution's output, in FP32 or from kernels.

    xbc: [B, T, x | B | C], a part of in_proj's output.
    """
    d_state = (len(conv_bias) - d_mamba) // 2
    widths = d_mamba, d_state, d_state
    x, b, c = conv_silu(xbc, conv_taps, conv_bias, documents, widths, fused)
    x = x.unflatten(-1, (num_heads, -1))
    return x, b.unflatten(-1, (num_groups, -1)), c.unflatten(-1, (num_groups, -1))


def time_steps(dt: Tensor, dt_bias: Tensor, min_time_step: float) -> Tensor:
    """The scan's time steps, at least min_time_step, FP32. dt: [B, T, H], a part of in_proj's output."""
    dt = F.softplus(at_least_fp32(dt) + dt_bias)
    return dt.clamp(min=min_time_step) if min_time_step else dt


class Mamba2(RegionModule):
    """Mamba-2 mixer. Its parameters are NemotronH's, renamed, with the same shapes and order of channels."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        state_size: int,
        num_groups: int,
        conv_width: int,
        chunk_size: int,
        eps: float,
        min_time_step: float = 0.0,
    ) -> None:
        super().__init__()
        d_mamba = num_heads * head_dim
        d_conv = d_mamba + 2 * num_groups * state_size
        self.num_groups = num_groups
        self.chunk_size = chunk_size
        self.eps = eps
        self.min_time_step = min_time_step
        #: of a head of the scan: channels P, and rows N of its state
        self.sizes = head_dim, state_size
        self.in_proj = Linear(d_model, d_mamba + d_conv + num_heads)
        self.conv_weight = nn.Parameter(torch.empty(d_conv, 1, conv_width, dtype=torch.float32))
        self.conv_bias = nn.Parameter(torch.empty(d_conv, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        self.norm_weight = nn.Parameter(torch.ones(d_mamba, dtype=torch.float32))
        self.out_proj = Linear(d_mamba, d_model)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """x: [B, T, D] -> [B, T, D]; position t sees positions up to t, of its document if given."""
        return self.out_proj(self.core(self.in_proj(x), documents))

    def core(self, projected: Tensor, documents: Tensor | None = None) -> Tensor:
        """The input of out_proj, [B, T, H*P], from the output of in_proj, [B, T, z | x | B | C | dt]."""
        return self.run(
            mamba_core,
            projected,
            self.taps(),
            self.conv_bias,
            self.dt_bias,
            self.A_log,
            self.D,
            self.norm_weight,
            self.num_groups,
            self.chunk_size,
            self.eps,
            documents,
            self.min_time_step,
            self.fused(projected),
        )

    def taps(self) -> Tensor:
        """The convolution's weight [W, C], so that the region's loops run along C."""
        return self.conv_weight.squeeze(1).t().contiguous()

    def fused(self, projected: Tensor) -> bool:
        """Whether kernels compute everything between the projections."""
        return use_kernels(projected.device, projected.dtype, *self.sizes)
