"""Initialization of the published models.

- Linear layers and embedding: normal with standard deviation init_std (0.02), as in Nemotron-H.
- Linear layers that write into the residual stream: init_std / sqrt(branches), branches being the number of
  residual branches, so that the variance of the stream does not grow with depth (GPT-2; Megatron-LM's
  `scaled_init_method_normal` divides by sqrt(2 L) in a Transformer and sqrt(L) in a hybrid).
- Mamba-2 (arXiv:2405.21060 and its published code): A uniform in [1, 16]; dt log-uniform in [0.001, 0.1],
  at least 1e-4, through the inverse of softplus; D one; convolution taps and bias uniform in +-1/sqrt(width).
- Norm gains: one.

Each parameter is drawn from a separate CPU generator, seeded by (seed, name). So its values do not depend on
the device, on the order of modules, or on the other layers of the model.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from fourbits.model.config import ModelConfig

A_RANGE = (1.0, 16.0)
DT_RANGE = (0.001, 0.1)
DT_FLOOR = 1e-4
RESIDUAL_WRITERS = ("o_proj", "down_proj", "out_proj")
ONES = ("norm", "norm_weight", "attention_norm", "ffn_norm", "q_norm", "k_norm", "D")


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill every parameter of a LanguageModel in place."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(name, parameter.shape, config, seed))


def initial_value(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """FP32 values of the parameter with this name in a LanguageModel's state_dict, on the CPU."""
    generator = torch.Generator().manual_seed(_parameter_seed(seed, name))
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if kind in ONES:
        return torch.ones(shape, dtype=torch.float32, device="cpu")
    if kind in ("conv_weight", "conv_bias"):
        bound = 1 / math.sqrt(config.conv_width)
        return torch.empty(shape, dtype=torch.float32, device="cpu").uniform_(
            -bound, bound, generator=generator
        )
    if kind == "A_log":
        return (
            torch.empty(shape, dtype=torch.float32, device="cpu")
            .uniform_(*A_RANGE, generator=generator)
            .log()
        )
    if kind == "dt_bias":
        low, high = map(math.log, DT_RANGE)
        dt = (
            torch.empty(shape, dtype=torch.float32, device="cpu")
            .uniform_(low, high, generator=generator)
            .exp()
            .clamp(min=DT_FLOOR)
        )
        return dt + torch.log(-torch.expm1(-dt))  # softplus^-1
    branches = config.num_residual_branches if kind in RESIDUAL_WRITERS else 1
    return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(
        std=config.init_std / math.sqrt(branches), generator=generator
    )


def _parameter_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # manual_seed accepts 63 bits
