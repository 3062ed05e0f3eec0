"""AdamW on FP32 master weights, with clipping, and with updates that poison nothing.

Clipping and the check for non-finite values happen on the device: the fused optimizer divides gradients by a
scale and leaves everything as it was if told that a value is not finite. So no step waits for the host.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fourbits.train.config import OptimConfig


def decays(parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices and convolution taps, embedding and head included.

    Vectors (norm gains, biases, A_log, D, dt_bias) do not decay. That is the rule of Megatron-LM, with which
    the published runs were trained; the paper itself says nothing about it.
    """
    return parameter.dim() >= 2


class MasterOptimizer:
    """One AdamW over the named masters of a model."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> None:
        self.parameters = dict(parameters)
        self.grad_clip = config.grad_clip
        groups = [
            {
                "params": [p for p in self.parameters.values() if decays(p)],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in self.parameters.values() if not decays(p)], "weight_decay": 0.0},
        ]
        # torch annotates lr of the fused kernel as it does for all others: a float, changed per step below.
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def step(self, lr: float, loss: Tensor, blocked: Tensor) -> Tensor:
        """Clip, update, and drop the gradients. Returns FP32 [2 + parameters], still on the device.

        loss: FP32 scalar; blocked: FP32 scalar. The update is left out if `blocked` is not 0, or if the loss
        or the gradient norm is not finite. Result: whether it was left out (1 or 0), the global gradient norm
        before clipping, and the norm of each parameter's gradient in the order of `parameters`.
        """
        grads = [p.grad if p.grad is not None else p.new_zeros(()) for p in self.parameters.values()]
        norms = torch.stack(torch._foreach_norm(grads))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        norm = torch.linalg.vector_norm(norms)
        left_out = torch.maximum(blocked, (~(norm.isfinite() & loss.isfinite())).float())
        for group in self.adamw.param_groups:
            group["lr"] = lr
        fused: Any = self.adamw  # the two attributes are how torch.amp.GradScaler speaks to a fused optimizer
        fused.found_inf = left_out
        fused.grad_scale = None if self.grad_clip is None else (norm / self.grad_clip).clamp(min=1.0)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return torch.cat((left_out[None], norm[None], norms))

    def state(self) -> dict[str, Tensor]:
        """AdamW's moments and step count under "NAME.exp_avg" and so on; zeros before the first step."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            state = self.adamw.state[parameter] or _fresh_state(parameter)
            found |= {f"{name}.{key}": state[key] for key in STATE_KEYS}
        return found

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from what `state` gave."""
        for name, parameter in self.parameters.items():
            state = _fresh_state(parameter)
            for key in STATE_KEYS:
                state[key].copy_(saved[f"{name}.{key}"])
            self.adamw.state[parameter] = state


STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")


def _fresh_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
