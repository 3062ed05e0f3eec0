"""convert: apply a recipe to the linear layers of any PyTorch model, in place, and report the conversion.

A layer keeps its identity: parameters, hooks, name, state_dict and references do not change; only its class
does. The same holds for groups of linear layers in one parameter, such as experts.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import nn

from fourbits.device import Device, probe, unsupported_fp4
from fourbits.gemm.native.self_check import unsupported_arithmetic
from fourbits.linear import flops as flops  # registers the operators' FLOP formulas
from fourbits.linear.adopt import adopt, adopt_stacked, restore
from fourbits.linear.arguments import (
    model_parts,
    patterns_of,
    require_choice,
    require_eager,
    with_kept_blocks,
)
from fourbits.linear.audit import watch
from fourbits.linear.checkpoint_state import new_recipe_states
from fourbits.linear.conversion import mark_converted
from fourbits.linear.error_feedback import unsupported_feedback
from fourbits.linear.fast_path import settle_fast_paths
from fourbits.linear.findings import (
    notes_of,
    quantizes,
    require_dtypes,
    require_recipe_matches,
    require_stacks,
    warn_of_gaps,
)
from fourbits.linear.layer_phases import LayerPhases, phase_notes, phases_of, require_phases_act
from fourbits.linear.layer_state import LayerState
from fourbits.linear.native_gemms import emulated_gemms, with_native_gemms
from fourbits.linear.numbering import Numbering
from fourbits.linear.placement import Decider
from fourbits.linear.precision import enter_stage
from fourbits.linear.selection import Filter, Selection, covers, require_matches
from fourbits.linear.stacked.fused import unsupported_fused
from fourbits.linear.stacked.layer import converted_layers
from fourbits.linear.stacks import Stack, find_stacks, named_stacks
from fourbits.linear.summary import ConversionSummary, LinearReport, OtherParameter, StackReport, precision_of
from fourbits.linear.weights import Weight, multiplied_weights, named_modules, other_parameters
from fourbits.linear.without_kernels import notes_without_kernels, runs_on_gpu
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.provenance import forget
from fourbits.recipe.recipe import GemmTable, Recipe
from fourbits.recipe.schedule import check_steps

Backend = Literal["emulated", "native"]
Patterns = str | Iterable[str]


def convert(
    model: nn.Module | Sequence[nn.Module],
    recipe: str | Recipe = "nvfp4",
    *,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    filter_fn: Filter | None = None,
    stacks: Patterns | None = None,
    min_size: int | None = None,
    keep_first: int | str | None = None,
    keep_last: int | str | None = None,
    seed: int = 0,
    backend: Backend = "emulated",
) -> ConversionSummary:
    """Convert the model's linear layers to a recipe, in place; "bf16" restores the original layers.

    model: any module tree, on any device, meta included, or a list of the parts of one, whose layers are
    numbered and whose stacks are counted together. recipe: a shipped name, a YAML file or a Recipe.

    include, exclude: shell-style patterns of the names of layers or of modules around them; a layer that
    include names exactly is quantized even if it is a head or in a block that stays in BF16. filter_fn:
    (module, name) -> whether it may be quantized. min_size: fewest weights of a quantized layer. stacks:
    names of the containers of blocks, in place of those found. keep_first, keep_last: how many blocks of each
    stack stay in BF16, or their share such as "8/62", in place of the recipe's. A recipe with a schedule in
    shares or learning-rate phases needs `recipe.for_run(steps, ...)`; set_step then moves through the phases.

    seed: the seed of all random bits, in [0, 2**32). backend: the GEMM backend; "native" uses Blackwell FP4
    tensor cores for the GEMMs they support, after a self-check. Returns the precision of each layer, with the
    reason; warns if no layer is quantized. Raises ValueError for an unknown recipe, for a pattern that
    matches nothing, for linear layers none of which is in FP32, BF16 or FP16, and for native on a GPU without
    FP4 tensor cores or one that fails the self-check.
    """
    parts = model_parts(model)
    require_eager(named_modules(parts))
    require_choice(seed, backend, min_size, filter_fn)
    chosen = get_recipe(recipe)
    given = {"include": include, "exclude": exclude, "stacks": stacks}
    patterns = {option: patterns_of(option, value) for option, value in given.items()}
    selection = Selection(
        **patterns,  # pyright: ignore[reportArgumentType]
        filter_fn=filter_fn,
        min_size=min_size,
        keep_first=keep_first,
        keep_last=keep_last,
    )
    if quantizes(chosen):
        _require(selection, named_modules(parts))
    return converted(parts, chosen, selection, seed, backend)


def _require(selection: Selection, modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Raises ValueError for a pattern that matches nothing, and for layers of which none can be quantized."""
    weights = multiplied_weights(modules)
    layers = [weight for weight in weights if weight.kind != "other"]
    require_dtypes(layers)
    names = [layer.name for layer in layers]
    others = {weight.name: weight.why for weight in weights if weight.kind == "other"}
    others |= {name: what for name, _, what in other_parameters(modules, weights)}
    containers = [name for name, module in modules if any(True for _ in module.children())]
    layer = "the name of a linear layer or of a module around one"
    require_matches("include", selection.include or (), names, layer, others)
    excluded = [each for each in selection.exclude or () if not any(covers(each, name) for name in others)]
    require_matches("exclude", excluded, names, layer)
    require_matches("stacks", selection.stacks or (), containers, "the name of a container of blocks")


def converted(
    parts: Sequence[nn.Module],
    recipe: Recipe,
    selection: Selection,
    seed: int,
    backend: Backend,
    step: int = 0,
) -> ConversionSummary:
    """Convert the parts of a model by a caller's choice; like `convert`, without checking the arguments.

    step: the step whose phase of the recipe's schedule the layers begin in.
    """
    chosen = with_kept_blocks(recipe, selection.keep_first, selection.keep_last)
    if backend == "native":
        require_native()
    modules = named_modules(parts)
    weights = multiplied_weights(modules)
    others = other_parameters(modules, weights)
    layers = [weight for weight in weights if weight.kind != "other"]
    names = [layer.name for layer in layers]
    require_recipe_matches(chosen, names)
    check_steps(chosen.schedule)
    found = find_stacks(parts) if selection.stacks is None else named_stacks(modules, selection.stacks)
    if quantizes(chosen):
        require_stacks(selection, found)
    selection = selection.without_function(layers)  # may raise, so it runs before any change
    for layer in layers:
        restore(layer.name, layer.module)
    decider = Decider(modules, found, chosen, selection)
    decisions = _decided(weights, decider, backend)
    rows = _rows(decisions, decider, seed)
    settle_fast_paths(modules)
    if chosen.schedule:
        enter_stage(list(converted_layers(modules)), step)
    for part in parts:
        new_recipe_states(part)
        mark_converted(part)
        forget(getattr(part, "config", None))  # a saved model may record another conversion
    parameters = {id(p): p.numel() for _, module in modules for p in module.parameters(recurse=False)}
    summary = ConversionSummary(
        chosen.name,
        chosen.digest,
        tuple(rows),
        sum(parameters.values()),
        tuple(_report_of(stack, chosen) for stack in found),
        (*notes_of(chosen, names, found), *_notes_of_layers(chosen, decisions)),
        tuple(OtherParameter(name, tuple(parameter.shape), what) for name, parameter, what in others),
    )
    warn_of_gaps(summary, chosen, modules, found, selection.include)
    watch(modules, others)
    return summary


def _notes_of_layers(recipe: Recipe, decisions: Sequence["_Decision"]) -> list[str]:
    """Lines of the summary about phases, and about operands that are slow on a GPU."""
    notes = phase_notes(recipe, [each.phases for each in decisions])
    if runs_on_gpu(each.weight.weight for each in decisions if each.table is not None):
        notes += notes_without_kernels([each.table for each in decisions if each.table is not None])
    return notes


def require_native(device: Device | None = None) -> None:
    """Raises ValueError unless the device has FP4 tensor cores that passed the self-check."""
    device = device or probe()
    reason = unsupported_fp4(device)
    if reason is None and (wrong := unsupported_arithmetic(torch.device(device.torch_device))):
        reason = f"the self-check failed on {device.name}: {wrong}"
    if reason is not None:
        raise ValueError(f"backend native: {reason}. Use emulated, which quantizes to the same bits.")


class _Decision(NamedTuple):
    """The decision about a weight of the model. table: None to leave it unchanged."""

    weight: Weight
    table: GemmTable | None
    reason: str
    phases: LayerPhases | None


def _decided(weights: Sequence[Weight], decider: Decider, backend: Backend) -> list[_Decision]:
    """A decision for each weight. Raises ValueError for a schedule that does not fit the layers."""
    recipe, decisions = decider.recipe, list[_Decision]()
    for weight in weights:
        table, reason = (None, weight.why) if weight.kind == "other" else decider.decide(weight)
        phases = None
        if table is not None:
            if backend == "native":
                table, reason = _on_tensor_cores(table, reason)
            if why := unsupported_feedback(table, weight.holds_several):
                raise ValueError(
                    f"convert: {weight.name}: {why}. Keep them in BF16 (keep_bf16.names), or give them a "
                    "table without it (layers)."
                )
            if weight.holds_several and (why := unsupported_fused(table.to_text(), weight.weight)):
                reason = f"{reason}; loop of {weight.layers} linear layers, because {why}"
            reason = f"{reason}; {weight.why}" if weight.why else reason
            phases = phases_of(recipe, weight.name, table, backend == "native", weight.holds_several)
        decisions.append(_Decision(weight, table, reason, phases))
    quantized = {each.weight.name: each.phases for each in decisions if each.table is not None}
    require_phases_act(recipe, quantized)
    return decisions


def _rows(decisions: Sequence[_Decision], decider: Decider, seed: int) -> list[LinearReport]:
    """Give every layer its table or leave it unchanged; returns a row for each weight."""
    rows: list[LinearReport] = []
    weights = [each.weight for each in decisions]
    read = sum(weight.shape[0] * weight.shape[1] for weight in weights)
    layers = sum(weight.layers for weight in weights)
    numbering = Numbering(seed, layers, read, decider.recipe, decider.selection)
    number = 0
    for weight, table, reason, phases in decisions:
        if table is not None:
            quantize_eval, original = decider.recipe.quantize_eval, type(weight.module)
            state = LayerState(original, table, number, seed, quantize_eval, numbering)
            state.phases = phases
            if weight.kind == "stacked":
                adopt_stacked(weight.module, weight.parameter, weight.transposed, state)
            else:
                adopt(weight.module, weight.kind, state)
        precision = "bf16" if table is None else precision_of(table)
        rows.append(LinearReport(weight.name, weight.shape, precision, reason, weight.layers))
        number += weight.layers
    return rows


def _on_tensor_cores(table: GemmTable, reason: str) -> tuple[GemmTable, str]:
    table = with_native_gemms(table)
    others = emulated_gemms(table)
    return table, f"{reason}; emulated: {others}" if others else reason


def _report_of(stack: Stack, recipe: Recipe) -> StackReport:
    blocks, keep = len(stack.blocks), recipe.keep_bf16
    return StackReport(stack.name, blocks, keep.count_first(blocks), keep.count_last(blocks))
