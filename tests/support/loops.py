"""What the tests of other libraries' loops train: a small Llama, and rows of tokens."""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fourbits.integrations import micro_batches
from fourbits.linear.convert import convert
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe
from fourbits.settings import override

LENGTH = 32
#: nvfp4, stochastic and with an amax that depends on past steps
HISTORY = override(get_recipe("nvfp4"), {"dgrad.lhs.amax_policy": "history", "dgrad.lhs.amax_history": 3})


def llama(recipe: str | Recipe = "nvfp4", **choice: Any) -> LlamaForCausalLM:
    """A converted Llama of one block, quantized, with the same weights at every call."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    model = LlamaForCausalLM(
        LlamaConfig(
            **sizes,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )
    convert(model, recipe, keep_last=0, **choice)
    return model


def rows(count: int = 16) -> list[dict[str, torch.Tensor]]:
    """Samples for a collator of transformers."""
    texts = [(torch.arange(LENGTH) * 5 + start) % 64 for start in range(count)]
    return [{"input_ids": text, "labels": text} for text in texts]


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_parameters(actual: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    differing = [n for n, p in parameters(actual).items() if not torch.equal(p, expected[n])]
    assert differing == []


def noted_positions(monkeypatch: Any) -> list[tuple[int, int]]:
    """(step, first_token) of every call of set_step that an integration makes from now on."""
    calls: list[tuple[int, int]] = []
    real = micro_batches.set_step

    def noted(model: nn.Module, step: int, first_token: int = 0, **options: Any) -> None:
        calls.append((step, first_token))
        real(model, step, first_token, **options)

    monkeypatch.setattr(micro_batches, "set_step", noted)
    return calls
