"""The road to the published 12B run: stages, each with the gate before the next. See docs/road-to-12b.md."""

from dataclasses import dataclass, field

from fourbits.plan.estimate import Plan, plan_run
from fourbits.plan.gpus import GPUS
from fourbits.train.config import RunConfig, load_config
from fourbits.train.presets import RUN_PRESETS

#: the share of a stage's predicted tokens/s that a run must reach: no prediction was further off
THROUGHPUT = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One run, and what it must show. settings: dotted overrides of the preset; gap: largest loss above BF16
    at equal tokens, as a share, and where that figure comes from.
    """

    preset: str
    gpu: str
    gpus: int
    gap: float
    gap_source: str
    settings: dict[str, object] = field(default_factory=dict)
    #: rules of lint that are right to find something
    findings: tuple[str, ...] = ()

    def config(self) -> RunConfig:
        """The configuration of the run."""
        return load_config(self.preset, RUN_PRESETS, self.settings)

    def plan(self) -> Plan:
        """The plan on its cluster."""
        return plan_run(self.config(), GPUS[self.gpu], self.gpus, claims=False)


ROAD = (
    Stage(
        preset="hybrid-30m",
        gpu="h100",
        gpus=1,
        gap=0.02,
        gap_source="1.6 % for a Llama of 30M at 0.75B tokens, all blocks in NVFP4 (Quartet II's runs)",
    ),
    Stage(
        preset="hybrid-100m",
        gpu="h100",
        gpus=8,
        gap=0.02,
        gap_source="1.9 % for a Llama of 100M at 2.5B tokens, all blocks in NVFP4 (Quartet II's runs)",
    ),
    Stage(
        preset="hybrid-1.2b",
        gpu="h100",
        gpus=64,
        gap=0.015,
        gap_source="1.5 %, as the paper's 8B at 1T tokens",
        settings={"train.gradient_accumulation": 384},
        findings=("batch",),  # presets of its size are for one GPU; the paper's batch has 768 sequences
    ),
    Stage(
        preset="hybrid-8b",
        gpu="gb200",
        gpus=256,
        gap=0.015,
        gap_source="about 1.5 % at 1T tokens (arXiv:2509.25149)",
    ),
    Stage(
        preset="hybrid-12b",
        gpu="gb200",
        gpus=736,
        gap=0.01,
        gap_source="below 1 % until the rate decays, 1.5 % at its end, 0.5 % after a late forward switch "
        "(arXiv:2509.25149)",
    ),
)
