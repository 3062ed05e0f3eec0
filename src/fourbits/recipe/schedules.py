"""Shipped schedules by name, and the table of a phase. `nvfp4+late-forward` is a recipe with a schedule."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from fourbits.recipe.recipe import GemmTable
from fourbits.recipe.schedule import PrecisionPhase
from fourbits.settings import nearest


def _late(
    name: str, gemms: Literal["both", "forward", "backward"], precision: str
) -> tuple[PrecisionPhase, ...]:
    return (PrecisionPhase(name=name, start="decay-start", gemms=gemms, precision=precision),)


#: arXiv:2509.25149, section 5 and appendix D: a switch to BF16 before the learning rate decays closes most of
#: the gap, and switching the forward pass alone nearly as much (12B: 1.5 % became 0.5 %); the backward pass
#: alone gains nothing. MXFP8 is the cheaper target that the paper names. gradual-start is a practice of
#: NVIDIA's article on NVFP4 pretraining, without published numbers.
SCHEDULES = MappingProxyType(
    {
        "late-forward": _late("late-forward", "forward", "bf16"),
        "late-backward": _late("late-backward", "backward", "bf16"),
        "late-both": _late("late-both", "both", "bf16"),
        "late-forward-mxfp8": _late("late-forward-mxfp8", "forward", "mxfp8"),
        "late-backward-mxfp8": _late("late-backward-mxfp8", "backward", "mxfp8"),
        "late-both-mxfp8": _late("late-both-mxfp8", "both", "mxfp8"),
        "gradual-start": (PrecisionPhase(name="gradual-start", end="warmup-end"),),
    }
)


def get_schedule(name: str) -> tuple[PrecisionPhase, ...]:
    """A shipped schedule. Raises ValueError for an unknown name, suggesting the nearest."""
    if name not in SCHEDULES:
        raise ValueError(
            f"schedule: no schedule is called {name!r}.{nearest(name, list(SCHEDULES))} "
            f"Shipped: {', '.join(SCHEDULES)}. Or give a list of phases."
        )
    return SCHEDULES[name]


def with_phases(table: GemmTable, phases: Sequence[tuple[PrecisionPhase, GemmTable]]) -> GemmTable:
    """A layer's table under the active phases, each with the table whose GEMMs it takes.

    Options of the table that concern operands which are no longer quantized fall back to their defaults.
    """
    for phase, other in phases:
        table = replace(
            table,
            **{name: getattr(other, name) for name in phase.affected},
            hot_channels=0.0 if "fprop" in phase.affected else table.hot_channels,
            saved_inputs="exact" if {"fprop", "wgrad"} & set(phase.affected) else table.saved_inputs,
        )
    if table.dgrad.high_precision and table.wgrad.high_precision:
        table = replace(table, gradient_rows="any")
    return table


def is_plain(table: GemmTable) -> bool:
    """Whether no GEMM of a table is quantized."""
    return table.fprop.high_precision and table.dgrad.high_precision and table.wgrad.high_precision
