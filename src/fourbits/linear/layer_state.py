"""The state of a converted layer besides nn.Linear's parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fourbits.linear.amax_history import RecipeState
from fourbits.linear.amax_policy import IN_USE, OPERANDS
from fourbits.linear.blend import Blend
from fourbits.linear.layer_phases import LayerPhases
from fourbits.linear.numbering import Numbering
from fourbits.linear.operand_cache import KeptWeight
from fourbits.linear.plan import LinearPlan, PlanKey
from fourbits.linear.sr_counter import SrCounter, after_tokens, new_counter, of_shard
from fourbits.quant.operand import OperandSpec
from fourbits.quant.request import OPERAND_ROLES, draws
from fourbits.quant.tensor import QuantizedTensor
from fourbits.recipe.recipe import GemmTable, table_from_text

#: the layer's weight, or what is left of it -> its quantized operand
WeightSource = Callable[[Tensor], QuantizedTensor]
#: the largest number of calls of a layer in a micro-batch that are distinguished
_MOST_CALLS = 4096


class FeatureShard(NamedTuple):
    """The features of a larger layer at which a layer's weight starts, multiples of 16."""

    first_in: int
    first_out: int


class CallConfig(NamedTuple):
    """The configuration of a call: everything that it depends on besides its tensors."""

    layer: int
    table: str
    #: whether the layer counts its own steps, because set_step was never called
    counts_itself: bool
    #: whether the layer is in training mode; whether it also records amax stats, which requires gradients
    training: bool
    observes: bool
    #: operands whose layout statistics are recorded, as returned by adaptive_layout.measured_at
    measured: str
    slot: int
    #: (first_in, first_out) of a layer that is a shard by features
    shard: FeatureShard | None = None


class FeedbackState:
    """The error feedback of a layer's X in Fprop."""

    __slots__ = ("coefficients", "span", "step")

    def __init__(self, span: int) -> None:
        #: columns that share errors; 0 for none
        self.span = span
        #: int8 [K, span], and the step whose weight they were computed from
        self.coefficients: Tensor | None = None
        self.step = -1


class LazyOffsets:
    """Tokens of each layer of a group before a call: int64 [E], computed when they are needed."""

    __slots__ = ("_before", "_ends", "_value")

    def __init__(self, before: "LazyOffsets | int", ends: Tensor) -> None:
        """before: where the previous call started; ends: [E + 1], where its rows of each layer begin."""
        self._before, self._ends = before, ends
        self._value: Tensor | None = None

    def value(self) -> Tensor:
        """The tokens of all calls before this one, each rounded up to a block."""
        if self._value is None:
            before = self._before if isinstance(self._before, int) else self._before.value()
            self._value, self._before = before + -(-self._ends.diff().long() // 16) * 16, 0
        return self._value


class Calls:
    """The calls of a layer in one micro-batch, in training mode.

    A layer that is called several times, such as on chunks of a sequence, reads different tokens each time,
    so later calls draw bits from where the earlier ones ended. Recomputation repeats the calls in order.
    Calls without gradients are counted separately, for checkpoints whose first forward records none.
    """

    __slots__ = ("_recomputed", "_starts")

    def __init__(self) -> None:
        #: where each call started and the next one will, in tokens: without gradients, and with
        self._starts: tuple[list[Any], list[Any]] = ([0], [0])
        self._recomputed = 0

    def offset(self, tokens: "int | Tensor", records: bool) -> Any:
        """How many tokens of the micro-batch come before a call, a multiple of 16.

        tokens: of the call; for a group of layers, where each layer's rows begin and end; the result is then
        a LazyOffsets or 0.
        """
        recorded = self._starts[1] if len(self._starts[1]) > 1 else self._starts[0]
        if len(recorded) > 1 and torch._C._current_graph_task_id() != -1:  # pyright: ignore  # recomputation
            self._recomputed += 1
            return recorded[(self._recomputed - 1) % (len(recorded) - 1)]
        starts = self._starts[records]
        if len(starts) > _MOST_CALLS:  # an evaluation, or a loop without set_step
            starts[:] = [0]
        last = starts[-1]
        starts.append(last + -(-tokens // 16) * 16 if isinstance(tokens, int) else LazyOffsets(last, tokens))
        return last

    @property
    def tokens(self) -> int:
        """Tokens of the calls with gradients so far, each call rounded up to a multiple of 16."""
        return self._starts[1][-1]


class TappedCall(NamedTuple):
    """Everything that the operands of a call depend on besides its tensors."""

    #: as text
    table: str
    #: int64 [9], of this call
    counter: Tensor
    #: fp32 [6], those of amax policies (negative: the operand's own)
    amax: Tensor | None
    #: number of the layer
    layer: int
    #: of error feedback: int8 [K, span]
    coefficients: Tensor | None = None


class Tap(Protocol):
    """Receives the tensors that eager calls of a layer read; see monitor/layer.py."""

    @property
    def waits(self) -> bool:
        """Whether it has seen no call yet."""
        ...

    def forward(self, x: Tensor, weight: Tensor, call: TappedCall) -> bool:
        """A forward pass; returns whether its backward pass is needed, too."""
        ...

    def backward(self, dy: Tensor) -> None:
        """The backward pass of a call whose forward asked for it."""
        ...


class LayerState:
    """Table, number, random counter and recipe state of one converted layer."""

    #: whether `weight_source` may be called again before the backward pass; the function that returns the
    #: weight's values before quantization, for samples of health
    weight_returns = False
    weight_values: Callable[[Tensor], Tensor] | None = None

    def __init__(
        self,
        original: type[nn.Module],
        table: GemmTable,
        layer: int,
        seed: int,
        quantize_eval: bool,
        numbering: Numbering | None = None,
    ):
        self.original: Any = original
        self.table = table.to_text()
        self.layer = layer
        self.seed = seed
        #: shared by the layers that one call of `convert` numbered
        self.numbering = numbering
        self.quantize_eval = quantize_eval
        #: whether the first backward pass is still to come; what dominant_tokens.py measured in it
        self.awaits_gradient = True
        self.gradient: Tensor | None = None
        self.draws = any(draws(table.operand(role)) for role in OPERAND_ROLES)
        #: the model's counter, once set_step has been called
        self.counter: SrCounter | None = None
        #: until then the layer's own, int64 [9], which every backward pass advances by one step
        self.own_counter = new_counter(seed, 0, 0)
        #: the model's recipe state and this layer's slot in it, where its table depends on past steps
        self.recipe_state: RecipeState | None = None
        self.slot = 0
        self.weight = KeptWeight()
        #: whether experts were called eagerly by grouped kernels, which keep no plans here
        self.called = False
        #: eager plans, and whether a cast precedes them, by `PlanKey`
        self.plans: dict[PlanKey, tuple[LinearPlan, bool]] = {}
        #: the source of a weight that arrives quantized: see weight_source.py
        self.weight_source: WeightSource | None = None
        self.weight_spec: OperandSpec | None = None
        #: the phases of the recipe's schedule that concern this layer; None without any
        self.phases: LayerPhases | None = None
        #: whether the current phase quantizes nothing, so that the original layer runs
        self.plain = False
        #: the precision that a blending phase mixes in
        self.blend: Blend | None = None
        #: receives the tensors of eager calls while a sample of the layer's health is taken
        self.tap: Tap | None = None
        self.shard: FeatureShard | None = None
        self.feedback = FeedbackState(table.fprop.lhs.error_feedback)
        self._generation = -1
        #: by layer number; a group of linear layers has several
        self._calls: dict[int, Calls] = {}

    @property
    def counts_itself(self) -> bool:
        """Whether the layer advances its own counter."""
        return self.counter is None

    def runs_original(self, training: bool) -> bool:
        """Whether a call runs the original layer: in a phase in BF16, or in an unquantized evaluation."""
        return self.plain or not (training or self.quantize_eval)

    @property
    def base_table(self) -> GemmTable:
        """The layer's table outside of all phases."""
        return table_from_text(self.table) if self.phases is None else self.phases.base

    def config(self, training: bool, observes: bool) -> CallConfig:
        """The configuration of a call. Raises ValueError without set_step where a table needs it."""
        if self.feedback.span and self.feedback.coefficients is None:
            raise ValueError(
                "QuantizedLinear: error feedback takes its coefficients from the weight between steps. Call "
                "fourbits.set_step(model, step) before each micro-batch."
            )
        table, measured = self.table, ""
        if (tracked := self.recipe_state) is not None:
            table, measured = tracked.effective[self.slot], tracked.measured[self.slot]
            between_steps = tracked.adapts(self.slot) or tracked.shares(self.slot)
            if observes and self.counts_itself and between_steps:
                raise ValueError(
                    "QuantizedLinear: adaptive layouts and shared amaxes are chosen between optimizer steps, "
                    "so they need set_step. Call fourbits.set_step(model, step) before each micro-batch."
                )
        measured = measured if observes else ""
        return CallConfig(
            self.layer, table, self.counts_itself, training, observes, measured, self.slot, self.shard
        )

    def counter_on(self, device: torch.device) -> Tensor:
        """The counter on the layer's device; it stays there, so a step copies it at most once."""
        if self.counter is not None:
            return self.counter.on(device)
        if device.type == "meta":
            return self.own_counter.to(device)
        if self.own_counter.device != device:
            with torch.inference_mode(False):  # training will advance it
                self.own_counter = self.own_counter.to(device)
        return self.own_counter

    def traced_counter_on(self, device: torch.device) -> Tensor:
        """As `counter_on`, for a graph."""
        return self.counter_on(device) if self.counter is None else self.counter.traced_on(device)

    def tapped(
        self, x: Tensor, weight: Tensor, received: QuantizedTensor | None, call: TappedCall
    ) -> Tap | None:
        """Pass a forward to a tap that waits for one. Returns the tap if it needs the backward pass, too."""
        if self.tap is None or not self.tap.waits:
            return None
        if received is not None:
            weight = received.dequantize() if self.weight_values is None else self.weight_values(weight)
        return self.tap if self.tap.forward(x, weight, call) else None

    def call_counter(self, device: torch.device, config: CallConfig, tokens: int) -> Tensor:
        """The counter of one eager call, which nothing writes later."""
        counter = self.counter_on(device)
        if self.counter is None:
            counter = counter.clone()
        elif self._generation != self.counter.generation:
            self._generation = self.counter.generation
            self.forget_calls()
        if config.shard is not None:
            counter = of_shard(counter, *config.shard)
        if not (config.training and self.draws and tokens):
            return counter
        offset = self._calls.setdefault(config.layer, Calls()).offset(tokens, config.observes)
        return after_tokens(counter, offset) if offset else counter

    def group_counters(self, device: torch.device, config: CallConfig, ends: Tensor) -> Tensor:
        """As `call_counter`, for a call of a group of layers: int64 [E, 9], or [1, 9] where all have the
        same.

        ends: [E + 1], where each layer's rows begin and end.
        """
        counter = self.call_counter(device, config, 0)[None]
        if not (config.training and self.draws):
            return counter
        first = self._calls.setdefault(config.layer, Calls()).offset(ends, config.observes)
        return counter if isinstance(first, int) else after_tokens(counter, first.value())

    def enter(self, table: GemmTable, plain: bool) -> None:
        """Begin a phase with this table; drop what depends on the old one, including tracked amaxes."""
        self.called = self.called or bool(self.plans)
        self.table, self.plain = table.to_text(), plain
        self.draws = any(draws(table.operand(role)) for role in OPERAND_ROLES)
        self.plans.clear()
        self.weight = KeptWeight()
        self.recipe_state, self.slot = None, 0
        self.feedback = FeedbackState(table.fprop.lhs.error_feedback)
        self.forget_calls()

    def shard_as(self, shard: FeatureShard, table: GemmTable) -> None:
        """Make the layer a shard, whose table names the reduction of its amaxes."""
        self.shard, self.table = shard, table.to_text()
        self.plans.clear()
        if self.recipe_state is not None:
            self.recipe_state.replace_table(self.slot, table)

    @property
    def tokens_drawn(self) -> int:
        """Tokens of the last micro-batch that drew random bits in eager calls; in a group, of any layer."""
        return max((calls.tokens for calls in self._calls.values()), default=0)

    def forget_calls(self) -> None:
        """Start a micro-batch: the next call gets its first token."""
        self._calls.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Without plans, calls and tap; copies and saved files of a model create their own."""
        return {**vars(self), "plans": {}, "_calls": {}, "tap": None}

    def recipe_tensors(self, device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The recipe state's amaxes, counters and policy on the layer's device; None without one."""
        if self.recipe_state is None:
            return (None, None, None)
        tracked = self.recipe_state.to(device)
        return (tracked.amaxes, tracked.counters, tracked.policy)


def state_of(layer: nn.Module, caller: str) -> LayerState:
    """The state of a converted layer. Raises ValueError for another module."""
    state = getattr(layer, "quantization", None)
    if not isinstance(state, LayerState):
        raise ValueError(
            f"{caller}: layer must be a converted linear layer, got {type(layer).__name__}. Call "
            "fourbits.convert first, with a recipe that quantizes the layer."
        )
    return state


def converted_state(module: nn.Module) -> LayerState | None:
    """A converted layer's state; None for any other module."""
    state = vars(module).get("quantization")
    return state if isinstance(state, LayerState) else None


def weight_in_use(state: LayerState) -> tuple[str, Tensor | None]:
    """A layer's table as the next step uses it, as text, and the amax of its operand W.

    The amax is an fp32 scalar on the CPU; None: the operand's own.
    """
    tracked = state.recipe_state
    if tracked is None:
        return state.table, None
    amax = tracked.amaxes[state.slot, OPERANDS.index("fprop.rhs"), IN_USE].cpu()
    return tracked.effective[state.slot], None if amax < 0 else amax.clone()
