"""The plan of a run: counts, layout, memory, time, energy, cost, checkpoints, and several precisions."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fourbits.model.counts import count_parameters, linear_flops, training_flops
from fourbits.plan.claims import ClaimInStep, claims_in_step
from fourbits.plan.failures import Failures, failures_of
from fourbits.plan.gpus import GPUS, Gpu, require_count
from fourbits.plan.layouts import RECOMPUTED, ParallelLayout, unsupported
from fourbits.plan.linears import BF16_TABLE, linear_groups
from fourbits.plan.machine import Machine
from fourbits.plan.rates import DECLARED, Rates
from fourbits.plan.search import Choice, DoesNotFitError, SearchProblem, best_layout, fewest_gpus
from fourbits.plan.software import FOURBITS, Software
from fourbits.plan.step import linear_seconds, step_of
from fourbits.recipe.presets import get_recipe
from fourbits.train.config import RunConfig
from fourbits.train.preset_figures import with_expected_vocabulary

#: the precisions that every plan compares
COMPARED = ("bf16", "fp8", "mxfp4", "nvfp4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices per GPU-hour and per kWh; None where not given."""

    gpu_hour: float | None = None
    kwh: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One recipe on the cluster. native: whether its GEMMs run on FP4 or FP8 tensor cores."""

    recipe: str
    choice: Choice
    native: bool
    gpus: int
    tokens: int
    tokens_per_step: int
    parameters: int
    bf16_flops: float
    gpu: Gpu

    @property
    def step_seconds(self) -> float:
        """Seconds of an optimizer step."""
        return self.choice.step.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs."""
        return self.tokens_per_step / self.step_seconds

    @property
    def per_gpu(self) -> float:
        """Tokens/s of one of the GPUs that the layout uses."""
        return self.tokens_per_second / self.choice.layout.gpus

    @property
    def mfu(self) -> float:
        """The model's FLOPs as a share of the BF16 peak, whatever the recipe."""
        return self.per_gpu * self.bf16_flops / self.gpu.bf16_peak

    @property
    def seconds(self) -> float:
        """Seconds of the run without failures."""
        return self.tokens / self.tokens_per_second

    @property
    def gpu_hours(self) -> float:
        """Hours of all GPUs that are paid for, used or not."""
        return self.seconds / 3600 * self.gpus

    @property
    def megawatt_hours(self) -> float:
        """Energy with systems at their maximum power: an upper bound, without cooling of the room."""
        return self.gpu_hours * self.gpu.system_watts * 1e-6

    @property
    def units(self) -> str:
        """The units that the quantized GEMMs run on, and whether fourbits has used them; empty for bf16."""
        if self.recipe == "bf16":
            return ""
        if not self.native:
            return "emulated in BF16"
        if self.recipe.startswith("fp8"):
            return "FP8 tensor cores"
        if self.recipe.startswith("mx"):
            return "tensor cores, which fourbits does not use"
        return "FP4 tensor cores, not yet run by fourbits"

    @property
    def cannot_run(self) -> str | None:
        """Why the trainer refuses this layout, or None."""
        return unsupported(self.choice.layout)

    def cost(self, prices: Prices) -> float | None:
        """GPU hours and energy, as far as prices are given; None without any."""
        if prices.gpu_hour is None and prices.kwh is None:
            return None
        return self.gpu_hours * (prices.gpu_hour or 0.0) + self.megawatt_hours * 1e3 * (prices.kwh or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amdahl:
    """How much of a BF16 step the recipe could speed up: the share of GEMMs that it quantizes, and bounds."""

    share: float
    at_peak_ratio: float
    at_infinity: float
    predicted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Peak bytes of a layout with another setting. packed: None for a recipe without quantized layers."""

    recompute: str
    packed: bool | None
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything about a run on a cluster."""

    config: RunConfig
    gpu: Gpu
    gpus: int
    rates: Rates
    parameters: dict[str, int]
    flops: dict[str, float]
    estimate: Estimate
    #: by recipe, the run's own last if no other has its name; None where nothing fits
    compared: dict[str, Estimate | None]
    amdahl: Amdahl
    claims: tuple[ClaimInStep, ...]
    failures: Failures
    alternatives: tuple[Alternative, ...]
    #: where only tensor parallelism fits that the trainer refuses: the fewest GPUs that fit without it
    gpus_without_tensor: int | None = None

    @property
    def cannot_run(self) -> str | None:
        """Why the trainer refuses the layout, or None."""
        return self.estimate.cannot_run

    @property
    def tokens(self) -> int:
        """Tokens of the run, in whole steps."""
        return self.config.train.num_steps * self.config.train.tokens_per_step


def plan_run(
    config: RunConfig,
    gpu: Gpu,
    gpus: int,
    rates: Rates = DECLARED,
    software: Software = FOURBITS,
    claims: bool = True,
) -> Plan:
    """Plan a run on this many GPUs. Raises ValueError for too many or too few, and if nothing fits."""
    require_count("plan: gpus", gpus)
    config = with_expected_vocabulary(config)
    machine = Machine(gpu, rates, software)
    own = estimate(config, machine, gpus)
    compared = {
        name: own if name == own.recipe else _fitting(config, name, machine, gpus) for name in COMPARED
    }
    found = claims_in_step(_per_gpu(config, software, gpus)) if claims else []
    parameters = count_parameters(config.model)
    return Plan(
        config=config,
        gpu=gpu,
        gpus=gpus,
        rates=rates,
        parameters=parameters,
        flops=flops_by_type(config),
        estimate=own,
        compared=compared | {own.recipe: own},
        amdahl=amdahl_of(config, machine, own),
        claims=tuple(found),
        failures=failures_for(config, own),
        alternatives=alternatives_of(config, machine, own.choice.layout),
        gpus_without_tensor=None if own.cannot_run is None else fewest_gpus(_problem(config, machine), gpus),
    )


def estimate(config: RunConfig, machine: Machine, gpus: int) -> Estimate:
    """The fastest layout of one recipe. Raises DoesNotFitError."""
    choice = best_layout(_problem(config, machine), gpus)
    train = config.train
    return Estimate(
        recipe=config.recipe.name,
        choice=choice,
        native=choice.step.low_precision > 0,
        gpus=gpus,
        tokens=train.num_steps * train.tokens_per_step,
        tokens_per_step=train.tokens_per_step,
        parameters=sum(count_parameters(config.model).values()),
        bf16_flops=sum(training_flops(config.model, train.seq_len).values()),
        gpu=machine.gpu,
    )


def failures_for(config: RunConfig, found: Estimate) -> Failures:
    """Failures and checkpoints of a run in a layout."""
    background = config.train.background_saves
    return failures_of(found.choice.layout.gpus, found.parameters, background=background)


def alternatives_of(config: RunConfig, machine: Machine, layout: ParallelLayout) -> tuple[Alternative, ...]:
    """The memory of a layout with each kind of recomputation, with saved inputs packed and not."""
    problem = _problem(config, machine)
    packings = (None,) if problem.packed is None else (False, True)
    return tuple(
        Alternative(
            recompute=name,
            packed=packed,
            bytes=problem.memory(replace(layout, recomputed=share), bool(packed)).total,
        )
        for name, share in RECOMPUTED.items()
        for packed in packings
    )


def _problem(config: RunConfig, machine: Machine) -> SearchProblem:
    return SearchProblem(config, linear_groups(config.model, config.recipe), machine)


def _fitting(config: RunConfig, recipe: str, machine: Machine, gpus: int) -> Estimate | None:
    """The estimate of the run in a shipped recipe; None where nothing fits."""
    try:
        return estimate(_with(config, recipe), machine, gpus)
    except DoesNotFitError:
        return None


def flops_by_type(config: RunConfig) -> dict[str, float]:
    """FLOPs per token by type of layer: the "linear" part of training_flops by mixer, then the rest."""
    rest = training_flops(config.model, config.train.seq_len)
    rest.pop("linear")
    return {k: v for k, v in (linear_flops(config.model) | rest).items() if v}


def _with(config: RunConfig, recipe: str) -> RunConfig:
    return replace(config, recipe=get_recipe(recipe))


def _per_gpu(config: RunConfig, software: Software, gpus: int) -> Callable[[str, str], float | None]:
    """A function (GPU, recipe) -> predicted tokens/s per GPU at declared rates; None if nothing fits."""
    known: dict[tuple[str, str], float | None] = {}

    def find(gpu: str, recipe: str) -> float | None:
        if (gpu, recipe) not in known:
            found = _fitting(config, recipe, Machine(GPUS[gpu], DECLARED, software), gpus)
            known[gpu, recipe] = None if found is None else found.per_gpu
        return known[gpu, recipe]

    return find


def amdahl_of(config: RunConfig, machine: Machine, own: Estimate) -> Amdahl:
    """The bounds for the plan's layout; those of nvfp4 if the run's recipe quantizes no layer."""
    groups = linear_groups(config.model, config.recipe)
    if not any(group.quantized for group in groups):
        groups = linear_groups(config.model, get_recipe("nvfp4"))
    layout, length = own.choice.layout, config.train.seq_len
    plain = [replace(group, table=BF16_TABLE) for group in groups]
    fast = [replace(group, table=BF16_TABLE) for group in groups if group.quantized]
    whole = step_of(config.model, plain, length, layout, machine).seconds
    share = linear_seconds(config.model, fast, length, layout, machine) / whole
    peak = machine.gpu.peak("nvfp4")
    ratio = 1.0 if peak is None else peak / machine.gpu.bf16_peak
    return Amdahl(
        share=share,
        at_peak_ratio=1 / (1 - share + share / ratio),
        at_infinity=1 / (1 - share),
        predicted=whole / step_of(config.model, groups, length, layout, machine).seconds,
    )
