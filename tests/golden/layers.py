"""What converted linears return: outputs and gradients of a small stack, in every recipe and mode."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fourbits as fb
from golden.hashes import described
from golden.inputs import bell

#: parameters' dtype and whether autocast to BF16 is on
_MODES = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "fp32 autocast": (torch.float32, True),
    "bf16 autocast": (torch.bfloat16, True),
}
_TOKENS, _WIDTH, _COUNTS = 51, 50, (17, 0, 29, 5)
#: recipes for modes that need not be seen in all of them
_FEW = ("nvfp4", "nvfp4-46", "quartet2", "mxfp4", "fp8", "mxfp8")
_PACKABLE = ("nvfp4", "mxfp4", "nvfp4-naive", "mxfp8")
_POLICIES: dict[str, dict[str, Any]] = {
    "delayed": {"amax_policy": "delayed"},
    "delayed headroom": {"amax_policy": "delayed", "amax_headroom": 1.25},
    "interval": {"amax_policy": "interval", "amax_interval": 3},
    "history": {"amax_policy": "history", "amax_history": 3},
}
_ADAPTIVE = {"outer": ("outer", "none"), "block": ("none", "block"), "both": ("outer", "block")}

Run = Callable[..., dict[str, str]]


class Group(nn.Module):
    """Four linears whose weights are one parameter, as a mixture of experts has them."""

    groups_linears = True
    casts_weight = True

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = _WIDTH, 33
        self.weight = nn.Parameter(torch.empty(len(_COUNTS), self.out_features, self.in_features))

    def forward(self, input: Tensor, counts: Sequence[int]) -> Tensor:
        """input: the rows of linear 0 first, then those of linear 1 and so on; counts: rows of each."""
        parts = zip(input.split(list(counts)), self.weight.unbind(0), strict=True)
        return torch.cat([part @ weight.to(part.dtype).t() for part, weight in parts])


class Mixture(nn.Module):
    """A linear, a group, and a linear whose number of layer follows the group's."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.experts, self.after = nn.Linear(_WIDTH, _WIDTH), Group(), nn.Linear(33, 17)

    def forward(self, x: Tensor) -> Tensor:
        """x: [M, 50] -> [M, 17]."""
        return self.after(self.experts(self.before(x), _COUNTS))


def stack() -> nn.Module:
    """Odd widths, with and without bias, under names that rules of recipes look for."""
    parts = {
        "q_proj": nn.Linear(_WIDTH, 40),
        "mixer": nn.Sequential(OrderedDict(out_proj=nn.Linear(40, 33, bias=False))),
        "up_proj": nn.Linear(33, 64, bias=False),
        "down_proj": nn.Linear(64, 17),
    }
    return nn.Sequential(OrderedDict(block=nn.Sequential(OrderedDict(parts))))


def blocks() -> nn.Module:
    """Blocks in a ModuleList, of which recipes keep the first and the last in BF16."""
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(_WIDTH, _WIDTH) for _ in range(12)])})
    model.forward = lambda x: nn.Sequential(*model["blocks"])(x)  # pyright: ignore
    return model


def wide() -> nn.Module:
    """A linear from whose size on a CPU compiles."""
    return nn.Linear(272, 264)


def entries(device: str) -> dict[str, str]:
    """Every recipe in every mode, then what only some recipes have."""
    found: dict[str, str] = {}
    for name in fb.list_recipes():
        recipe = everywhere(fb.get_recipe(name))
        for mode in _MODES:
            found |= stepped(f"{name}/{mode}", stack, recipe, device, mode)
            found |= evaluated(f"{name}/{mode} eval", stack, recipe, device, mode)
        found |= stepped(f"{name}/blocks", blocks, fb.get_recipe(name), device)
        if not recipe.fprop.lhs.error_feedback:  # which needs set_step, and weights that are not stacked
            found |= stepped(f"{name}/own clock", stack, recipe, device, clock="own", steps=2)
            found |= stepped(f"{name}/experts", Mixture, recipe, device)
    for name in _FEW:
        recipe = everywhere(fb.get_recipe(name))
        found |= stepped(f"{name}/recomputed", stack, recipe, device, recompute=True)
        found |= stepped(f"{name}/batch of 3 x 17", stack, recipe, device, batch=3)
        found |= evaluated(f"{name}/eval bf16", stack, replace(recipe, quantize_eval=False), device)
    for name in _PACKABLE:
        packed = replace(everywhere(fb.get_recipe(name)), saved_inputs="packed")
        found |= stepped(f"{name}/packed", stack, packed, device)
    found |= stepped("nvfp4/wide", wide, everywhere(fb.get_recipe("nvfp4")), device, tokens=300, width=272)
    return found | with_state(device)


def with_state(device: str) -> dict[str, str]:
    """Recipes whose steps depend on earlier ones: amax policies, adaptive layouts."""
    found: dict[str, str] = {}
    for name in ("nvfp4", "nvfp4-46", "quartet2"):
        for word, policy in _POLICIES.items():
            recipe = changed(everywhere(fb.get_recipe(name)), policy, policy, policy)
            found |= stepped(f"{name}/{word}", stack, recipe, device, steps=4)
            found |= stepped(f"{name}/{word} own clock", stack, recipe, device, clock="own", steps=3)
    for word, (lhs, rhs) in _ADAPTIVE.items():
        weight, often = {"adaptive": rhs, "adaptive_interval": 2}, {"adaptive": lhs, "adaptive_interval": 2}
        nvfp4 = everywhere(fb.get_recipe("nvfp4"))
        fprop = replace(nvfp4.fprop, lhs=replace(nvfp4.fprop.lhs, **often))
        recipe = changed(replace(nvfp4, fprop=fprop), {}, weight, {})
        found |= stepped(f"nvfp4/adaptive {word}", stack, recipe, device, steps=7)
    return found


def everywhere(recipe: fb.Recipe) -> fb.Recipe:
    """The recipe without blocks that stay in BF16."""
    return replace(recipe, keep_bf16=replace(recipe.keep_bf16, first_blocks=0, last_blocks=0))


def changed(recipe: fb.Recipe, inputs: dict[str, Any], weights: dict[str, Any], wgrad: dict[str, Any]) -> Any:
    """The recipe with changes to the inputs of Fprop and Dgrad, both weights and both sides of Wgrad."""
    made: dict[str, Any] = {}
    for gemm, right in (("fprop", weights), ("dgrad", weights), ("wgrad", wgrad)):
        old = getattr(recipe, gemm)
        made[gemm] = replace(
            old,
            lhs=replace(old.lhs, **(wgrad if gemm == "wgrad" else inputs)),
            rhs=replace(old.rhs, **right),
        )
    return replace(recipe, **made)


def converted(make: Callable[[], nn.Module], recipe: fb.Recipe, device: str, dtype: torch.dtype) -> nn.Module:
    """The model with numbers that are the same everywhere."""
    model = make()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(bell(tuple(parameter.shape), f"weight {name}") * 0.25)
            if recipe.fprop.rhs.adaptive == "block" and parameter.dim() == 2:
                parameter[::2] *= 2.0**-8  # so that square blocks are left
    model = model.to(device, dtype)
    fb.convert(model, recipe, seed=5)
    return model


def stepped(
    key: str,
    make: Callable[[], nn.Module],
    recipe: fb.Recipe,
    device: str,
    mode: str = "fp32",
    *,
    clock: str = "set_step",
    steps: int = 1,
    recompute: bool = False,
    batch: int = 0,
    tokens: int = _TOKENS,
    width: int = _WIDTH,
) -> dict[str, str]:
    """Outputs and gradients of two micro-batches a step; one without set_step, where each is a step."""
    dtype, autocast = _MODES[mode]
    model, found = converted(make, recipe, device, dtype), dict[str, str]()
    for step in range(steps):
        model.zero_grad()
        for part in range(2 if clock == "set_step" else 1):
            if clock == "set_step":
                fb.set_step(model, 3 + step, first_token=64 * part)
            x = inputs(f"{step} {part}", tokens, width, step).to(device, dtype)
            x = (x.unflatten(0, (batch, -1)) if batch else x).requires_grad_()
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
            y.backward(bell(tuple(y.shape), f"dy {step} {part}").to(device, y.dtype))
            place = f"layers/{key}/step {step} part {part}"
            found |= {f"{place} y": described(y), f"{place} dx": described(x.grad)}
        found |= {f"layers/{key}/step {step} d {n}": described(p.grad) for n, p in model.named_parameters()}
    return found


def evaluated(
    key: str, make: Callable[[], nn.Module], recipe: fb.Recipe, device: str, mode: str = "fp32"
) -> dict[str, str]:
    """Outputs without gradients, in training and in evaluation."""
    dtype, autocast = _MODES[mode]
    model, found = converted(make, recipe, device, dtype), dict[str, str]()
    fb.set_step(model, 3)
    x = inputs("eval", _TOKENS, _WIDTH, 0).to(device, dtype)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast):
        found[f"layers/{key}/no_grad"] = described(model(x))
        found[f"layers/{key}/eval"] = described(model.eval()(x))
    return found


def inputs(name: str, tokens: int, width: int, step: int) -> Tensor:
    """Rows, every other one so small on some steps that an adaptive layout of X is chosen, and left later."""
    x = bell((tokens, width), f"x {name}") * 2.0 ** (7 * step % 5 - 2)
    if step % 4 >= 2:
        x[::2] *= 2.0**-20
    return x
