"""Records X, W and dY of linear layers while a small hybrid model trains for a few steps."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourbits.linear.convert import convert
from fourbits.linear.module import QuantizedLinear
from fourbits.linear.step import set_step
from fourbits.model.config import ModelConfig
from fourbits.model.lm import LanguageModel
from fourbits.recipe.recipe import Recipe

_VOCABULARY = 4096
#: share of tokens that follow from the token before
_DETERMINED = 0.6
_LR = 1e-3


class Shape(NamedTuple):
    """The sizes of a linear layer's weight."""

    out_features: int
    in_features: int


class Recorded(NamedTuple):
    """Operands of one linear layer in one step, BF16 and FP32."""

    name: str
    #: [M, K]
    x: Tensor
    #: [N, K]
    weight: Tensor
    #: [M, N]
    dy: Tensor


def recorded(device: torch.device, recipe: Recipe, width: int, tokens: int, steps: int) -> list[Recorded]:
    """Operands of every quantized linear layer of Mamba-2, attention and two FFN blocks in the last step."""
    model = _model(recipe, width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=(0.9, 0.95))
    found: list[Recorded] = []
    for step, samples in enumerate(_samples(tokens, steps)):
        set_step(model, step)
        optimizer.zero_grad()
        found = _step(model, samples.to(device), keep=step == steps - 1)
        optimizer.step()
    return found


def shapes(recipe: Recipe, width: int) -> list[Shape]:
    """The different shapes of the layers that `recorded` returns."""
    layers = [layer for layer in _model(recipe, width).modules() if isinstance(layer, QuantizedLinear)]
    return list(dict.fromkeys(Shape(layer.out_features, layer.in_features) for layer in layers))


def _model(recipe: Recipe, width: int) -> LanguageModel:
    config = ModelConfig(
        vocab_size=_VOCABULARY,
        d_model=width,
        pattern="M-*-",
        d_ffn=3 * width,
        num_heads=width // 64,
        num_kv_heads=max(1, width // 256),
        head_dim=64,
        mamba_num_heads=width // 32,
        mamba_head_dim=64,
        state_size=64,
        num_groups=1,
    )
    model = LanguageModel(config, seed=0)
    convert(model, recipe)
    return model


def _step(model: LanguageModel, samples: Tensor, keep: bool) -> list[Recorded]:
    """One step, forward and backward; returns the operands of quantized layers, if requested."""
    inputs: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def seen(module: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> None:
            inputs[name] = given[0].detach().flatten(0, -2)
            y.register_hook(lambda dy: gradients.__setitem__(name, dy.flatten(0, -2)))

        return seen

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items() if keep]
    loss, count = model.loss(samples[:, :-1], samples[:, 1:])
    (loss / count).backward()
    for handle in handles:
        handle.remove()
    return [
        Recorded(name, inputs[name], layers[name].weight.detach().clone(), gradients[name]) for name in inputs
    ]


def _samples(tokens: int, steps: int) -> Tensor:
    """Four sequences per step in which most tokens follow from the one before; the others follow Zipf's
    law: int64 [steps, 4, tokens // 4 + 1].
    """
    length = tokens // 4 + 1
    ranks = torch.arange(1, _VOCABULARY + 1, dtype=torch.float32, device="cpu")
    drawn, follows = list[Tensor](), list[Tensor]()
    for step in range(steps):
        generator = torch.Generator("cpu").manual_seed(step)
        drawn.append(torch.multinomial(1 / ranks, 4 * length, replacement=True, generator=generator))
        random = torch.rand(4, length, generator=generator, dtype=torch.float32, device="cpu")
        follows.append(random < _DETERMINED)
    found, determined = torch.stack(drawn).view(steps, 4, length), torch.stack(follows)
    for place in range(1, length):  # of all steps at once: one step has too few tokens for an operator
        after = (found[..., place - 1] * 31 + 7) % _VOCABULARY
        found[..., place] = torch.where(determined[..., place], after, found[..., place])
    return found
