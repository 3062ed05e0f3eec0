"""Errors of gradients: the whole model's under a recipe, and single layers' dW with and without RHT."""

from dataclasses import replace

import torch
from torch import Tensor

from fourbits.compare.techniques.findings import GradientError, TransformEffect
from fourbits.compare.techniques.operands import key, relative_error
from fourbits.compare.techniques.trained import Gradients, LayerTensors, TrainedModel, without_kept_blocks
from fourbits.gemm.matmul import matmul
from fourbits.quant.quantize import quantize
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import GemmSpec, Recipe

#: draws of a recipe's random bits per batch
GRADIENT_DRAWS = 4
#: draws per layer for dW with and without the transform
TRANSFORM_DRAWS = 4


def gradient_error(
    trained: TrainedModel, batch: int, exact: Gradients, recipe: str | Recipe
) -> GradientError:
    """The model's gradient under a recipe, with every block quantized, compared with BF16's, `exact`."""
    changed = without_kept_blocks(recipe)
    table = changed.table
    specs = [getattr(getattr(table, gemm), side) for gemm in ("dgrad", "wgrad") for side in ("lhs", "rhs")]
    draws = GRADIENT_DRAWS if any(spec.stochastic for spec in specs) else 1
    target = _joined(exact)
    found = torch.stack(
        [_joined(trained.gradients(trained.batches[batch], changed, draw)) for draw in range(draws)]
    )
    norm = target.norm()
    return GradientError(
        recipe=changed.name,
        batch=batch,
        draws=draws,
        error=float(((found - target).norm(dim=1) / norm).square().mean().sqrt()),
        bias=float(bias_norm(found, target) / norm),
        cosine=float((found @ target / (found.norm(dim=1) * norm)).mean()),
        projection=float((found @ target).mean() / norm**2),
    )


def bias_norm(draws: Tensor, target: Tensor) -> Tensor:
    """Norm of the expected draw minus `target`. draws: [n, elements].

    The squared distance of the mean of n draws is the squared bias plus 1 / n of their variance, which is
    subtracted; the rest may be below zero by chance and then counts as zero. A single draw counts as
    deterministic.
    """
    n, mean = len(draws), draws.mean(0)
    distance = (mean - target).square().sum()
    if n == 1:
        return distance.sqrt()
    variance = (draws - mean).square().sum() / (n - 1)
    return (distance - variance / n).clamp_min(0).sqrt()


def transform_effect(recipe: str, number: int, layer: LayerTensors) -> TransformEffect:
    """Error of a layer's dW = dY^T X with a recipe's Wgrad, with and without its transform."""
    with_transform = get_recipe(recipe).wgrad
    without = GemmSpec(lhs=replace(with_transform.lhs, rht=0), rhs=replace(with_transform.rhs, rht=0))
    return TransformEffect(
        layer=layer.name,
        recipe=recipe,
        size=with_transform.lhs.rht,
        without=_wgrad_error(without, number, layer),
        with_transform=_wgrad_error(with_transform, number, layer),
    )


def _wgrad_error(spec: GemmSpec, number: int, layer: LayerTensors) -> float:
    """Root mean square over draws of the relative error of dW."""
    exact = layer.dy.float().t() @ layer.x.float()
    x = quantize(layer.x, spec.rhs, 0)
    errors = [
        relative_error(
            matmul(quantize(layer.dy, spec.lhs, 0, sr_key=key(number, draw)), x, torch.float32), exact
        )
        for draw in range(TRANSFORM_DRAWS)
    ]
    return (sum(error**2 for error in errors) / len(errors)) ** 0.5


def _joined(gradients: Gradients) -> Tensor:
    """All gradients as one vector, fp64, because large sums are subtracted."""
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)]).double()
