"""OsciReset: weights that only flip between two codes are set to the centre of their bin.

Near the edge between two bins, updates far smaller than a bin move a weight's quantized value back and forth.
Weights are followed after optimizer steps: how far each travelled, and how far its quantized value did.
docs/nvfp4.md, section 23.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fourbits.linear.amax_policy import IN_USE, OPERANDS
from fourbits.linear.conversion import was_converted
from fourbits.linear.layer_state import LayerState
from fourbits.linear.stacked.layer import converted_layers
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantized_and_back
from fourbits.recipe.oscillation import Oscillation
from fourbits.recipe.recipe import table_from_text

_FPROP_WEIGHT = OPERANDS.index("fprop.rhs")


class Travel(NamedTuple):
    """How far each element of a weight, or of a shard of one, has come in a window. fp32, of its shape."""

    #: the weight and its quantized value, after the last step
    weight: Tensor
    value: Tensor
    #: sums of the magnitudes of their changes
    of_weight: Tensor
    of_value: Tensor

    @staticmethod
    def of(weight: Tensor, value: Tensor) -> "Travel":
        """The beginning of a window."""
        zeros = (torch.zeros_like(value, dtype=torch.float32) for _ in range(2))
        return Travel(weight.to(torch.float32, copy=True), value, *zeros)

    def moved(self, weight: Tensor, value: Tensor) -> "Travel":
        """After one more step."""
        of_weight = self.of_weight + (weight.to(torch.float32) - self.weight).abs()
        of_value = self.of_value + (value - self.value).abs()
        return Travel(weight.to(torch.float32, copy=True), value, of_weight, of_value)

    def oscillates(self, ratio: float) -> Tensor:
        """Which elements moved, and whose values moved at least `ratio` times as far. bool."""
        return (self.of_weight > 0) & (self.of_value >= ratio * self.of_weight)


class _Followed(NamedTuple):
    """A quantized layer, and whether its weight is [E, K, N]."""

    state: LayerState
    transposed: bool

    @property
    def spec(self) -> OperandSpec:
        """The spec of W in Fprop, outside of phases of other precision."""
        tracked, base = self.state.recipe_state, self.state.base_table
        if tracked is not None and self.state.phases is None:
            base = table_from_text(tracked.effective[self.state.slot])
        return base.fprop.rhs

    @property
    def quantized_now(self) -> bool:
        """Whether the current phase quantizes it."""
        return table_from_text(self.state.table).fprop.rhs.block_format.quantized

    def value(self, weight: Tensor) -> Tensor:
        """The values that Fprop multiplies by in place of a whole weight, fp32 of its shape."""
        if weight.dim() == 3:
            return torch.stack([self.value(each) for each in weight])
        spec = self.spec
        wide = weight.to(torch.float32)
        source = wide.to(torch.bfloat16) if spec.source == "bf16" else wide
        amax, tracked = None, self.state.recipe_state
        if spec.tensor_scaled and tracked is not None:
            given = tracked.amaxes[self.state.slot, _FPROP_WEIGHT, IN_USE]
            amax = torch.where(given >= 0, given, source.abs().amax().to(torch.float32))
        return quantized_and_back(wide, spec, 0 if self.transposed else 1, amax, None)


class OscillationReset:
    """Follows the weights of a converted model, and resets those that oscillate.

    Call `step` after each step of the optimizer. `fourbits train` does where a recipe has an `oscillation`;
    this is for other loops. Checkpoints need its `state_dict`, since a run may stop within a window.
    """

    def __init__(
        self,
        model: nn.Module,
        oscillation: Oscillation,
        masters: Mapping[str, Tensor] | None = None,
        whole: Callable[[str, Tensor], Tensor] = lambda name, shard: shard,
        own_part: Callable[[str, Tensor], Tensor] = lambda name, whole: whole,
    ) -> None:
        """model: as passed to `convert`; oscillation: with a start in steps.

        masters: the tensors that the optimizer updates, by the names of the model's parameters, if it does
        not update these; whole, own_part: (name, shard) -> the whole master, and the inverse. All ranks call
        them in the same order. Raises ValueError for a model without quantized weights that can be
        followed, and for DTensors without `masters`.
        """
        if not was_converted(model):
            raise ValueError(
                "OscillationReset: model must have been converted, got one that was not. Call "
                "fourbits.convert(model, recipe) first."
            )
        _ = oscillation.first  # raises if it is not in steps
        self.oscillation, self._whole, self._own_part = oscillation, whole, own_part
        self._followed = _followed(model)
        parameters = dict(model.named_parameters())
        self._masters = {name: (masters or parameters)[name] for name in self._followed}
        self._travels: dict[str, Travel] = {}
        if masters is None and (name := _first_dtensor(self._masters)):
            raise ValueError(
                f"OscillationReset: weights must be plain tensors, got a DTensor for {name!r}. Pass masters, "
                "whole and own_part."
            )

    @torch.no_grad()
    def step(self, done: int) -> None:
        """Follow the weights, or reset at the end of a window. done: steps of the run so far, with this one.

        If the first window begins at 0, call it with 0 before the first step. It writes parameters in place,
        so not between a forward pass and its backward pass. Nothing waits for the device.
        """
        age = (done - self.oscillation.first) % self.oscillation.period
        if done < self.oscillation.first:
            return
        if self._travels:
            self._travels = {name: self._moved(name) for name in self._travels}
            if (age or self.oscillation.period) == self.oscillation.window:
                self._reset()
        if age == 0:
            self._travels = {name: Travel.of(w, self._value(name)) for name, w in self._masters.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors that a resumed run needs, as "NAME.FIELD"; empty between windows."""
        return {
            f"{name}.{field}": getattr(travel, field)
            for name, travel in self._travels.items()
            for field in Travel._fields
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`. Raises ValueError for that of another model."""
        expected = {f"{name}.{field}" for name in self._masters for field in Travel._fields}
        if state and set(state) != expected:
            raise ValueError(
                "OscillationReset: the state must be of this model's quantized weights, got other names, "
                f"first {min(expected ^ set(state))!r}. Use the recipe that it was saved under."
            )
        self._travels = {}
        for name, master in self._masters.items() if state else ():  # in the order of all ranks
            fields = (state[f"{name}.{field}"].to(master.device) for field in Travel._fields)
            self._travels[name] = Travel(*fields)

    def empty_state(self, done: int) -> dict[str, Tensor]:
        """Tensors of the names and shapes of `state_dict` after `done` steps, all zeros."""
        if not self.oscillation.follows(done):
            return {}
        return {
            f"{name}.{field}": torch.zeros_like(master, dtype=torch.float32)
            for name, master in self._masters.items()
            for field in Travel._fields
        }

    def _value(self, name: str) -> Tensor:
        """The quantized value of a master, fp32 of the master's shape."""
        whole = self._whole(name, self._masters[name].detach())
        return self._own_part(name, self._followed[name].value(whole)).clone()

    def _moved(self, name: str) -> Travel:
        return self._travels[name].moved(self._masters[name].detach(), self._value(name))

    def _reset(self) -> None:
        """Set the weights that oscillated in the window to their quantized values, and drop the window."""
        for name, travel in self._travels.items():
            if self._followed[name].quantized_now:
                master = self._masters[name].detach()
                reset = travel.oscillates(self.oscillation.ratio)
                master.copy_(torch.where(reset, travel.value.to(master.dtype), master))
        self._travels = {}


def _followed(model: nn.Module) -> dict[str, _Followed]:
    """The layers whose weights can be followed, by the names of the weights."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, _Followed] = {}
    for _, layer in converted_layers(model.named_modules()):
        state, name = layer.quantization, names.get(id(layer.weight))
        spec = state.base_table.fprop.rhs
        if name is not None and spec.block_format.quantized and not spec.rht and not spec.stochastic:
            found[name] = _Followed(state, getattr(layer, "transposed", False))
    if not found:
        raise ValueError(
            "OscillationReset: needs weights that Fprop quantizes to nearest without a transform, and the "
            "model has none. Choose another recipe, or remove its oscillation."
        )
    return found


def _first_dtensor(tensors: Mapping[str, Tensor]) -> str:
    return next((name for name, tensor in tensors.items() if hasattr(tensor, "placements")), "")
