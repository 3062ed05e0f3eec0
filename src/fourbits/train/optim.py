"""AdamW on master weights, with gradient clipping. A non-finite step changes nothing.

Clipping and the check for non-finite values run on the device: the fused optimizer divides gradients by a
scale, and skips the update if a flag says that a value is not finite. So no step waits for the host.

BF16 masters are widened for the step only: AdamW updates FP32 weights, which are rounded back afterwards.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fourbits.train.config import OptimConfig
from fourbits.train.masters import store_update, update_key


def decays(parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices and convolution taps, embedding and head included.

    Vectors (norm gains, biases, A_log, D, dt_bias) do not decay. This is the rule of Megatron-LM, which
    trained the published runs; the paper itself does not mention it.
    """
    return parameter.dim() >= 2


class MasterOptimizer:
    """AdamW over the named masters of a model."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimConfig,
        seed: int = 0,
        norms_of_whole: Callable[[Tensor], Tensor] = lambda norms: norms,
    ) -> None:
        """parameters: in the model's order, which keys the random bits of BF16 masters' updates.

        norms_of_whole: the norms of whole gradients, FP32 [n], from those of the shards in `parameters`.
        """
        self.parameters, self._norms_of_whole = dict(parameters), norms_of_whole
        self.grad_clip = config.grad_clip
        self.seed, self.stochastic = seed, config.masters == "bf16-sr"
        #: what AdamW updates: an FP32 master itself; for a BF16 master, a parameter that is empty between
        #: steps
        self._updated = {name: _fp32_place(p) for name, p in self.parameters.items()}
        matrices = [self._updated[name] for name, p in self.parameters.items() if decays(p)]
        others = [self._updated[name] for name, p in self.parameters.items() if not decays(p)]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        # lr is changed in `step` below.
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def step(self, lr: float, loss: Tensor, blocked: Tensor, number: int = 0) -> Tensor:
        """Clip, update, and delete the gradients. Returns FP32 [2 + parameters], still on the device.

        loss, blocked: FP32 scalars; number: of the step, 0 for the first. The update is skipped if `blocked`
        is not 0, or if the loss or the gradient norm is not finite. Result: whether it was skipped (1 or 0),
        the global gradient norm before clipping, and the norm of each parameter's gradient in the order of
        `parameters`.
        """
        zero = torch.zeros((), device=loss.device, dtype=torch.float32)
        grads = [zero if p.grad is None else p.grad for p in self.parameters.values()]
        norms = torch.stack(torch._foreach_norm(grads))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        norms = self._norms_of_whole(norms)
        norm = torch.linalg.vector_norm(norms)
        skipped = torch.maximum(blocked, (~(norm.isfinite() & loss.isfinite())).float())
        for group in self.adamw.param_groups:
            group["lr"] = lr
        fused: Any = self.adamw  # these two attributes are the interface that torch.amp.GradScaler uses
        fused.found_inf = skipped
        fused.grad_scale = None if self.grad_clip is None else (norm / self.grad_clip).clamp(min=1.0)
        self._widen()
        self.adamw.step()
        self._round(number)
        self.adamw.zero_grad(set_to_none=True)
        return torch.cat((skipped[None], norm[None], norms))

    def _widen(self) -> None:
        """Pass BF16 masters to AdamW in FP32, with their gradients."""
        for name, place in self._updated.items():
            master = self.parameters[name]
            if place is not master:
                place.data = master.detach().float()
                place.grad, master.grad = master.grad, None

    def _round(self, number: int) -> None:
        """Round AdamW's results into BF16 masters. After a skipped step, rounding changes no bit."""
        for index, (name, place) in enumerate(self._updated.items()):
            master = self.parameters[name].detach()
            if place is self.parameters[name]:
                continue
            if self.stochastic:
                store_update(master, place.detach(), update_key(self.seed, number, index))
            else:
                master.copy_(place.detach())
            place.data = place.data.new_empty(0)

    def state(self) -> dict[str, Tensor]:
        """AdamW's moments and step count under "NAME.exp_avg" and so on; zeros before the first step."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            state = self.adamw.state[self._updated[name]] or _fresh_state(parameter)
            found |= {f"{name}.{key}": state[key] for key in STATE_KEYS}
        return found

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from a saved `state()`."""
        for name, parameter in self.parameters.items():
            state = _fresh_state(parameter)
            for key in STATE_KEYS:
                state[key].copy_(saved[f"{name}.{key}"])
            self.adamw.state[self._updated[name]] = state


STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")


def master_of(key: str) -> str:
    """The name of the master that an entry of `state()` belongs to."""
    return key.rpartition(".")[0]


def _fresh_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
    }


def _fp32_place(master: nn.Parameter) -> nn.Parameter:
    """The master itself if it is FP32, else a parameter for its FP32 values during a step."""
    if master.dtype == torch.float32:
        return master
    return nn.Parameter(torch.empty(0, device=master.device, dtype=torch.float32))
