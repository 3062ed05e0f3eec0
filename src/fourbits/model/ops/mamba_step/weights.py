"""The parameters and constants of a Mamba-2 mixer that one token needs between its projections."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepWeights:
    """FP32 parameters of a mixer with H heads of P channels, N states, and C channels of the convolution.

    conv_weight: [C, 1, W]; conv_bias: [C]; dt_bias, a_log, d: [H]; norm_weight: [H*P]. min_time_step: lower
    bound of the time steps.
    """

    conv_weight: Tensor
    conv_bias: Tensor
    dt_bias: Tensor
    a_log: Tensor
    d: Tensor
    norm_weight: Tensor
    num_groups: int
    eps: float
    min_time_step: float = 0.0

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of the parts of in_proj's output: z, x | B | C, dt."""
        return len(self.norm_weight), len(self.conv_bias), len(self.a_log)

    @property
    def conv_widths(self) -> tuple[int, int, int]:
        """Widths of the parts of the convolution: x, B, C."""
        d_state = (len(self.conv_bias) - len(self.norm_weight)) // 2
        return len(self.norm_weight), d_state, d_state
