"""Measures one linear layer at a time: only its forward pass, or only one of its gradients, in 4 bits."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fourbits.compare.proxies.findings import GradientQuality, LayerSensitivity
from fourbits.compare.proxies.forward import forward_cost
from fourbits.compare.proxies.measure import Checkpoint
from fourbits.compare.techniques.gradients import bias_norm
from fourbits.compare.techniques.trained import LayerTensors
from fourbits.linear.convert import convert
from fourbits.linear.monitor.layer_health import snr_db
from fourbits.linear.selection import matches
from fourbits.linear.step import set_step
from fourbits.model.layers import Linear
from fourbits.recipe.recipe import GemmSpec, GemmTable, Recipe
from fourbits.recipe.schedule import GEMMS, Gemm

#: draws of the random bits per layer and GEMM
DRAWS = 4


def layer_sensitivities(found: Checkpoint, recipe: Recipe) -> list[LayerSensitivity]:
    """Every layer that the recipe quantizes, sorted by the divergence that its forward pass causes."""
    recorded = found.trained.tensors(found.trained.batches[0])
    recorded = [layer for layer in recorded if not table_of(recipe, layer.name).high_precision]
    shares = flops_shares(found)
    forward = only(recipe, "fprop")
    squares = [float((layer.dy.float().t() @ layer.x.float()).square().sum()) for layer in recorded]
    rows: list[LayerSensitivity] = []
    for layer, square in zip(recorded, squares, strict=True):
        rows.append(
            LayerSensitivity(
                layer=layer.name,
                share_of_flops=shares[layer.name],
                fprop=forward_cost(found.trained, found.exact, forward, include=[layer.name]),
                dgrad=gradient_quality(layer, recipe, "dgrad"),
                wgrad=gradient_quality(layer, recipe, "wgrad"),
                gradient_share=square / (sum(squares) or 1.0),
            )
        )
    return sorted(rows, key=lambda row: -row.fprop.divergence)


def flops_shares(found: Checkpoint) -> dict[str, float]:
    """The share of each linear layer in the FLOPs of all that a recipe may quantize, without the head."""
    sizes = {name: layer.weight.numel() for name, layer in found.trained.layers.items()}
    return {name: size / sum(sizes.values()) for name, size in sizes.items()}


def only(recipe: Recipe, gemm: Gemm) -> Recipe:
    """The recipe with only one GEMM of its layers quantized, the others in BF16."""
    rules = [
        replace(rule, table=replace(rule.table, saved_inputs="exact", **_others(gemm)))
        for rule in recipe.layers
    ]
    return replace(recipe, saved_inputs="exact", schedule=(), layers=tuple(rules), **_others(gemm))


def gradient_quality(layer: LayerTensors, recipe: Recipe, gemm: Gemm) -> GradientQuality:
    """dX (dgrad) or dW (wgrad) of a layer with only that GEMM quantized, on the layer's own tensors."""
    table = table_of(only(recipe, gemm), layer.name)
    dy = layer.dy.float()
    exact = dy @ layer.weight.float() if gemm == "dgrad" else dy.t() @ layer.x.float()
    single = _single(layer, table)
    specs = [getattr(table, gemm).lhs, getattr(table, gemm).rhs]
    draws = DRAWS if any(spec.stochastic or spec.signs == "per-call" for spec in specs) else 1
    drawn = torch.stack([_gradient(single, layer, gemm, draw) for draw in range(draws)])
    target = exact.flatten().double()
    norm = target.norm()
    if not norm:
        return GradientQuality(snr_db=snr_db(1.0, float(drawn.abs().max()) ** 2), bias=0.0, cosine=1.0)
    noise = ((drawn - target).norm(dim=1) / norm).square().mean()
    return GradientQuality(
        snr_db=snr_db(1.0, float(noise)),
        bias=float(bias_norm(drawn, target) / norm),
        cosine=float((drawn @ target / (drawn.norm(dim=1).clamp_min(1e-300) * norm)).mean()),
    )


def table_of(recipe: Recipe, name: str) -> GemmTable:
    """The table of a layer: from the first rule that names it, else the recipe's."""
    for rule in recipe.layers:
        if matches(name, rule.names):
            return rule.table
    return recipe.table


def _others(gemm: Gemm) -> dict[str, GemmSpec]:
    return {name: GemmSpec() for name in GEMMS if name != gemm}


def _single(layer: LayerTensors, table: GemmTable) -> nn.Module:
    """A model that consists of this layer, converted to a table."""
    rows, columns = layer.weight.shape
    linear = Linear(columns, rows).to(layer.weight.device)
    with torch.no_grad():
        linear.weight.copy_(layer.weight)
    model = nn.Sequential(linear)
    fields = {
        name: getattr(table, name) for name in (*GEMMS, "gradient_rows", "hot_channels", "sums", "epilogue")
    }
    if table.high_precision:
        convert(model, "bf16")
    else:
        convert(model, Recipe(name="one-layer", **fields), include=["0"])
    return model


def _gradient(single: nn.Module, layer: LayerTensors, gemm: Gemm, draw: int) -> Tensor:
    """The gradient of one draw, fp64, flattened."""
    set_step(single, draw)
    single.zero_grad(set_to_none=True)
    x = layer.x.detach().clone().requires_grad_(gemm == "dgrad")
    with torch.autocast(x.device.type, enabled=False):
        y = single(x)
    y.backward(layer.dy.to(y.dtype))
    found: Sequence[Tensor | None] = [x.grad if gemm == "dgrad" else next(single.parameters()).grad]
    (grad,) = found
    assert grad is not None, "the layer has a gradient"
    return grad.flatten().double()
