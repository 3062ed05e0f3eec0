"""The report of an audit: what a conversion claimed, what ran, and why the two differ."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The layers that were claimed and those that ran, and their shares of all weights that GEMMs read."""

    called: tuple[str, ...]
    #: not called, although a gradient reached the weight: other code multiplies by it, in high precision
    bypassed: tuple[str, ...]
    #: not called, without a gradient: not needed so far, or frozen and perhaps bypassed
    unused: tuple[str, ...]
    #: quantized share of the weights that GEMMs read, as the summary has it, and as it ran
    claimed_share: float
    called_share: float
    #: findings about gradients, each with its remedy
    gradients: tuple[str, ...] = ()
    #: parameters that the summary does not count and that products multiplied by, in high precision;
    #: called_share counts them
    multiplied: tuple[str, ...] = ()
    #: layers that the current phase of the recipe's schedule has in BF16
    in_bf16: tuple[str, ...] = ()
    #: the active phases, with the number of layers that each concerns
    phases: tuple[str, ...] = ()

    def __str__(self) -> str:
        by_phase = f", in BF16 by a phase {len(self.in_bf16)}" if self.in_bf16 else ""
        lines = [
            f"called {len(self.called)}, bypassed {len(self.bypassed)}, unused {len(self.unused)}{by_phase} "
            f"quantized layers; {self.claimed_share:.1%} of the weights claimed, {self.called_share:.1%} "
            "called"
        ]
        lines += [f"  {phase}" for phase in self.phases]
        lines += [f"  bypassed: {name}" for name in self.bypassed]
        lines += [f"  unused: {name}" for name in self.unused]
        lines += [f"  multiplied, in high precision: {name}" for name in self.multiplied]
        return "\n".join([*lines, *(f"  {finding}" for finding in self.gradients)])
